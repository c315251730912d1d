#pragma once
// SlotTable: the device tables of the sequences that run (kernels/decode_tables.h), as the host
// fills them. A sequence takes a batch slot at begin and gives it back at end. Engine thread only.
//
// States of a slot: free -> taken (assign: tables written, inactive) -> active (activate: the first
// decode step feeds it) -> free (release). What is written goes through the stream, so it is
// ordered after the steps launched before.
#include <span>
#include <unordered_map>
#include <vector>

#include "cuda/backend.h"
#include "cuda/buffers.h"
#include "device/device_memory.h"
#include "device/stream.h"

namespace clo {

// The policy of a sequence as numbers for kernels, and one head's constants of the reuse rule.
kernels::SequenceRules sequence_rules(const SequenceKv& sequence, const ForcedReuse& forced);
kernels::HeadRule head_rule(const PolicyOptions& policy, std::span<const float> importance,
                            double dial_angle = 1);
kernels::MassLooks mass_looks(const SequenceKv& sequence, const ForcedReuse& forced);

class SlotTable {
 public:
  // All outlive the table.
  SlotTable(const KvSystem& system, const StepBuffers& buffers, const CudaLimits& limits,
            const Stream& stream);

  int32_t assign(SequenceKv& sequence, const SamplingOptions& sampling, const ForcedReuse& forced);
  // Tells the device how many rows the sequence has and which token comes next.
  void activate(const SequenceKv& sequence, int32_t token);
  // Where the sequence's head caches lie, once more. Blocks: until the device knows.
  void upload_heads(SequenceKv& sequence);
  void set_token(const SequenceKv& sequence, int32_t token);
  // Follows the sequence's dial: thresholds and label age at once, the size of sets that are for
  // contexts from `from_context` on. Requires: a dial; no set that is for such a context has been
  // asked for.
  void turn_dial(const SequenceKv& sequence, int64_t from_context);
  void release(const SequenceKv& sequence);

  int32_t slot_of(const SequenceKv& sequence) const;
  bool is_active(const SequenceKv& sequence) const;
  // Whether its tokens are drawn or penalised, not simply the most likely.
  bool draws(const SequenceKv& sequence) const;
  // Blocks: until the device's counts of the sequence have arrived; adds them to its counters.
  void read_counters(SequenceKv& sequence);
  // Nanoseconds that attention waited for rows and that refreshes copied them, of the last
  // read_counters(), summed over heads.
  struct Times {
    uint64_t wait_ns = 0, fetch_ns = 0;
  };
  Times times() const { return times_; }

  // The page table and code blocks of a sequence, on the device.
  const int32_t* device_pages(const SequenceKv& sequence) const;
  uint64_t* const* device_code_blocks(const SequenceKv& sequence) const;
  const HeadCacheView* device_heads(const SequenceKv& sequence, int32_t layer) const;

 private:
  struct Entry {
    int32_t slot = 0;
    bool active = false;
    bool draws = false;
  };
  void upload_thresholds(const SequenceKv& sequence);
  kernels::BatchSlot& staged(int32_t slot) { return staging_.as<kernels::BatchSlot>()[slot]; }
  void upload(void* target, const void* source, int64_t num_bytes);

  const KvSystem& system_;
  const StepBuffers& buffers_;
  const Stream& stream_;
  int64_t max_context_ = 0;
  PinnedBlock staging_;  // [max_batch] BatchSlot: a copy in flight is never overwritten, because a
                         // slot is written at most once between two waits for the stream
  PinnedBlock thresholds_;  // [max_batch][heads] two HeadThresholds each, likewise: dials turn
                            // after many steps
  std::vector<int32_t> free_;
  std::unordered_map<const SequenceKv*, Entry> entries_;
  Times times_;
};

}  // namespace clo
