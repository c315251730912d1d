#pragma once
// CLO_CHECK: the answer to a fault of this program. It prints the condition, the place and the
// values, then aborts, in every build. Input from outside never meets it: that is Result's job.
#include <sstream>
#include <string>

namespace clo::detail {
[[noreturn]] void check_failed(const char* condition, const char* file, int line,
                               const std::string& values);

template <typename... Values>
std::string join_values(const Values&... values) {
  std::ostringstream out;
  ((out << values << ' '), ...);
  return out.str();
}
}  // namespace clo::detail

#define CLO_CHECK(condition, ...)                                           \
  do {                                                                      \
    if (!(condition)) [[unlikely]]                                          \
      ::clo::detail::check_failed(#condition, __FILE__, __LINE__,           \
                                  ::clo::detail::join_values(__VA_ARGS__)); \
  } while (false)
