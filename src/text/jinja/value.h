#pragma once
// The values of a template: those of Python that Jinja shows. Strings, lists and dicts are shared
// and never change after they are made; only a Namespace does. Containers know how deeply they are
// nested, which bounds every recursion over them. Not shared between threads.
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "clo/result.h"
#include "text/jinja/work.h"

namespace clo::jinja {

class Value;
struct Statement;
using Values = std::vector<Value>;

struct None {};
// A name or item that is not there: prints as nothing, is false, and fails when it is used.
struct Undefined {
  std::shared_ptr<const std::string> what;  // "'x' is undefined"
};
struct List {
  Values items;
  bool is_tuple = false;
  int depth = 1;
};
struct Dict {
  std::vector<std::pair<Value, Value>> entries;  // in order of insertion
  int depth = 1;
};
struct Namespace {
  std::vector<std::pair<std::string, Value>> entries;
};
// The variable `loop` in one round of a for loop.
struct Loop {
  std::shared_ptr<const List> items;
  size_t index = 0;
};
// A macro of the template, or a global function by name.
struct Function {
  const Statement* macro = nullptr;
  std::string_view name;
};

class Value {
 public:
  using Text = std::shared_ptr<const std::string>;
  using ListPtr = std::shared_ptr<const List>;
  using DictPtr = std::shared_ptr<const Dict>;
  using NamespacePtr = std::shared_ptr<Namespace>;
  using LoopPtr = std::shared_ptr<const Loop>;

  Value() : held_(None{}) {}
  Value(bool value) : held_(value) {}
  Value(int64_t value) : held_(value) {}
  Value(double value) : held_(value) {}
  Value(std::string value) : held_(std::make_shared<const std::string>(std::move(value))) {}
  Value(Text value) : held_(std::move(value)) {}
  Value(ListPtr value) : held_(std::move(value)) {}
  Value(DictPtr value) : held_(std::move(value)) {}
  Value(NamespacePtr value) : held_(std::move(value)) {}
  Value(LoopPtr value) : held_(std::move(value)) {}
  Value(Function value) : held_(value) {}
  Value(const char*) = delete;  // would become a bool
  static Value undefined(std::string what);

  bool is_none() const { return std::holds_alternative<None>(held_); }
  bool is_undefined() const { return std::holds_alternative<Undefined>(held_); }
  const Undefined* as_undefined() const { return std::get_if<Undefined>(&held_); }
  const bool* as_bool() const { return std::get_if<bool>(&held_); }
  const int64_t* as_int() const { return std::get_if<int64_t>(&held_); }
  const double* as_float() const { return std::get_if<double>(&held_); }
  const std::string* as_text() const { return pointee<Text>(); }
  const List* as_list() const { return pointee<ListPtr>(); }
  const Dict* as_dict() const { return pointee<DictPtr>(); }
  Namespace* as_namespace() const { return pointee<NamespacePtr>(); }
  const Loop* as_loop() const { return pointee<LoopPtr>(); }
  const Function* as_function() const { return std::get_if<Function>(&held_); }
  ListPtr list_pointer() const { return std::get<ListPtr>(held_); }

 private:
  template <typename Pointer>
  typename Pointer::element_type* pointee() const {
    const Pointer* pointer = std::get_if<Pointer>(&held_);
    return pointer == nullptr ? nullptr : pointer->get();
  }
  std::variant<None, Undefined, bool, int64_t, double, Text, ListPtr, DictPtr, NamespacePtr,
               LoopPtr, Function>
      held_;
};

// Fails: kBadRequest past the nesting bound; kUnsupported for namespaces and loops as items.
Result<Value> make_list(Values items, bool is_tuple, Work& work);
// Later entries replace earlier ones of equal key. Fails: as make_list, and for keys that cannot
// be.
Result<Value> make_dict(std::vector<std::pair<Value, Value>> entries, Work& work);

// Python's name of the type, for messages.
std::string_view type_name(const Value& value);
bool truthy(const Value& value);
// The number of a bool, int or float. Nothing for other types.
bool is_number(const Value& value);
double as_double(const Value& value);

Result<bool> equal(const Value& a, const Value& b, Work& work);
// Python's a < b. Fails: kBadRequest for types without an order.
Result<bool> less(const Value& a, const Value& b, Work& work);
// The entry of a dict, or nullptr.
Result<const Value*> find_entry(const Dict& dict, const Value& key, Work& work);
// The items that a for loop visits. Fails: kBadRequest when the value is not iterable.
Result<Value::ListPtr> iterate(const Value& value, Work& work);

// Python's str() and repr().
Result<std::string> to_text(const Value& value, Work& work);
Status append_repr(const Value& value, std::string& out, Work& work);
std::string format_float(double value);

// Python's json.dumps. indent < 0: on one line.
struct JsonStyle {
  int64_t indent = -1;
  bool ensure_ascii = false;
  bool sort_keys = false;
};
Status append_json(const Value& value, const JsonStyle& style, std::string& out, Work& work);

}  // namespace clo::jinja
