#pragma once
// What the kernels of a captured decode step read and change: tables in device memory that outlive
// every replay. A graph is fixed, so nothing that changes from step to step is a kernel argument;
// lengths, page tables, rules and counters are all found here. Plain structs, shared by host and
// device code. Owned by the CUDA runner (cuda/), filled at admission, read by kernels.
//
// A sequence holds one batch slot from admission to its end. A step has `rows` rows; row r serves
// the sequence in slot row_slot[r], or none (-1), so that one graph serves any batch of its size.
//
// A head's refresh (decide, select, difference, fetch) runs beside the layers that compute. Who
// changes what, and when:
//
//   pending[head] 0 -> 1   a decision: the head missed, a job is in the queue. Jobs that this
//                          layer's attention waits for go into the urgent ring, jobs for a layer or
//                          a step to come into the other one.
//   pending[head] 1 -> 0   refresh: rows have arrived; slots, map, bits, label and state are the
//                          new set's. Release; attention acquires.
//
// A head has at most one job in the queue. Attention waits for it; a job for the next step is
// queued in attention's tail, or, of a head whose mass is sampled, by the kernel that has done so
// (mass/mass.h); one by the true query waits until nothing is pending.
#include <cstddef>
#include <cstdint>

#include "base/host_device.h"
#include "ops/kv_layout.h"
#include "ops/params.h"

