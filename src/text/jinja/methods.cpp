#include <algorithm>

#include "base/try.h"
#include "text/jinja/builtins.h"
#include "text/jinja/operators.h"
#include "text/jinja/strings.h"

namespace clo::jinja {

namespace {

Error no_method(const Value& self, Work& work) {
  if (const Undefined* undefined = self.as_undefined()) return work.fail(*undefined->what);
  return work.fail("a " + std::string(type_name(self)) + " has no such method");
}

// The text of a method's object, paid for.
Result<std::string_view> text_of(const Value& self, Work& work) {
  const std::string* text = self.as_text();
  if (text == nullptr) return no_method(self, work);
  CLO_TRY(work.spend_bytes(text->size()));
  return std::string_view(*text);
}

Result<std::string_view> text_argument(const Arguments& arguments, size_t index, Work& work) {
  const std::string* text = arguments[index] ? arguments[index]->as_text() : nullptr;
  if (text == nullptr)
    return work.fail("a method of a string needs a string, found a " +
                     std::string(arguments[index] ? type_name(*arguments[index]) : "nothing"));
  CLO_TRY(work.spend_bytes(text->size()));
  return std::string_view(*text);
}

Result<int64_t> count_argument(const Arguments& arguments, size_t index, Work& work) {
  if (!arguments[index]) return int64_t{-1};
  if (arguments[index]->as_int() == nullptr) return work.fail("a method needs an integer");
  return *arguments[index]->as_int();
}

template <std::string (*change)(std::string_view)>
Result<Value> text_method(const Value& self, const Arguments&, Work& work) {
  CLO_ASSIGN(const std::string_view text, text_of(self, work));
  return Value(change(text));
}

template <Side side>
Result<Value> method_strip(const Value& self, const Arguments& arguments, Work& work) {
  CLO_ASSIGN(const std::string_view text, text_of(self, work));
  if (!arguments[0] || arguments[0]->is_none()) return Value(std::string(strip(text, side)));
  CLO_ASSIGN(const std::string_view chars, text_argument(arguments, 0, work));
  CLO_TRY(work.spend_bytes(text.size() * std::min<size_t>(chars.size(), 4096)));
  return Value(std::string(strip(text, side, chars)));
}

template <bool at_start>
Result<Value> method_affix(const Value& self, const Arguments& arguments, Work& work) {
  CLO_ASSIGN(const std::string_view text, text_of(self, work));
  const List* several = arguments[0]->as_list();
  const size_t count = several != nullptr ? several->items.size() : 1;
  for (size_t i = 0; i < count; ++i) {
    const Arguments one = {several != nullptr ? several->items[i] : *arguments[0]};
    CLO_ASSIGN(const std::string_view affix, text_argument(one, 0, work));
    if (at_start ? text.starts_with(affix) : text.ends_with(affix)) return Value(true);
  }
  return Value(false);
}

template <bool from_right>
Result<Value> method_split(const Value& self, const Arguments& arguments, Work& work) {
  CLO_ASSIGN(const std::string_view text, text_of(self, work));
  std::optional<std::string_view> separator;
  if (arguments[0] && !arguments[0]->is_none()) {
    CLO_ASSIGN(separator, text_argument(arguments, 0, work));
    CLO_TRY(work.spend_search(text.size(), separator->size()));
    if (separator->empty()) return work.fail("split needs a separator that is not empty");
  }
  CLO_ASSIGN(const int64_t most, count_argument(arguments, 1, work));
  Values items;
  for (std::string& part : split(text, separator, most, from_right))
    items.emplace_back(std::move(part));
  return make_list(std::move(items), false, work);
}

Result<Value> method_splitlines(const Value& self, const Arguments&, Work& work) {
  CLO_ASSIGN(const std::string_view text, text_of(self, work));
  Values items;
  for (std::string& line : split_lines(text)) items.emplace_back(std::move(line));
  return make_list(std::move(items), false, work);
}

Result<Value> method_replace(const Value& self, const Arguments& arguments, Work& work) {
  CLO_ASSIGN(const std::string_view text, text_of(self, work));
  CLO_ASSIGN(const std::string_view from, text_argument(arguments, 0, work));
  CLO_ASSIGN(const std::string_view to, text_argument(arguments, 1, work));
  CLO_ASSIGN(const int64_t most, count_argument(arguments, 2, work));
  CLO_TRY(work.spend_search(text.size(), from.size()));
  CLO_TRY(work.spend_bytes(count_parts(text, from) * (to.size() + 1)));
  return Value(replace(text, from, to, most));
}

template <bool from_right>
Result<Value> method_find(const Value& self, const Arguments& arguments, Work& work) {
  CLO_ASSIGN(const std::string_view text, text_of(self, work));
  CLO_ASSIGN(const std::string_view part, text_argument(arguments, 0, work));
  CLO_TRY(work.spend_search(text.size(), part.size()));
  const size_t place = from_right ? text.rfind(part) : text.find(part);
  if (place == std::string_view::npos) return Value(int64_t{-1});
  return Value(static_cast<int64_t>(count_characters(text.substr(0, place))));
}

Result<Value> method_count(const Value& self, const Arguments& arguments, Work& work) {
  if (const List* list = self.as_list()) {
    int64_t count = 0;
    for (const Value& item : list->items) {
      CLO_ASSIGN(const bool same, equal(item, *arguments[0], work));
      count += same ? 1 : 0;
    }
    return Value(count);
  }
  CLO_ASSIGN(const std::string_view text, text_of(self, work));
  CLO_ASSIGN(const std::string_view part, text_argument(arguments, 0, work));
  CLO_TRY(work.spend_search(text.size(), part.size()));
  return Value(static_cast<int64_t>(count_parts(text, part)));
}

template <bool at_start>
Result<Value> method_remove(const Value& self, const Arguments& arguments, Work& work) {
  CLO_ASSIGN(std::string_view text, text_of(self, work));
  CLO_ASSIGN(const std::string_view affix, text_argument(arguments, 0, work));
  if (at_start && text.starts_with(affix)) text.remove_prefix(affix.size());
  if (!at_start && text.ends_with(affix)) text.remove_suffix(affix.size());
  return Value(std::string(text));
}

Result<Value> method_join(const Value& self, const Arguments& arguments, Work& work) {
  CLO_ASSIGN(const std::string_view separator, text_of(self, work));
  CLO_ASSIGN(const Value::ListPtr list, iterate(*arguments[0], work));
  std::string joined;
  for (size_t i = 0; i < list->items.size(); ++i) {
    CLO_ASSIGN(const std::string_view part, text_argument({list->items[i]}, 0, work));
    CLO_TRY(work.spend_bytes(separator.size()));
    if (i > 0) joined += separator;
    joined += part;
  }
  return Value(std::move(joined));
}

Result<Value> method_items(const Value& self, const Arguments& arguments, Work& work) {
  if (self.as_dict() == nullptr) return no_method(self, work);
  return find_filter("items")->apply(self, arguments, work);
}

template <bool wants_keys>
Result<Value> method_entries(const Value& self, const Arguments&, Work& work) {
  if (self.as_dict() == nullptr) return no_method(self, work);
  Values items;
  for (const auto& [key, value] : self.as_dict()->entries)
    items.push_back(wants_keys ? key : value);
  return make_list(std::move(items), false, work);
}

Result<Value> method_get(const Value& self, const Arguments& arguments, Work& work) {
  if (self.as_dict() == nullptr) return no_method(self, work);
  CLO_ASSIGN(const Value* found, find_entry(*self.as_dict(), *arguments[0], work));
  if (found != nullptr) return *found;
  return arguments[1] ? *arguments[1] : Value();
}

const std::vector<Builtin>& methods() {
  static const std::vector<Builtin> kMethods = {
      {"capitalize", {}, 0, text_method<capitalize>},
      {"count", {"part"}, 1, method_count},
      {"endswith", {"suffix"}, 1, method_affix<false>},
      {"find", {"part"}, 1, method_find<false>},
      {"get", {"key", "default"}, 1, method_get},
      {"items", {}, 0, method_items},
      {"join", {"parts"}, 1, method_join},
      {"keys", {}, 0, method_entries<true>},
      {"lower", {}, 0, text_method<lower>},
      {"lstrip", {"chars"}, 0, method_strip<Side::kLeft>},
      {"removeprefix", {"prefix"}, 1, method_remove<true>},
      {"removesuffix", {"suffix"}, 1, method_remove<false>},
      {"replace", {"old", "new", "count"}, 2, method_replace},
      {"rfind", {"part"}, 1, method_find<true>},
      {"rsplit", {"sep", "maxsplit"}, 0, method_split<true>},
      {"rstrip", {"chars"}, 0, method_strip<Side::kRight>},
      {"split", {"sep", "maxsplit"}, 0, method_split<false>},
      {"splitlines", {}, 0, method_splitlines},
      {"startswith", {"prefix"}, 1, method_affix<true>},
      {"strip", {"chars"}, 0, method_strip<Side::kBoth>},
      {"title", {}, 0, text_method<title>},
      {"upper", {}, 0, text_method<upper>},
      {"values", {}, 0, method_entries<false>},
  };
  return kMethods;
}

}  // namespace

const Builtin* find_method(std::string_view name) {
  for (const Builtin& method : methods())
    if (method.name == name) return &method;
  return nullptr;
}

}  // namespace clo::jinja
