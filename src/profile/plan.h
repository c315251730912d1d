#pragma once
// What a profile says about a machine: which reuse threshold costs how much, which heads to keep on
// the device, and what is moved then. Arithmetic over the recorded trials; nothing is run.
#include <cstdint>
#include <vector>

#include "clo/policy.h"
#include "clo/result.h"
#include "profile/profile.h"

namespace clo {

struct PlanRequest {
  KvShape shape;         // rows and codes as the engine would hold them
  PolicyOptions policy;  // the set's size and what is always attended
  int64_t context_tokens = 0;
  int64_t budget_bytes = 0;    // device memory for the KV of one sequence
  double largest_loss = 0.05;  // of the exact set, weighted: see ReusePoint
  double link_bytes_per_second = 0;
  double step_seconds = 0;  // what a decode step may take
};

// One threshold, all heads together.
struct ReusePoint {
  double eta = 0, exponent = 0;
  double hit_rate = 0;       // mean over heads
  double set_loss = 0;       // mean over heads: share of the exact set that is not attended
  double weighted_loss = 0;  // the same, a head counting by its attention on neither sink nor
                             // recent: what a set lacks costs no more than what falls on sets
  double fetched = 0;        // mean over heads: rows fetched per step, as a share of the set
};

enum class Binding : uint8_t { kNothing, kDeviceMemory, kLink };

struct PersistentHead {
  int32_t layer = 0, kv_head = 0;
  double bytes_saved = 0;  // per step: what it would fetch
};

struct ResidencePlan {
  std::vector<ReusePoint> points;  // every pair that was tried
  size_t chosen = 0;  // of them: the highest hit rate within the loss, or the least loss
  bool within_loss = true;
  std::vector<PersistentHead> persistent;  // most bytes saved per byte of memory first
  int64_t num_heads = 0;
  int64_t device_bytes = 0;   // of all heads as planned
  int64_t least_bytes = 0;    // with no persistent head
  int64_t most_bytes = 0;     // with every head persistent
  double hit_rate = 0;        // of the heads that fetch
  double bytes_per_step = 0;  // what they fetch
  double fetch_seconds = 0;   // over the link
  Binding binding = Binding::kNothing;
};

// Fails: kBadRequest for a profile without trials, kDeviceMemory when the budget is too small even
// without persistent heads.
Result<ResidencePlan> plan_residence(const Profile& profile, const PlanRequest& request);

}  // namespace clo
