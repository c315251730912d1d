#include "text/jinja/value.h"

#include <algorithm>
#include <cmath>

#include "base/try.h"
#include "base/utf8.h"

namespace clo::jinja {

namespace {

constexpr int kMaxNesting = 60;

// How deep a container of `value` would be; -1 for what may not be an item: a namespace could
// contain itself.
int nesting(const Value& value) {
  if (const List* list = value.as_list()) return list->depth;
  if (const Dict* dict = value.as_dict()) return dict->depth;
  return value.as_namespace() != nullptr || value.as_loop() != nullptr ? -1 : 0;
}

Status deepen(const Value& item, int& depth, Work& work) {
  const int below = nesting(item);
  if (below < 0)
    return work.unsupported("a " + std::string(type_name(item)) + " inside a list or dict");
  depth = std::max(depth, below + 1);
  if (depth > kMaxNesting) return work.fail("values are nested too deeply");
  return Ok{};
}

Error undefined_error(const Value& value, Work& work) {
  return work.fail(*value.as_undefined()->what);
}

}  // namespace

Value Value::undefined(std::string what) {
  Value made;
  made.held_ = Undefined{std::make_shared<const std::string>(std::move(what))};
  return made;
}

Result<Value> make_list(Values items, bool is_tuple, Work& work) {
  CLO_TRY(work.spend_items(items.size()));
  int depth = 1;
  for (const Value& item : items) CLO_TRY(deepen(item, depth, work));
  return Value(std::make_shared<const List>(List{std::move(items), is_tuple, depth}));
}

Result<Value> make_dict(std::vector<std::pair<Value, Value>> entries, Work& work) {
  Dict dict;
  for (auto& [key, value] : entries) {
    if (key.as_list() != nullptr || key.as_dict() != nullptr)
      return work.fail("a " + std::string(type_name(key)) + " cannot be the key of a dict");
    CLO_TRY(deepen(key, dict.depth, work));
    CLO_TRY(deepen(value, dict.depth, work));
    size_t place = 0;
    for (; place < dict.entries.size(); ++place) {
      CLO_ASSIGN(const bool same, equal(dict.entries[place].first, key, work));
      if (same) break;
    }
    if (place < dict.entries.size()) {
      dict.entries[place].second = std::move(value);
    } else {
      dict.entries.emplace_back(std::move(key), std::move(value));
    }
  }
  return Value(std::make_shared<const Dict>(std::move(dict)));
}

std::string_view type_name(const Value& value) {
  if (value.is_none()) return "NoneType";
  if (value.is_undefined()) return "Undefined";
  if (value.as_bool() != nullptr) return "bool";
  if (value.as_int() != nullptr) return "int";
  if (value.as_float() != nullptr) return "float";
  if (value.as_text() != nullptr) return "str";
  if (const List* list = value.as_list()) return list->is_tuple ? "tuple" : "list";
  if (value.as_dict() != nullptr) return "dict";
  if (value.as_namespace() != nullptr) return "namespace";
  if (value.as_loop() != nullptr) return "loop";
  return "function";
}

bool truthy(const Value& value) {
  if (value.is_none() || value.is_undefined()) return false;
  if (const bool* flag = value.as_bool()) return *flag;
  if (const int64_t* number = value.as_int()) return *number != 0;
  if (const double* number = value.as_float()) return *number != 0;
  if (const std::string* text = value.as_text()) return !text->empty();
  if (const List* list = value.as_list()) return !list->items.empty();
  if (const Dict* dict = value.as_dict()) return !dict->entries.empty();
  return true;
}

bool is_number(const Value& value) {
  return value.as_bool() != nullptr || value.as_int() != nullptr || value.as_float() != nullptr;
}

double as_double(const Value& value) {
  if (const bool* flag = value.as_bool()) return *flag ? 1 : 0;
  if (const int64_t* number = value.as_int()) return static_cast<double>(*number);
  return *value.as_float();
}

namespace {

// bool or int as an integer; nothing for a float.
bool integer_of(const Value& value, int64_t& number) {
  if (const bool* flag = value.as_bool()) {
    number = *flag ? 1 : 0;
    return true;
  }
  if (const int64_t* held = value.as_int()) {
    number = *held;
    return true;
  }
  return false;
}

Result<bool> equal_dicts(const Dict& a, const Dict& b, Work& work) {
  if (a.entries.size() != b.entries.size()) return false;
  for (const auto& [key, value] : a.entries) {
    CLO_ASSIGN(const Value* other, find_entry(b, key, work));
    if (other == nullptr) return false;
    CLO_ASSIGN(const bool same, equal(value, *other, work));
    if (!same) return false;
  }
  return true;
}

}  // namespace

Result<bool> equal(const Value& a, const Value& b, Work& work) {
  CLO_TRY(work.spend(1));
  if (is_number(a) && is_number(b)) {
    int64_t left = 0, right = 0;
    if (integer_of(a, left) && integer_of(b, right)) return left == right;
    return as_double(a) == as_double(b);
  }
  if (a.as_text() != nullptr && b.as_text() != nullptr) {
    CLO_TRY(work.spend_bytes(std::min(a.as_text()->size(), b.as_text()->size())));
    return *a.as_text() == *b.as_text();
  }
  const List* left = a.as_list();
  const List* right = b.as_list();
  if (left != nullptr && right != nullptr) {
    if (left->is_tuple != right->is_tuple || left->items.size() != right->items.size())
      return false;
    for (size_t i = 0; i < left->items.size(); ++i) {
      CLO_ASSIGN(const bool same, equal(left->items[i], right->items[i], work));
      if (!same) return false;
    }
    return true;
  }
  if (a.as_dict() != nullptr && b.as_dict() != nullptr)
    return equal_dicts(*a.as_dict(), *b.as_dict(), work);
  if (a.as_function() != nullptr && b.as_function() != nullptr)
    return a.as_function()->macro == b.as_function()->macro &&
           a.as_function()->name == b.as_function()->name;
  if (a.as_namespace() != nullptr) return a.as_namespace() == b.as_namespace();
  if (a.as_loop() != nullptr) return a.as_loop() == b.as_loop();
  return (a.is_none() && b.is_none()) || (a.is_undefined() && b.is_undefined());
}

Result<bool> less(const Value& a, const Value& b, Work& work) {
  CLO_TRY(work.spend(1));
  if (a.is_undefined()) return undefined_error(a, work);
  if (b.is_undefined()) return undefined_error(b, work);
  if (is_number(a) && is_number(b)) {
    int64_t left = 0, right = 0;
    if (integer_of(a, left) && integer_of(b, right)) return left < right;
    return as_double(a) < as_double(b);
  }
  if (a.as_text() != nullptr && b.as_text() != nullptr) {
    CLO_TRY(work.spend_bytes(std::min(a.as_text()->size(), b.as_text()->size())));
    return *a.as_text() < *b.as_text();  // UTF-8 keeps the order of code points
  }
  const List* left = a.as_list();
  const List* right = b.as_list();
  if (left != nullptr && right != nullptr && left->is_tuple == right->is_tuple) {
    const size_t common = std::min(left->items.size(), right->items.size());
    for (size_t i = 0; i < common; ++i) {
      CLO_ASSIGN(const bool same, equal(left->items[i], right->items[i], work));
      if (!same) return less(left->items[i], right->items[i], work);
    }
    return left->items.size() < right->items.size();
  }
  return work.fail("'<' has no meaning between " + std::string(type_name(a)) + " and " +
                   std::string(type_name(b)));
}

Result<const Value*> find_entry(const Dict& dict, const Value& key, Work& work) {
  for (const auto& [candidate, value] : dict.entries) {
    CLO_ASSIGN(const bool same, equal(candidate, key, work));
    if (same) return &value;
  }
  return static_cast<const Value*>(nullptr);
}

Result<Value::ListPtr> iterate(const Value& value, Work& work) {
  if (value.as_list() != nullptr) {
    CLO_TRY(work.spend(1));
    return value.list_pointer();
  }
  List made;
  if (const std::string* text = value.as_text()) {
    CLO_TRY(work.spend_items(2 * text->size()));
    std::string_view rest = *text;
    while (!rest.empty()) {
      const size_t length = decode_utf8(rest).length;
      made.items.emplace_back(std::string(rest.substr(0, length)));
      rest.remove_prefix(length);
    }
  } else if (const Dict* dict = value.as_dict()) {
    CLO_TRY(work.spend_items(dict->entries.size()));
    for (const auto& entry : dict->entries) made.items.push_back(entry.first);
  } else if (!value.is_undefined()) {
    return work.fail("a " + std::string(type_name(value)) + " cannot be iterated over");
  }
  return Value::ListPtr(std::make_shared<const List>(std::move(made)));
}

}  // namespace clo::jinja
