#pragma once
// CLO_TRY and CLO_ASSIGN: return the Error of a Result to the caller, otherwise go on.
#include "clo/result.h"

#define CLO_JOIN_INNER(a, b) a##b
#define CLO_JOIN(a, b) CLO_JOIN_INNER(a, b)

// CLO_TRY(status_expression);
#define CLO_TRY(expression)                                        \
  do {                                                             \
    auto clo_try_status = (expression);                            \
    if (!clo_try_status) return std::move(clo_try_status).error(); \
  } while (false)

// CLO_ASSIGN(auto name, result_expression);
#define CLO_ASSIGN(target, expression) \
  CLO_ASSIGN_NAMED(CLO_JOIN(clo_result_, __LINE__), target, expression)
#define CLO_ASSIGN_NAMED(name, target, expression) \
  auto name = (expression);                        \
  if (!name) return std::move(name).error();       \
  target = std::move(name).value()
