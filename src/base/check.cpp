#include "base/check.h"

#include <cstdio>
#include <cstdlib>

namespace clo::detail {

void check_failed(const char* condition, const char* file, int line, const std::string& values) {
  std::fprintf(stderr, "clo: internal fault at %s:%d: %s does not hold [%s]\n", file, line,
               condition, values.c_str());
  std::abort();
}

}  // namespace clo::detail
