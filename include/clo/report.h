#pragma once
// What a request did: the figures printed after an answer. Each is defined once in docs/words.md.
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace clo {

// Tokens [first, end) of a sequence.
struct TokenRange {
  int64_t first = 0;
  int64_t end = 0;
};

// Counts of one layer (or, summed, of a request). Rows are token rows: K and V of one token of one
// KV head. Only evictable heads hit, miss and fetch; resident heads are in the attended figures.
struct KvCounters {
  int64_t hits = 0;                 // head-steps that kept their set
  int64_t misses = 0;               // head-steps that chose it again because the query had moved
  int64_t aged = 0;                 // ... because the label was too old
  int64_t incomplete = 0;           // ... because a set that can hold every candidate lacked some
  int64_t corrections = 0;          // ... because the true query refuted the predicted one
  int64_t resident_selections = 0;  // sets chosen by resident heads: nothing moves

  int64_t rows_requested = 0;       // rows of the sets chosen on a miss
  int64_t rows_fetched = 0;         // rows moved host to device by fetches
  int64_t rows_saved_by_delta = 0;  // requested, but already held
  int64_t rows_saved_by_hits = 0;   // rows of the sets that hits kept

  int64_t rows_primed = 0;     // moved at the end of prefill to fill the first sets
  int64_t rows_restored = 0;   // moved at admission, from pages of a stored prefix
  int64_t rows_offloaded = 0;  // moved device to host by write-through

  int64_t rows_attended = 0;       // rows read by decode attention, over all heads
  int64_t full_rows_attended = 0;  // of them full rows, where the others are compressed
  int64_t rows_in_context = 0;     // rows that dense attention would have read: no masked ones
  int64_t oracle_rows = 0;         // rows read by `exact` selection; never device reads

  int64_t wait_ns = 0;  // that attention waited for rows, the mean over the layer's KV heads

  // Measured beside the mass, of head-steps that kept their set: how many, and in how many the set
  // held 0.05 less of the mass than in the step that chose it.
  int64_t kept_sets = 0, hidden_changes = 0;
  double mass_kept = 0;  // sum over query heads of attention mass on the attended rows
  int64_t mass_samples = 0;
  // Measured beside the mass: sum over query heads of the cosine between a decode step's query and
  // that of the step before, both after the rotary embedding.
  double query_cosine = 0;
  int64_t query_cosine_samples = 0;
  // Of Request::watched_ranges, over the head-steps that attend to a set: rows that were in context
  // and those of them that were attended.
  int64_t watched_rows = 0;
  int64_t watched_rows_attended = 0;

  KvCounters& operator+=(const KvCounters& other);
  // Times that a set was looked at; a correction looks at it once more.
  int64_t decisions() const { return hits + misses + aged + incomplete; }
  // Share of them after which the head went on with the set it had; 0 without any. A set that the
  // true query refuted was not kept.
  double hit_rate() const;
  // Of the rows that decode attention read.
  int64_t bytes_attended(int64_t row_bytes, int64_t full_row_bytes) const {
    return (rows_attended - full_rows_attended) * row_bytes + full_rows_attended * full_row_bytes;
  }
  // Means; 0 where nothing was measured.
  double mean_mass_kept() const;
  double mean_query_cosine() const;
};

// What the dial of a request did (`--quality`): the share of attention mass that decode steps kept,
// by its samples, and where set sizes and thresholds ended.
struct QualityReport {
  double wanted = 0;
  double estimated = 0, low = 0, high = 0;  // mean over the samples, 95 % interval of that mean
  int64_t samples = 0;                      // heads looked at, each in one step
  double set_scale = 1;                     // of the policy's set size
  double angle = 1;                         // of the angle its thresholds allow
};

struct Report {
  std::string backend;
  std::string policy;  // the flags in force
  int64_t prompt_tokens = 0;
  int64_t reused_tokens = 0;            // prompt tokens whose rows a stored prefix supplied
  int64_t masked_tokens = 0;            // prompt tokens that no other token attends to
  int64_t new_tokens = 0;               // tokens generated
  double queue_seconds = 0;             // submitted to admitted
  double prefill_seconds = 0;           // admitted to the first logits
  double first_token_seconds = 0;       // submitted to the first token
  double decode_seconds = 0;            // first token to the last
  double decode_tokens_per_second = 0;  // prefill excluded
  std::string kv_type;                  // of rows in the store, in slots and of resident heads
  int64_t row_bytes = 0;                // of one of them
  int64_t full_row_bytes = 0;   // of a sink or recent row; the same unless rows are compressed
  int64_t device_kv_bytes = 0;  // codes, head caches and resident rows of this request
  int64_t host_kv_bytes = 0;    // its pages in the host store, shared ones included
  int64_t decode_steps = 0;
  double bytes_fetched_per_token = 0;
  double bytes_attended_per_token = 0;  // of the rows that decode attention read
  double wait_seconds_per_token = 0;    // attention waiting for rows, all layers
  double hit_rate = 0;                  // of evictable heads; 0 when there are none
  double share_attended = 1;            // rows read over rows in context, decode only
  int32_t num_heads = 0;                // (layer, KV head) pairs
  int32_t num_resident_heads = 0;
  int32_t num_demoted_heads = 0;  // persistent at first, given up for other requests
  bool resident_by_profile = false;
  // Longest context that the hash weights in use were trained at; 0: none are.
  int64_t hash_tokens = 0;
  int32_t num_swapped_heads = 0;  // that gave their place to harder ones at the prompt's end
  bool mass_is_drawn = false;     // mass_kept is an estimate from rows drawn (ops/mass_draw.h)
  std::optional<QualityReport> quality;
  KvCounters total;
  std::vector<KvCounters> layers;
};

// Multi-line text for people; one JSON object for programs.
std::string report_text(const Report& report);
std::string report_json(const Report& report);

}  // namespace clo
