#pragma once
// Which tokens may be in a head's set and how many: the rule, never the loop over tokens (that is
// a backend's work). Pure functions.
#include <cstdint>

#include "clo/policy.h"
#include "ops/params.h"

namespace clo {

// Tokens that a selection chooses from: sinks are always attended and so are the last `recent`.
// The ring holds recent + maximum label age rows: a token that leaves it has been a candidate at
// the head's last selection, so none becomes invisible.
struct CandidateRange {
  int64_t first = 0;
  int64_t end = 0;
  int64_t size() const { return end > first ? end - first : 0; }
};
CandidateRange candidates(const PolicyOptions& policy, int64_t context_tokens);

// k at this context: max(256, kv_ratio x context rounded up to 64), or set_tokens.
int64_t set_size(const PolicyOptions& policy, int64_t context_tokens);

// With a quality to hold, the dial may make sets so many times larger than set_size() says.
inline constexpr double kMostSetScale = 2;

// A set size of the dial: a multiple of 64 tokens, no less than one.
int64_t scaled_set_size(int64_t set_tokens, double scale);

// Slots a head needs for its largest set in a context that grows to `max_context_tokens`.
int32_t slot_capacity(const PolicyOptions& policy, int64_t max_context_tokens);

// Rows in the ring: recent + maximum label age.
int32_t ring_tokens(const PolicyOptions& policy);

// What chooses: of kNone, which chooses nothing, as kHash.
SelectKind select_kind(Select select);

// Whether the set takes every candidate, so that nothing is chosen.
inline bool covers(const PolicyOptions& policy, int64_t context_tokens) {
  return set_size(policy, context_tokens) >= candidates(policy, context_tokens).size();
}

}  // namespace clo
