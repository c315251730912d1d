#pragma once
// A policy and what tables call it.
#include <string>

#include "clo/policy.h"

namespace clo {

struct NamedPolicy {
  std::string name;
  PolicyOptions options;
};

}  // namespace clo
