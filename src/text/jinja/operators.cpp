#include "text/jinja/operators.h"

#include <algorithm>
#include <charconv>
#include <cmath>

#include "base/try.h"
#include "text/jinja/builtins.h"
#include "text/jinja/strings.h"

namespace clo::jinja {

namespace {

std::string_view spelling(Operator op) {
  switch (op) {
    case Operator::kAdd:
      return "+";
    case Operator::kSubtract:
      return "-";
    case Operator::kMultiply:
      return "*";
    case Operator::kDivide:
      return "/";
    case Operator::kFloorDivide:
      return "//";
    case Operator::kModulo:
      return "%";
    case Operator::kPower:
      return "**";
    default:
      return "comparison";
  }
}

std::optional<int64_t> as_integer(const Value& value) {
  if (const bool* flag = value.as_bool()) return *flag ? 1 : 0;
  if (const int64_t* number = value.as_int()) return *number;
  return std::nullopt;
}

Result<Value> integer_power(int64_t base, int64_t exponent, Work& work) {
  int64_t result = 1;
  // |base| <= 1 never overflows; anything larger does within 63 rounds.
  if (base == 0 || base == 1 || base == -1) {
    if (exponent == 0) return Value(int64_t{1});
    return Value(base == -1 && exponent % 2 == 0 ? int64_t{1} : base);
  }
  for (int64_t i = 0; i < exponent; ++i)
    if (__builtin_mul_overflow(result, base, &result))
      return work.fail("the result of ** does not fit into 64 bits");
  return Value(result);
}

Result<Value> integer_binary(Operator op, int64_t a, int64_t b, Work& work) {
  int64_t result = 0;
  bool overflow = false;
  switch (op) {
    case Operator::kAdd:
      overflow = __builtin_add_overflow(a, b, &result);
      break;
    case Operator::kSubtract:
      overflow = __builtin_sub_overflow(a, b, &result);
      break;
    case Operator::kMultiply:
      overflow = __builtin_mul_overflow(a, b, &result);
      break;
    case Operator::kPower:
      if (b < 0) return Value(std::pow(static_cast<double>(a), static_cast<double>(b)));
      return integer_power(a, b, work);
    case Operator::kDivide:
      if (b == 0) return work.fail("division by zero");
      return Value(static_cast<double>(a) / static_cast<double>(b));
    default:  // kFloorDivide, kModulo
      if (b == 0) return work.fail("division by zero");
      if (b == -1) {  // INT64_MIN / -1 overflows
        if (op == Operator::kModulo) return Value(int64_t{0});
        overflow = __builtin_sub_overflow(int64_t{0}, a, &result);
        break;
      }
      const int64_t remainder = a % b;
      const bool moves = remainder != 0 && (remainder < 0) != (b < 0);
      result = op == Operator::kModulo ? remainder + (moves ? b : 0) : a / b - (moves ? 1 : 0);
  }
  if (overflow)
    return work.fail("the result of " + std::string(spelling(op)) + " does not fit into 64 bits");
  return Value(result);
}

Result<Value> float_binary(Operator op, double a, double b, Work& work) {
  switch (op) {
    case Operator::kAdd:
      return Value(a + b);
    case Operator::kSubtract:
      return Value(a - b);
    case Operator::kMultiply:
      return Value(a * b);
    case Operator::kPower:
      if (a < 0 && b != std::floor(b)) return work.unsupported("a complex power");
      if (a == 0 && b < 0) return work.fail("division by zero");
      return Value(std::pow(a, b));
    default:
      break;
  }
  if (b == 0) return work.fail("division by zero");
  if (op == Operator::kDivide) return Value(a / b);
  // As CPython's float_divmod: exact remainder, then a quotient rounded to the nearest integer.
  double remainder = std::fmod(a, b);
  double quotient = (a - remainder) / b;
  if (remainder != 0) {
    if ((b < 0) != (remainder < 0)) {
      remainder += b;
      quotient -= 1;
    }
  } else {
    remainder = std::copysign(0.0, b);
  }
  if (op == Operator::kModulo) return Value(remainder);
  if (quotient == 0) return Value(std::copysign(0.0, a / b));
  double whole = std::floor(quotient);
  if (quotient - whole > 0.5) whole += 1;
  return Value(whole);
}

Result<Value> repeat(const Value& value, int64_t count, Work& work) {
  count = std::max<int64_t>(count, 0);
  if (const std::string* text = value.as_text()) {
    if (!text->empty() && count > (int64_t{1} << 40) / static_cast<int64_t>(text->size()))
      return work.fail("the result of * is too long");
    CLO_TRY(work.spend(count));
    CLO_TRY(work.spend_bytes(text->size() * static_cast<size_t>(count)));
    std::string made;
    made.reserve(text->size() * static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i) made += *text;
    return Value(std::move(made));
  }
  const List& list = *value.as_list();
  const auto size = static_cast<int64_t>(list.items.size());
  if (size > 0 && count > (int64_t{1} << 40) / size)
    return work.fail("the result of * is too long");
  CLO_TRY(work.spend_items(static_cast<size_t>(count * size)));
  Values items;
  for (int64_t i = 0; size > 0 && i < count; ++i)
    items.insert(items.end(), list.items.begin(), list.items.end());
  return make_list(std::move(items), list.is_tuple, work);
}

}  // namespace

Result<Value> binary(Operator op, const Value& left, const Value& right, Work& work) {
  for (const Value* side : {&left, &right})
    if (const Undefined* undefined = side->as_undefined()) return work.fail(*undefined->what);
  const auto a = as_integer(left), b = as_integer(right);
  if (a && b) return integer_binary(op, *a, *b, work);
  if (is_number(left) && is_number(right))
    return float_binary(op, as_double(left), as_double(right), work);

  const std::string* left_text = left.as_text();
  const List* left_list = left.as_list();
  if (op == Operator::kAdd && left_text != nullptr && right.as_text() != nullptr) {
    CLO_TRY(work.spend_bytes(left_text->size() + right.as_text()->size()));
    return Value(*left_text + *right.as_text());
  }
  if (op == Operator::kAdd && left_list != nullptr && right.as_list() != nullptr &&
      left_list->is_tuple == right.as_list()->is_tuple) {
    Values items = left_list->items;
    items.insert(items.end(), right.as_list()->items.begin(), right.as_list()->items.end());
    return make_list(std::move(items), left_list->is_tuple, work);
  }
  if (op == Operator::kMultiply) {
    if ((left_text != nullptr || left_list != nullptr) && b) return repeat(left, *b, work);
    if ((right.as_text() != nullptr || right.as_list() != nullptr) && a)
      return repeat(right, *a, work);
  }
  if (op == Operator::kModulo && left_text != nullptr)
    return work.unsupported("formatting a string with %");
  std::string message = "'";
  message.append(spelling(op)).append("' has no meaning between ").append(type_name(left));
  return work.fail(message.append(" and ").append(type_name(right)));
}

Result<Value> negate(const Value& value, Work& work) {
  if (const auto number = as_integer(value))
    return integer_binary(Operator::kSubtract, 0, *number, work);
  if (const double* real = value.as_float()) return Value(-*real);
  if (const Undefined* undefined = value.as_undefined()) return work.fail(*undefined->what);
  return work.fail("'-' has no meaning before a " + std::string(type_name(value)));
}

namespace {

Result<bool> contains(const Value& container, const Value& item, Work& work) {
  if (const std::string* text = container.as_text()) {
    if (item.as_text() == nullptr)
      return work.fail("'in' a string needs a string, found a " + std::string(type_name(item)));
    CLO_TRY(work.spend_search(text->size(), item.as_text()->size()));
    return text->find(*item.as_text()) != std::string::npos;
  }
  CLO_ASSIGN(const Value::ListPtr list, iterate(container, work));
  for (const Value& candidate : list->items) {
    CLO_ASSIGN(const bool same, equal(candidate, item, work));
    if (same) return true;
  }
  return false;
}

}  // namespace

Result<bool> compare(Operator op, const Value& left, const Value& right, Work& work) {
  switch (op) {
    case Operator::kEqual:
      return equal(left, right, work);
    case Operator::kNotEqual: {
      CLO_ASSIGN(const bool same, equal(left, right, work));
      return !same;
    }
    case Operator::kIn:
      return contains(right, left, work);
    case Operator::kNotIn: {
      CLO_ASSIGN(const bool inside, contains(right, left, work));
      return !inside;
    }
    case Operator::kLess:
      return less(left, right, work);
    case Operator::kGreater:
      return less(right, left, work);
    default:
      break;
  }
  const bool at_most = op == Operator::kLessEqual;
  CLO_ASSIGN(const bool strictly, at_most ? less(left, right, work) : less(right, left, work));
  if (strictly) return true;
  return equal(left, right, work);
}

namespace {

Value missing(const Value& object, std::string_view name) {
  std::string what = "'";
  what.append(type_name(object)).append(" object' has no attribute '").append(name).append("'");
  return Value::undefined(std::move(what));
}

Value loop_attribute(const Value& object, std::string_view name) {
  const Loop& loop = *object.as_loop();
  const auto index = static_cast<int64_t>(loop.index);
  const auto size = static_cast<int64_t>(loop.items->items.size());
  if (name == "index") return Value(index + 1);
  if (name == "index0") return Value(index);
  if (name == "revindex") return Value(size - index);
  if (name == "revindex0") return Value(size - index - 1);
  if (name == "first") return Value(index == 0);
  if (name == "last") return Value(index + 1 == size);
  if (name == "length") return Value(size);
  if (name == "depth") return Value(int64_t{1});
  if (name == "depth0") return Value(int64_t{0});
  if (name == "previtem")
    return index == 0 ? Value::undefined("there is no previous item")
                      : loop.items->items[loop.index - 1];
  if (name == "nextitem")
    return index + 1 == size ? Value::undefined("there is no next item")
                             : loop.items->items[loop.index + 1];
  return missing(object, name);
}

// The attribute of an object that has attributes; nothing for one that has only items.
std::optional<Value> own_attribute(const Value& object, std::string_view name) {
  if (const Namespace* space = object.as_namespace()) {
    for (const auto& [key, value] : space->entries)
      if (key == name) return value;
    return missing(object, name);
  }
  if (object.as_loop() != nullptr) return loop_attribute(object, name);
  return std::nullopt;
}

}  // namespace

Result<Value> get_item(const Value& object, const Value& key, Work& work) {
  CLO_TRY(work.spend(1));
  if (const Undefined* undefined = object.as_undefined()) return work.fail(*undefined->what);
  if (const Dict* dict = object.as_dict()) {
    CLO_ASSIGN(const Value* found, find_entry(*dict, key, work));
    if (found != nullptr) return *found;
  }
  const auto index = as_integer(key);
  if (const List* list = object.as_list(); list != nullptr && index) {
    const auto size = static_cast<int64_t>(list->items.size());
    const int64_t place = *index < 0 ? *index + size : *index;
    if (place >= 0 && place < size) return list->items[static_cast<size_t>(place)];
  }
  if (const std::string* text = object.as_text(); text != nullptr && index) {
    CLO_TRY(work.spend_bytes(text->size()));
    const auto size = static_cast<int64_t>(count_characters(*text));
    const int64_t place = *index < 0 ? *index + size : *index;
    if (place >= 0 && place < size) {
      const size_t begin = character_offset(*text, static_cast<size_t>(place));
      const std::string_view rest = std::string_view(*text).substr(begin);
      return Value(std::string(rest.substr(0, character_offset(rest, 1))));
    }
  }
  if (const std::string* name = key.as_text())
    if (const auto attribute = own_attribute(object, *name)) return *attribute;
  CLO_ASSIGN(const std::string shown, to_text(key, work));
  return missing(object, shown);
}

Result<Value> get_attribute(const Value& object, std::string_view name, Work& work) {
  if (const auto attribute = own_attribute(object, name)) return *attribute;
  const bool has_methods = object.as_text() != nullptr || object.as_dict() != nullptr;
  if (has_methods && find_method(name) != nullptr) {
    // In Jinja a method wins over a key of the same name.
    const Dict* dict = object.as_dict();
    const bool of_dict = name == "items" || name == "keys" || name == "values" || name == "get";
    if (of_dict == (dict != nullptr))
      return work.unsupported("the method " + std::string(name) + " without a call");
  }
  return get_item(object, Value(std::string(name)), work);
}

Result<Value> get_path(const Value& object, std::string_view path, Work& work) {
  Value at = object;
  for (const std::string& part : split(path, ".", -1, false)) {
    int64_t index = 0;
    const char* end = part.data() + part.size();
    const bool is_index =
        !part.empty() && part[0] != '-' && std::from_chars(part.data(), end, index).ptr == end;
    CLO_ASSIGN(at, get_item(at, is_index ? Value(index) : Value(part), work));
  }
  return at;
}

Result<Value> slice(const Value& object, std::optional<int64_t> begin, std::optional<int64_t> end,
                    std::optional<int64_t> step_given, Work& work) {
  if (const Undefined* undefined = object.as_undefined()) return work.fail(*undefined->what);
  if (object.as_text() == nullptr && object.as_list() == nullptr)
    return work.fail("a " + std::string(type_name(object)) + " cannot be sliced");
  const int64_t step = step_given.value_or(1);
  if (step == 0) return work.fail("the step of a slice is zero");
  CLO_ASSIGN(const int64_t size, length(object, work));
  const auto bound = [&](std::optional<int64_t> given, int64_t otherwise) {
    if (!given) return otherwise;
    const int64_t place = *given < 0 ? *given + size : *given;
    return step > 0 ? std::clamp<int64_t>(place, 0, size)
                    : std::clamp<int64_t>(place, -1, size - 1);
  };
  const int64_t first = bound(begin, step > 0 ? 0 : size - 1);
  const int64_t past = bound(end, step > 0 ? size : -1);
  if (object.as_text() != nullptr && step == 1) {
    const std::string_view text = *object.as_text();
    const size_t from = character_offset(text, static_cast<size_t>(first));
    const std::string_view tail = text.substr(from);
    const auto count = static_cast<size_t>(std::max<int64_t>(past - first, 0));
    return Value(std::string(tail.substr(0, character_offset(tail, count))));
  }
  // Otherwise a string is sliced as the list of its characters.
  CLO_ASSIGN(const Value::ListPtr list, iterate(object, work));
  Values items;
  // A step beyond the size visits one item; clamping it keeps the sum from overflowing.
  const int64_t stride = std::clamp<int64_t>(step, -size - 1, size + 1);
  for (int64_t i = first; step > 0 ? i < past : i > past; i += stride)
    items.push_back(list->items[static_cast<size_t>(i)]);
  if (object.as_list() != nullptr)
    return make_list(std::move(items), object.as_list()->is_tuple, work);
  std::string text;
  for (const Value& item : items) text += *item.as_text();
  return Value(std::move(text));
}

Result<int64_t> length(const Value& value, Work& work) {
  if (const std::string* text = value.as_text()) {
    CLO_TRY(work.spend_bytes(text->size()));
    return static_cast<int64_t>(count_characters(*text));
  }
  if (const List* list = value.as_list()) return static_cast<int64_t>(list->items.size());
  if (const Dict* dict = value.as_dict()) return static_cast<int64_t>(dict->entries.size());
  if (value.is_undefined()) return int64_t{0};
  if (const Loop* loop = value.as_loop()) return static_cast<int64_t>(loop->items->items.size());
  return work.fail("a " + std::string(type_name(value)) + " has no length");
}

}  // namespace clo::jinja