namespace clo::kernels {

inline constexpr int kMaxGroup = 8;     // query heads of one KV head
inline constexpr int kSkinnyRows = 16;  // most rows that the weight-streaming product takes

enum class SelectRule : uint8_t { kNone, kHash, kGradedHash, kExact, kRandom };
enum class PredictRule : uint8_t { kNone, kPreviousLayer, kPreviousStep };

// Heads whose attention mass a step samples: none, kMassLooks of them, or every head (measurement).
enum class MassLooks : uint8_t { kNone, kSome, kAll };

// The dial's set size, as a multiple of the policy's, of sets for contexts from one on.
struct SetScale {
  int64_t from_context = 0;
  double scale = 1;
};
// Of two settings in turn: which is in force at a context (of equal ones the first), and which one
// a new setting, for later contexts than either, takes the place of. Never the same one for a
// context that comes before the new setting's: a reader may meet the writer.
CLO_HOST_DEVICE int setting_in_force(const SetScale (&scales)[2], int64_t context_tokens) {
  const int64_t first = scales[0].from_context, second = scales[1].from_context;
  return second <= context_tokens && (second > first || first > context_tokens) ? 1 : 0;
}
CLO_HOST_DEVICE int setting_to_replace(const SetScale (&scales)[2]) {
  return scales[0].from_context < scales[1].from_context ? 0 : 1;
}

// A sequence's policy, as numbers. Mirrors PolicyOptions (clo/policy.h).
struct SequenceRules {
  double kv_ratio = 0.1;
  int64_t set_tokens = 0;  // 0: from kv_ratio
  uint64_t random_seed = 0;
  int32_t sink = 4;
  int32_t recent = 64;
  int32_t max_label_age = 64;  // 0: none
  int32_t dense_layers = 0;    // layers [0, dense_layers) attend every row
  SelectRule select = SelectRule::kGradedHash;
  PredictRule predict = PredictRule::kNone;
  bool correct = false;        // the true query may refute a predicted set
  bool fetch_whole = false;    // a miss brings the whole set, not the difference
  bool aggregate_all = false;  // every query head must pass its own threshold
  MassLooks looks = MassLooks::kNone;
  // With a quality to hold. The host writes the older of the two while refreshes run beside the
  // steps: none of them is for a context that it is for.
  bool has_dial = false;
  SetScale set_scales[2];
  double largest_scale = 1;  // so far: of any set that a head may hold
  // HitTest::kDrift: nats that a typical key's score may have moved, of a decision that stands and
  // of one made ahead. 0: no such test.
  float drift_limit = 0, drift_limit_ahead = 0;
  // HitTest::kEntropy: nats that the min-entropy over a set may have risen, likewise. 0: no such
  // test.
  float entropy_rise = 0, entropy_rise_ahead = 0;
  // Measurement only: decisions and sets are drawn instead of computed (the work is still done).
  // Negative: natural.
  float forced_hit_rate = -1;
  float forced_new_share = -1;
  float forced_correction_share = 0;  // of the misses: found by the true query
};

// When a head may keep its set: the reuse rule with its constants worked out on the host.
struct HeadThresholds {
  double mean = 2;               // of the weighted mean; > 1: always a miss, <= -1: always a hit
  double query[kMaxGroup] = {};  // aggregate_all: of each query head
};
struct HeadRule {
  HeadThresholds at_once;         // of the true query: its answer stands
  HeadThresholds ahead;           // of a prediction: stricter where the true query may refute it
  double weight[kMaxGroup] = {};  // of each query head in the mean
  double drift_scale = 0;         // nats of drift by |query - label|: key_spread()
};

// HitTest::kEntropy: of each query head the min-entropy of its weights (-log of the largest, nats)
// in the last step, and in the first that attended to the present set. NaN: none yet.
struct HeadEntropy {
  float last[kMaxGroup];
  float at_label[kMaxGroup];
};

struct SamplingRules {
  float temperature = 0;  // 0: greedy
  float top_p = 1;
  float min_p = 0;
  float repetition_penalty = 1;
  int32_t top_k = 0;
  uint64_t seed = 0;
};

// One batch slot.
struct BatchSlot {
  int64_t num_tokens = 0;  // rows in the cache before this step; the sampling kernel adds one
  int64_t capacity_tokens = 0;
  int64_t num_answered = 0;  // tokens sampled so far: the sampling counter
  int32_t token = 0;         // id fed in this step; the sampling kernel writes the next one
  int32_t active = 0;
  const int32_t* pages = nullptr;  // [capacity pages] host page ids; null: no host copy
  uint64_t* const* code_blocks =
      nullptr;  // [capacity pages] codes of a page, all layers; null: none
  // [words of 32 tokens of the capacity] bit t: token t is watched. null: none is. Every head's
  // mass is looked at then (MassLooks::kAll).
  const uint32_t* watched = nullptr;
  SequenceRules rules;
  SamplingRules sampling;
};

// Counts of one (slot, layer). Added to by kernels with atomics, read by the host on demand.
struct DeviceCounters {
  unsigned long long hits, misses, aged, incomplete, corrections, resident_selections;
  unsigned long long rows_requested, rows_fetched, rows_saved_by_delta, rows_saved_by_hits;
  unsigned long long rows_attended, full_rows_attended, rows_in_context;
  unsigned long long oracle_rows;
  unsigned long long mass_samples;  // query heads of MassLooks::kAll, and their mass kept
  double mass_kept;
  unsigned long long watched_rows, watched_rows_attended;  // of heads with sets
  unsigned long long wait_ns;   // layers waiting for a pending head, summed over heads
  unsigned long long fetch_ns;  // refresh clusters copying rows, summed
};

// One head to refresh. 16 bytes; `ticket` is written last (release) and says which turn of the ring
// the entry belongs to.
struct RefreshJob {
  int32_t slot = 0;
  int16_t layer = 0;
  uint8_t kv_head = 0;
  uint8_t query = 0;           // which of the head's two kept queries chooses
  int32_t context_tokens = 0;  // of the step the set is for, its token included
  uint32_t ticket = 0;         // position in the ring + 1
};

// Rings of jobs, urgent ones first. Producers and consumers are kernels; it lives across graph
// replays.
inline constexpr int kUrgent = 0, kAhead = 1, kNumRings = 2;
struct RefreshQueue {
  struct Ring {
    unsigned long long head = 0;  // next position to take
    unsigned long long tail = 0;  // next position to fill
  };
  Ring rings[kNumRings];
  uint32_t step = 0;   // current step number, set by its first kernel
  uint32_t fault = 0;  // FaultCode; not 0: a wait gave up
  uint32_t leave = 0;  // not 0: the refresh clusters leave; set by the host
  uint32_t pad = 0;
};

enum class FaultCode : uint32_t {
  kNone = 0,
  kAttentionWait = 1,
  kRefreshStuck = 2,
  kSetTooLong = 3,  // a head has more slots in use than a set of this context can have
};

// What a layer's true query decided about a head.
enum Decided : uint32_t {
  kDueAhead = 1,   // the next step's set is to be queued when this one has been read
  kChosenNow = 2,  // the set that this step attends to is being chosen
  kKeptAhead = 4,  // the next step keeps its set, unless this step's entropy refuses
};

// What the device tells the host after each step, in mapped pinned memory.
struct StepResult {
  int32_t token = 0;   // sampled id
  int32_t finite = 1;  // 0: a logit of this row was not finite
};

// What a look at one head's attention found.
struct MassSample {
  int32_t head = -1;  // layer * num_kv_heads + kv_head; -1: nothing was to be seen
  int32_t fresh = 0;  // the set was chosen for this step
  float kept = 0;  // share of the mass on the rows attended, mean over the query heads; may be NaN
  int32_t padding = 0;
};

// Everything a decode kernel may need; passed by value.
struct DecodeTables {
  KvShape shape;
  int32_t max_batch = 0;
  float scale = 0;                     // of query-key products
  BatchSlot* slots = nullptr;          // [max_batch]
  const int32_t* row_slot = nullptr;   // [max rows] slot of each row of the step, -1: none
  HeadCacheView* heads = nullptr;      // [max_batch][num_layers][num_kv_heads]
  const HeadRule* rules = nullptr;     // likewise
  uint32_t* pending = nullptr;         // likewise: 1 while a refresh is due
  uint32_t* decided = nullptr;         // likewise: Decided flags of this step's true query
  HeadEntropy* entropies = nullptr;    // likewise: written by attention for HitTest::kEntropy
  DeviceCounters* counters = nullptr;  // [max_batch][num_layers]
  // [max_batch][num_layers][num_kv_heads][2][group_size * head_dim]: queries that jobs choose with,
  // in turn, so that a decision does not change what a job under way still reads.
  float* kept_queries = nullptr;
  const HashParams* hashes = nullptr;  // [num_layers][num_kv_heads], device pointers; null: none
  std::byte* host_rows = nullptr;      // the host store as the device sees it; layout below
  uint64_t* host_codes = nullptr;
  HostLayout host;
  RefreshQueue* queue = nullptr;
  RefreshJob* jobs = nullptr;  // [kNumRings][queue_capacity], a power of two
  uint32_t queue_capacity = 0;
};

}  // namespace clo::kernels
