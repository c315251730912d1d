#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>

#include "base/try.h"
#include "text/jinja/builtins.h"
#include "text/jinja/operators.h"
#include "text/jinja/strings.h"

namespace clo::jinja {

namespace {

bool flag(const Arguments& arguments, size_t index) {
  return arguments[index] && truthy(*arguments[index]);
}
bool given(const Arguments& arguments, size_t index) {
  return arguments[index] && !arguments[index]->is_none();
}

template <std::string (*change)(std::string_view)>
Result<Value> text_filter(const Value& self, const Arguments&, Work& work) {
  CLO_ASSIGN(const std::string text, to_text(self, work));
  return Value(change(text));
}

Result<Value> filter_trim(const Value& self, const Arguments& arguments, Work& work) {
  CLO_ASSIGN(const std::string text, to_text(self, work));
  if (!given(arguments, 0)) return Value(std::string(strip(text, Side::kBoth)));
  const std::string* chars = arguments[0]->as_text();
  if (chars == nullptr) return work.fail("trim needs a string of characters");
  CLO_TRY(work.spend_bytes(text.size() * std::min<size_t>(chars->size(), 4096)));
  return Value(std::string(strip(text, Side::kBoth, *chars)));
}

Result<Value> filter_string(const Value& self, const Arguments&, Work& work) {
  CLO_ASSIGN(std::string text, to_text(self, work));
  return Value(std::move(text));
}

// Markup in Jinja; the same text here, where nothing is escaped.
Result<Value> filter_safe(const Value& self, const Arguments& arguments, Work& work) {
  return filter_string(self, arguments, work);
}

Result<Value> filter_tojson(const Value& self, const Arguments& arguments, Work& work) {
  JsonStyle style;
  style.ensure_ascii = flag(arguments, 0);
  style.sort_keys = flag(arguments, 3);
  if (given(arguments, 1)) {
    if (arguments[1]->as_int() == nullptr) return work.unsupported("tojson with a text indent");
    style.indent = std::max<int64_t>(*arguments[1]->as_int(), 0);
  }
  if (given(arguments, 2)) return work.unsupported("tojson with separators");
  std::string out;
  CLO_TRY(append_json(self, style, out, work));
  return Value(std::move(out));
}

Result<Value> filter_length(const Value& self, const Arguments&, Work& work) {
  CLO_ASSIGN(const int64_t count, length(self, work));
  return Value(count);
}

Result<Value> filter_join(const Value& self, const Arguments& arguments, Work& work) {
  std::string separator;
  if (arguments[0]) {
    CLO_ASSIGN(separator, to_text(*arguments[0], work));
  }
  CLO_ASSIGN(const Value::ListPtr list, iterate(self, work));
  std::string joined;
  for (size_t i = 0; i < list->items.size(); ++i) {
    Value item = list->items[i];
    if (given(arguments, 1)) {
      CLO_ASSIGN(const std::string path, to_text(*arguments[1], work));
      CLO_ASSIGN(item, get_path(item, path, work));
    }
    CLO_ASSIGN(const std::string text, to_text(item, work));
    CLO_TRY(work.spend_bytes(separator.size()));
    if (i > 0) joined += separator;
    joined += text;
  }
  return Value(std::move(joined));
}

Result<Value> filter_default(const Value& self, const Arguments& arguments, Work&) {
  if (!self.is_undefined() && !(flag(arguments, 1) && !truthy(self))) return self;
  return arguments[0] ? *arguments[0] : Value(std::string());
}

Result<Value> filter_first(const Value& self, const Arguments&, Work& work) {
  CLO_ASSIGN(const Value::ListPtr list, iterate(self, work));
  if (list->items.empty()) return Value::undefined("the sequence has no first item");
  return list->items.front();
}

Result<Value> filter_last(const Value& self, const Arguments&, Work& work) {
  CLO_ASSIGN(const Value::ListPtr list, iterate(self, work));
  if (list->items.empty()) return Value::undefined("the sequence has no last item");
  return list->items.back();
}

Result<Value> filter_list(const Value& self, const Arguments&, Work& work) {
  CLO_ASSIGN(const Value::ListPtr list, iterate(self, work));
  return make_list(list->items, false, work);
}

Result<Value> filter_reverse(const Value& self, const Arguments&, Work& work) {
  if (self.as_text() != nullptr) return slice(self, std::nullopt, std::nullopt, -1, work);
  CLO_ASSIGN(const Value::ListPtr list, iterate(self, work));
  return make_list(Values(list->items.rbegin(), list->items.rend()), false, work);
}

Result<Value> filter_items(const Value& self, const Arguments&, Work& work) {
  if (!self.is_undefined() && self.as_dict() == nullptr)
    return work.fail("items needs a dict, found a " + std::string(type_name(self)));
  Values items;
  if (const Dict* dict = self.as_dict()) {
    for (const auto& [key, value] : dict->entries) {
      CLO_ASSIGN(Value pair, make_list({key, value}, true, work));
      items.push_back(std::move(pair));
    }
  }
  return make_list(std::move(items), false, work);
}

Result<Value> filter_replace(const Value& self, const Arguments& arguments, Work& work) {
  CLO_ASSIGN(const std::string text, to_text(self, work));
  CLO_ASSIGN(const std::string from, to_text(*arguments[0], work));
  CLO_ASSIGN(const std::string to, to_text(*arguments[1], work));
  int64_t most = -1;
  if (given(arguments, 2)) {
    if (arguments[2]->as_int() == nullptr) return work.fail("replace needs an integer count");
    most = *arguments[2]->as_int();
  }
  CLO_TRY(work.spend_search(text.size(), from.size()));
  CLO_TRY(work.spend_bytes(count_parts(text, from) * (to.size() + 1)));
  return Value(replace(text, from, to, most));
}

// A number in Python's spelling, surrounded by white space or not.
template <typename Number>
std::optional<Number> parse_number(std::string_view text) {
  text = strip(text, Side::kBoth);
  if (text.starts_with('+') && !text.starts_with("+-")) text.remove_prefix(1);
  Number number{};
  const auto result = std::from_chars(text.data(), text.data() + text.size(), number);
  if (result.ec != std::errc() || result.ptr != text.data() + text.size() || text.empty())
    return std::nullopt;
  return number;
}

std::optional<double> to_float(const Value& value) {
  if (is_number(value)) return as_double(value);
  if (value.as_text() != nullptr) return parse_number<double>(*value.as_text());
  return std::nullopt;
}

Result<Value> filter_float(const Value& self, const Arguments& arguments, Work& work) {
  if (const Undefined* undefined = self.as_undefined()) return work.fail(*undefined->what);
  if (const auto number = to_float(self)) return Value(*number);
  return arguments[0] ? *arguments[0] : Value(0.0);
}

Result<Value> filter_int(const Value& self, const Arguments& arguments, Work& work) {
  if (const Undefined* undefined = self.as_undefined()) return work.fail(*undefined->what);
  if (self.as_int() != nullptr) return self;
  if (self.as_text() != nullptr)
    if (const auto number = parse_number<int64_t>(*self.as_text())) return Value(*number);
  const auto real = to_float(self);
  if (!real || std::isnan(*real)) return arguments[0] ? *arguments[0] : Value(int64_t{0});
  if (std::fabs(*real) >= 0x1p63) return work.fail("a number does not fit into 64 bits");
  return Value(static_cast<int64_t>(*real));
}

Result<Value> filter_abs(const Value& self, const Arguments&, Work& work) {
  if (const double* real = self.as_float()) return Value(std::fabs(*real));
  if (!is_number(self)) return work.fail("abs needs a number");
  if (as_double(self) < 0) return negate(self, work);
  return self.as_int() != nullptr ? self : Value(int64_t{*self.as_bool() ? 1 : 0});
}

// What map and select walk over: anything that is false counts as empty, as in Jinja.
Result<Value::ListPtr> iterate_if_true(const Value& value, Work& work) {
  if (!truthy(value)) return Value::ListPtr(std::make_shared<const List>());
  return iterate(value, work);
}

Result<Value> filter_map(const Value& self, const Arguments& arguments, Work& work) {
  CLO_ASSIGN(const Value::ListPtr list, iterate_if_true(self, work));
  const Builtin* filter = arguments[0] ? find_filter(*arguments[0]->as_text()) : nullptr;
  Arguments passed;
  if (filter == nullptr && !given(arguments, 3))
    return work.fail("map needs a filter or attribute");
  if (filter != nullptr) {
    passed.resize(filter->parameters.size());
    for (size_t i = 0; i < 2 && i < passed.size(); ++i) passed[i] = arguments[i + 1];
    for (size_t i = 0; i < filter->required; ++i)
      if (!passed[i]) return work.fail("map: a filter needs more arguments");
  }
  Values items;
  for (const Value& item : list->items) {
    if (filter != nullptr) {
      CLO_ASSIGN(Value made, filter->apply(item, passed, work));
      items.push_back(std::move(made));
      continue;
    }
    CLO_ASSIGN(const std::string path, to_text(*arguments[3], work));
    CLO_ASSIGN(Value made, get_path(item, path, work));
    if (made.is_undefined() && arguments[4]) made = *arguments[4];
    items.push_back(std::move(made));
  }
  return make_list(std::move(items), false, work);
}

// Keeps the items that pass (or fail) a test, of themselves or of an attribute.
template <bool keeps, bool by_attribute>
Result<Value> filter_select(const Value& self, const Arguments& arguments, Work& work) {
  constexpr size_t kTest = by_attribute ? 1 : 0;
  CLO_ASSIGN(const Value::ListPtr list, iterate_if_true(self, work));
  const Builtin* test = arguments[kTest] ? find_test(*arguments[kTest]->as_text()) : nullptr;
  Arguments passed;
  if (test != nullptr) {
    passed.resize(test->parameters.size());
    if (!passed.empty()) passed[0] = arguments[kTest + 1];
    if (test->required > 0 && !passed[0]) return work.fail("a test needs an argument");
  }
  Values items;
  for (const Value& item : list->items) {
    Value tested = item;
    if constexpr (by_attribute) {
      CLO_ASSIGN(const std::string path, to_text(*arguments[0], work));
      CLO_ASSIGN(tested, get_path(item, path, work));
    }
    if (test != nullptr) {
      CLO_ASSIGN(tested, test->apply(tested, passed, work));
    }
    if (truthy(tested) == keeps) items.push_back(item);
  }
  return make_list(std::move(items), false, work);
}

const std::vector<Builtin>& filters() {
  static const std::vector<Builtin> kFilters = {
      {"abs", {}, 0, filter_abs},
      {"capitalize", {}, 0, text_filter<capitalize>},
      {"count", {}, 0, filter_length},
      {"d", {"default_value", "boolean"}, 0, filter_default},
      {"default", {"default_value", "boolean"}, 0, filter_default},
      {"first", {}, 0, filter_first},
      {"float", {"default"}, 0, filter_float},
      {"int", {"default"}, 0, filter_int},
      {"items", {}, 0, filter_items},
      {"join", {"d", "attribute"}, 0, filter_join},
      {"last", {}, 0, filter_last},
      {"length", {}, 0, filter_length},
      {"list", {}, 0, filter_list},
      {"lower", {}, 0, text_filter<lower>},
      {"map", {"name", "argument", "argument2", "attribute", "default"}, 0, filter_map},
      {"reject", {"name", "argument"}, 0, filter_select<false, false>},
      {"rejectattr", {"attribute", "name", "argument"}, 1, filter_select<false, true>},
      {"replace", {"old", "new", "count"}, 2, filter_replace},
      {"reverse", {}, 0, filter_reverse},
      {"safe", {}, 0, filter_safe},
      {"select", {"name", "argument"}, 0, filter_select<true, false>},
      {"selectattr", {"attribute", "name", "argument"}, 1, filter_select<true, true>},
      {"string", {}, 0, filter_string},
      {"title", {}, 0, text_filter<title_filter>},
      {"tojson", {"ensure_ascii", "indent", "separators", "sort_keys"}, 0, filter_tojson},
      {"trim", {"chars"}, 0, filter_trim},
      {"upper", {}, 0, text_filter<upper>},
  };
  return kFilters;
}

}  // namespace

const Builtin* find_filter(std::string_view name) {
  for (const Builtin& filter : filters())
    if (filter.name == name) return &filter;
  return nullptr;
}

}  // namespace clo::jinja
