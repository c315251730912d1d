#include "text/jinja/functions.h"

#include "base/check.h"
#include "base/try.h"

namespace clo::jinja {

namespace {

// As the sandbox of Jinja.
constexpr int64_t kMaxRange = 100'000;

Result<Value> call_range(const Values& arguments, Work& work) {
  if (arguments.empty() || arguments.size() > 3) return work.fail("range takes 1 to 3 integers");
  int64_t bounds[3] = {0, 0, 1};
  for (size_t i = 0; i < arguments.size(); ++i) {
    const int64_t* number = arguments[i].as_int();
    if (number == nullptr || *number > (int64_t{1} << 53) || *number < -(int64_t{1} << 53))
      return work.fail("range takes integers of at most 2^53, found a " +
                       std::string(type_name(arguments[i])));
    bounds[arguments.size() == 1 ? 1 : i] = *number;
  }
  const auto [begin, end, step] = bounds;
  if (step == 0) return work.fail("the step of a range is zero");
  const int64_t distance = step > 0 ? end - begin : begin - end;
  const int64_t size = step > 0 ? step : -step;
  const int64_t count = distance <= 0 ? 0 : (distance + size - 1) / size;
  if (count > kMaxRange)
    return work.fail("a range of " + std::to_string(count) + " numbers; at most " +
                     std::to_string(kMaxRange) + " are allowed");
  Values items;
  for (int64_t i = 0; i < count; ++i) items.emplace_back(begin + i * step);
  return make_list(std::move(items), false, work);
}

// Appends one conversion such as %d or %-d. Returns its length, 0 for one that is not known.
size_t append_time(std::string_view format, const std::tm& now, std::string& text) {
  size_t length = 1;
  if (length < format.size() && format[length] == '-') ++length;
  if (length >= format.size()) return 0;
  constexpr std::string_view kKnown = "aAbBcdeHIjmMpSuUwWxXyYDFT%";
  if (kKnown.find(format[length]) == std::string_view::npos) return 0;
  ++length;
  char formatted[128];
  const std::string one(format.substr(0, length));
  text.append(formatted, std::strftime(formatted, sizeof formatted, one.c_str(), &now));
  return length;
}

Result<Value> call_strftime(const Values& arguments, const std::tm& now, Work& work) {
  const std::string* given = arguments.size() == 1 ? arguments[0].as_text() : nullptr;
  if (given == nullptr) return work.fail("strftime_now takes one string");
  CLO_TRY(work.spend(static_cast<int64_t>(given->size()) * 32));
  std::string text;
  std::string_view format = *given;
  while (!format.empty()) {
    const size_t plain = std::min(format.find('%'), format.size());
    text += format.substr(0, plain);
    format.remove_prefix(plain);
    if (format.empty()) break;
    const size_t length = append_time(format, now, text);
    if (length == 0)
      return work.unsupported("strftime_now(\"" + *given + "\"): the conversion \"" +
                              std::string(format.substr(0, 2)) + "\"");
    format.remove_prefix(length);
  }
  return Value(std::move(text));
}

}  // namespace

Status set_namespace_entry(Namespace& space, const std::string& name, const Value& value,
                           Work& work) {
  if (value.as_namespace() != nullptr || value.as_loop() != nullptr)
    return work.unsupported("a " + std::string(type_name(value)) + " inside a namespace");
  CLO_TRY(work.spend(static_cast<int64_t>(space.entries.size()) + 1));
  for (auto& [key, held] : space.entries) {
    if (key != name) continue;
    held = value;
    return Ok{};
  }
  space.entries.emplace_back(name, value);
  return Ok{};
}

Result<Value> call_function(std::string_view name, Values arguments,
                            const std::vector<std::string>& keywords, const std::tm& now,
                            Work& work) {
  const bool takes_keywords = name == "namespace" || name == "dict";
  if (takes_keywords && arguments.size() != keywords.size())
    return work.unsupported(std::string(name) + "() with arguments that have no name");
  if (!takes_keywords && !keywords.empty())
    return work.fail(std::string(name) + "() takes no argument named \"" + keywords[0] + "\"");
  if (name == "range") return call_range(arguments, work);
  if (name == "strftime_now") return call_strftime(arguments, now, work);
  if (name == "raise_exception") {
    if (arguments.size() != 1) return work.fail("raise_exception takes one message");
    CLO_ASSIGN(std::string message, to_text(arguments[0], work));
    return Error{ErrorCode::kBadRequest, std::move(message), work.where()};
  }
  if (name == "namespace") {
    auto space = std::make_shared<Namespace>();
    for (size_t i = 0; i < arguments.size(); ++i)
      CLO_TRY(set_namespace_entry(*space, keywords[i], arguments[i], work));
    return Value(std::move(space));
  }
  CLO_CHECK(name == "dict", name);
  std::vector<std::pair<Value, Value>> entries;
  for (size_t i = 0; i < arguments.size(); ++i)
    entries.emplace_back(Value(keywords[i]), std::move(arguments[i]));
  return make_dict(std::move(entries), work);
}

}  // namespace clo::jinja
