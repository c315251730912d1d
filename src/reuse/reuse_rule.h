#pragma once
// The CLO reuse rule: may a head keep the set it has? The query of each step is compared with the
// label, the query that chose the set; only a miss replaces the label, so drift is bounded.
// Pure functions. Source: arXiv 2511.14510 (threshold by importance), as reconstructed in docs.
#include <cstdint>
#include <span>

#include "clo/policy.h"

namespace clo {

// tau of a query head with importance s in [0, 1]: the angle is interpolated between acos(eta)
// for s = 1 (strict) and pi for s = 0 (always a hit). A plain threshold is the same for all.
double head_threshold(const PolicyOptions& policy, float importance);

// tau of a decision made ahead of a correction: (1 - margin) of the angle that `tau` allows. Always
// and never (-1, above 1) stay what they are. margin at most 1; below 0 more is allowed, up to half
// a turn.
double ahead_threshold(double tau, double margin);

// The margin of a policy's predictions: none where they are final.
double prefetch_margin(const PolicyOptions& policy);

// Whether the cosines of one group's query heads allow the set to stay. A NaN is a miss; a
// threshold above 1 is always a miss, -1 always a hit.
//   mean      mean cosine against tau of the mean importance
//   weighted  importance-weighted mean cosine against tau of the largest importance
//   all       each query head against its own tau
// `margin`: as ahead_threshold; 0 where the answer is final.
bool similar_enough(const PolicyOptions& policy, std::span<const float> cosine,
                    std::span<const float> importance, double margin = 0);

// Why a set is kept or chosen again; counted apart in reports.
enum class Decision : uint8_t { kHit, kMiss, kAged, kIncomplete };

struct SetHistory {
  bool has_label = false;
  int64_t label_length = 0;    // context length when the set was chosen
  int64_t candidates_end = 0;  // candidates of that choice
  bool took_all = true;        // the set holds every candidate of that choice
  bool too_small = false;      // far smaller than a set is to be by now
};

// The decision for a context of `context_tokens`. Beside the cosine: a set older than the maximum
// label age is chosen again, and so is one that could hold every candidate but lacks some, or that
// is too small.
Decision decide(const PolicyOptions& policy, const SetHistory& history, int64_t context_tokens,
                bool set_covers_candidates, int64_t ring_begin, std::span<const float> cosine,
                std::span<const float> importance, double margin = 0);

// The mean over a group's query heads as the policy weighs them; NaN if one of the values is.
double group_mean(const PolicyOptions& policy, std::span<const float> values,
                  std::span<const float> importance);

// How far the score of a typical key has moved against the others since the label, nats: scale |q -
// label| spread, where spread is what keys differ by in a direction (KeySpreadParams). The cosine
// does not see lengths; this does. query, label: [head_dim].
float score_drift(std::span<const float> query, std::span<const float> label, float spread,
                  float scale);

}  // namespace clo
