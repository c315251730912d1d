#pragma once
// Result<T>: a value or an Error. Used wherever input from outside is handled; never ignored.
#include <cstdlib>
#include <utility>
#include <variant>

#include "clo/error.h"

namespace clo {

template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::in_place_index<0>, std::move(value)) {}
  Result(Error error) : state_(std::in_place_index<1>, std::move(error)) {}

  bool has_value() const { return state_.index() == 0; }
  explicit operator bool() const { return has_value(); }

  // Requires: has_value(). Aborts otherwise: reading an absent value is a fault of the program.
  T& value() & { return *checked(std::get_if<0>(&state_)); }
  const T& value() const& { return *checked(std::get_if<0>(&state_)); }
  T&& value() && { return std::move(*checked(std::get_if<0>(&state_))); }
  T& operator*() & { return value(); }
  const T& operator*() const& { return value(); }
  T* operator->() { return &value(); }
  const T* operator->() const { return &value(); }

  // Requires: !has_value().
  Error& error() & { return *checked(std::get_if<1>(&state_)); }
  const Error& error() const& { return *checked(std::get_if<1>(&state_)); }
  Error&& error() && { return std::move(*checked(std::get_if<1>(&state_))); }

 private:
  template <typename P>
  static P* checked(P* pointer) {
    if (pointer == nullptr) std::abort();
    return pointer;
  }
  std::variant<T, Error> state_;
};

// Result of an operation that yields nothing but success.
struct Ok {};
using Status = Result<Ok>;

}  // namespace clo
