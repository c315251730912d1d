#pragma once
// Sequences that exist twice, for tests of the refresh kernels: as device tables and as the CPU
// backend sees them, with what the CPU does to a layer's heads (Attention::refresh and
// select_and_fetch).
#include <algorithm>
#include <memory>
#include <numeric>
#include <string>

#include "clo/policy.h"
#include "clo/report.h"
#include "kernels/gpu_test.h"
#include "kernels/refresh/refresh.h"
#include "kernels/refresh_memory.h"
#include "kernels/refresh_scene.h"
#include "kernels/rows/rows.h"
#include "kv/head_cache.h"
#include "reference/cpu_ops.h"
#include "reuse/reuse_rule.h"
#include "select/hash_signs.h"
#include "select/set_rule.h"

namespace clo::kernels {
inline namespace refresh_world {  // other tests have worlds of their own

class World : public SceneMemory {
 public:
  explicit World(const Scene& scene) : SceneMemory(scene) {}

  const KvShape& shape() const { return shape_; }
  const DecodeTables& tables() const { return tables_; }
  HeadCacheView& cpu_head(int64_t i) { return cpu_heads_[static_cast<size_t>(i)]; }
  const HeadCacheSpec& spec(int64_t i) const { return specs_[static_cast<size_t>(i)]; }
  KvCounters& cpu_counters(int32_t slot) { return counters_[static_cast<size_t>(slot)]; }
  DeviceArray<HeadRule>& head_rules() { return *device_rules_; }
  CpuOps& cpu() { return ops_; }
  int64_t oracle_rows(int32_t slot) { return cpu_counters(slot).oracle_rows; }
  SequenceRules& rules() { return rules_; }
  // Of the CPU's side; the device's are in rules().
  PolicyOptions& cpu_policy() { return scene_.policy; }
  DeviceCounters device_counters(int32_t slot) {
    return device_counters_->download()[static_cast<size_t>(slot * kLayers + kLayer)];
  }
  RefreshScratch scratch(int32_t num_clusters) {
    const int64_t bytes = refresh_scratch_bytes(capacity_);
    scratch_ = std::make_unique<DeviceArray<std::byte>>(bytes * num_clusters);
    return {scratch_->data(), bytes};
  }

  // Queries of all rows: a walk, so that some heads keep their sets.
  std::vector<float> next_queries(float step) {
    const std::vector<float> noise = random_floats(num_heads() * group_width(), seed_++, step);
    if (queries_.empty()) queries_ = random_floats(num_heads() * group_width(), seed_++);
    for (size_t i = 0; i < noise.size(); ++i) queries_[i] += noise[i];
    return queries_;
  }

  // Sequences hold `num_tokens` rows on the device's side.
  void set_num_tokens(int64_t num_tokens, int32_t active) {
    active_ = active;
    set_num_tokens(num_tokens);
  }
  void set_num_tokens(int64_t num_tokens) {
    std::vector<BatchSlot> slots(static_cast<size_t>(scene_.num_slots));
    for (size_t s = 0; s < slots.size(); ++s) {
      slots[s].num_tokens = num_tokens;
      slots[s].capacity_tokens = capacity_;
      slots[s].active = active_;
      slots[s].pages = page_table_->data() + static_cast<int64_t>(s) * pages_each_;
      slots[s].code_blocks = code_blocks_->data() + static_cast<int64_t>(s) * pages_each_;
      slots[s].rules = rules_;
    }
    slots_->upload(slots);
  }

  void set_active(int32_t active) { active_ = active; }
  // Until set_num_tokens(). bits [words of the capacity], on the device.
  void watch(int32_t slot, const uint32_t* bits) {
    std::vector<BatchSlot> slots = slots_->download();
    slots[static_cast<size_t>(slot)].watched = bits;
    slots_->upload(slots);
  }
  void set_row_slot(int32_t slot) {
    row_slot_->upload(std::vector<int32_t>(static_cast<size_t>(scene_.num_slots), slot));
  }
  // Fewer than there is room for.
  void set_capacity(int64_t tokens) { capacity_ = tokens; }

  // The step's queries through decode_rows: decisions, and the token's row, which both sides then
  // keep (it is in the store already, so that only ring and sink change).
  void decode(const std::vector<float>& queries, int64_t context, cudaStream_t stream = nullptr) {
    set_num_tokens(context - 1);
    const int32_t dim = scene_.head_dim;
    std::vector<float> parts;
    for (int32_t s = 0; s < scene_.num_slots; ++s) {
      const auto at = queries.begin() + s * scene_.kv_heads * group_width();
      parts.insert(parts.end(), at, at + scene_.kv_heads * group_width());
      for (const int32_t half : {0, 1}) {
        for (int32_t h = 0; h < scene_.kv_heads; ++h) {
          std::vector<float> values(static_cast<size_t>(dim));
          convert_to_f32(shape_.type, host_row(s, h, context - 1) + half * dim * 2, values.data(),
                         dim);
          parts.insert(parts.end(), values.begin(), values.end());
        }
      }
    }
    const auto angles = static_cast<size_t>(scene_.num_slots * dim / 2);
    decode_inputs_.clear();
    for (const std::vector<float>& input :
         {parts, std::vector<float>(angles, 1.0f), std::vector<float>(angles, 0.0f), queries}) {
      decode_inputs_.push_back(std::make_unique<DeviceArray<float>>(input));
    }
    DecodeRows params;
    params.tables = tables_;
    params.tables.hashes = nullptr;  // codes stay the random ones
    params.parts = decode_inputs_[0]->data();
    params.cosine = decode_inputs_[1]->data();
    params.sine = decode_inputs_[2]->data();
    params.queries = decode_inputs_[3]->data();
    params.layer = kLayer;
    params.rows = scene_.num_slots;
    decode_rows(params, stream);
    for (int64_t i = 0; i < num_heads(); ++i) {
      const HeadCacheView& head = cpu_head(i);
      if (head.is_resident()) continue;
      const std::byte* row = host_row(static_cast<int32_t>(i / scene_.kv_heads),
                                      static_cast<int32_t>(i % scene_.kv_heads), context - 1);
      const auto bytes = static_cast<size_t>(shape_.row_bytes());
      if (context - 1 < head.sink_tokens) {
        std::memcpy(head.sink + (context - 1) * shape_.row_bytes(), row, bytes);
      }
      std::memcpy(head.ring + (context - 1) % head.ring_tokens * shape_.row_bytes(), row, bytes);
    }
  }
  // Sink and ring rows of the CPU's evictable heads, as steps up to this context leave them.
  void fill_fixed_rows(int64_t context) {
    const auto bytes = static_cast<size_t>(shape_.row_bytes());
    for (int64_t i = 0; i < num_heads(); ++i) {
      const HeadCacheView& head = cpu_head(i);
      if (head.is_resident()) continue;
      for (int64_t t = 0; t < context; ++t) {
        std::byte* const row = fixed_row(shape_, head, t, context);
        if (row == nullptr) continue;
        std::memcpy(row,
                    host_row(static_cast<int32_t>(i / scene_.kv_heads),
                             static_cast<int32_t>(i % scene_.kv_heads), t),
                    bytes);
      }
    }
  }
  // Jobs are done until there are none.
  void drain(int32_t num_clusters, cudaStream_t stream = nullptr) {
    RefreshQueueParams params;
    params.tables = tables_;
    params.scratch = scratch(num_clusters);
    params.num_clusters = num_clusters;
    params.drain = true;
    refresh_queue(params, stream);
  }
  // What the tail of attention does with kDueAhead, for a next step of this context.
  int64_t queue_due(int64_t context) {
    const std::vector<uint32_t> decided = decided_->download();
    std::vector<uint32_t> pending = pending_->download();
    std::vector<RefreshJob> jobs = jobs_->download();
    RefreshQueue queue = this->queue();
    int64_t count = 0;
    for (int64_t i = 0; i < num_heads(); ++i) {
      const auto slot = static_cast<int32_t>(i / scene_.kv_heads);
      const auto cell = static_cast<size_t>((slot * kLayers + kLayer) * scene_.kv_heads +
                                            static_cast<int32_t>(i % scene_.kv_heads));
      if ((decided[cell] & kDueAhead) == 0) continue;
      const uint64_t position = queue.rings[kAhead].tail++;
      jobs[tables_.queue_capacity + (position & (tables_.queue_capacity - 1))] = {
          slot,
          kLayer,
          static_cast<uint8_t>(i % scene_.kv_heads),
          static_cast<uint8_t>((context - 1) & 1),
          static_cast<int32_t>(context),
          static_cast<uint32_t>(position + 1)};
      pending[cell] = 1;
      ++count;
    }
    jobs_->upload(jobs);
    pending_->upload(pending);
    set_queue(queue);
    return count;
  }

  HeadTask make_task(int32_t slot, int32_t kv_head, const float* query, int64_t context) {
    return {.head = &cpu_head(int64_t{slot} * scene_.kv_heads + kv_head),
            .sequence = &views_[static_cast<size_t>(slot)],
            .query = query,
            .context_tokens = context,
            .kv_head = kv_head,
            .layer = kLayer};
  }

  // Attention::refresh, for every head of the layer.
  enum class How { kPrime, kForesee, kDecide, kCorrect };
  int64_t cpu_refresh(const std::vector<float>& queries, int64_t context, How how) {
    int64_t misses = 0;
    for (int64_t i = 0; i < num_heads(); ++i) {
      const auto slot = static_cast<int32_t>(i / scene_.kv_heads);
      const auto kv_head = static_cast<int32_t>(i % scene_.kv_heads);
      const HeadTask task = make_task(slot, kv_head, queries.data() + i * group_width(), context);
      const bool resident = task.head->is_resident();
      if (resident && covers(scene_.policy, context)) continue;
      KvCounters& counters = cpu_counters(slot);
      if (how != How::kPrime && !cpu_decide(task, how, counters)) continue;
      ++misses;
      cpu_choose(task, counters, how != How::kPrime);
    }
    return misses;
  }

  // Every byte of every head's block, with the parts named when they differ.
  void expect_equal(const std::string& where) {
    const std::vector<std::byte> device = blocks_->download();
    for (int64_t i = 0; i < num_heads(); ++i) {
      const auto at = static_cast<size_t>(block_offset_[static_cast<size_t>(i)]);
      const HeadCacheView& cpu = cpu_head(i);
      const auto moved = [&](const auto* p) {
        return reinterpret_cast<decltype(p)>(
            device.data() + (reinterpret_cast<const std::byte*>(p) - cpu_block_.data()));
      };
      const std::string head = where + " head " + std::to_string(i);
      const HeadState& state = *moved(cpu.state);
      ASSERT_EQ(state.num_set_tokens, cpu.state->num_set_tokens) << head;
      ASSERT_EQ(state.num_slots_used, cpu.state->num_slots_used) << head;
      ASSERT_EQ(state.label_length, cpu.state->label_length) << head;
      ASSERT_EQ(state.candidates_end, cpu.state->candidates_end) << head;
      ASSERT_EQ(state.has_label, cpu.state->has_label) << head;
      const std::span<const int32_t> map(moved(cpu.slot_token),
                                         static_cast<size_t>(cpu.slot_capacity));
      for (size_t slot = 0; slot < map.size(); ++slot) {
        ASSERT_EQ(map[slot], cpu.slot_token[slot]) << head << " slot " << slot;
      }
      if (!cpu.is_resident()) {
        for (int64_t w = 0; w < (capacity_ + 63) / 64; ++w) {
          ASSERT_EQ(moved(cpu.held)[w], cpu.held[w]) << head << " held word " << w;
        }
      }
      const auto bytes = static_cast<size_t>(head_cache_bytes(shape_, spec(i)));
      ASSERT_EQ(std::memcmp(device.data() + at, cpu_block_.data() + at, bytes), 0)
          << head << ": rows or label";
    }
    const std::vector<DeviceCounters> counted = device_counters_->download();
    for (int32_t s = 0; s < scene_.num_slots; ++s) {
      expect_same_counts(counted[static_cast<size_t>(s * kLayers + kLayer)], cpu_counters(s),
                         where);
    }
    EXPECT_EQ(queue().fault, 0u);
  }

  RefreshQueue queue() const { return queue_->download()[0]; }
  void set_queue(const RefreshQueue& queue) { queue_->upload(std::span(&queue, 1)); }
  std::vector<uint32_t> pending() const { return pending_->download(); }
  uint32_t decided(int32_t slot, int32_t kv_head) const {
    return decided_
        ->download()[static_cast<size_t>((slot * kLayers + kLayer) * scene_.kv_heads + kv_head)];
  }
  // Map, held bits and state of a head as the device has them, for sets that the CPU does not draw.
  struct DeviceHead {
    std::vector<int32_t> map;
    std::vector<uint64_t> held;
    HeadState state;
    std::vector<std::byte> slots;
  };
  DeviceHead device_head(int64_t i) {
    const std::vector<std::byte> device = blocks_->download();
    const HeadCacheView& cpu = cpu_head(i);
    const auto moved = [&](const auto* p) {
      return reinterpret_cast<decltype(p)>(
          device.data() + (reinterpret_cast<const std::byte*>(p) - cpu_block_.data()));
    };
    DeviceHead head;
    head.map.assign(moved(cpu.slot_token), moved(cpu.slot_token) + cpu.slot_capacity);
    head.held.assign(moved(cpu.held), moved(cpu.held) + (capacity_ + 63) / 64);
    head.state = *moved(cpu.state);
    head.slots.assign(moved(cpu.slots), moved(cpu.slots) + cpu.slot_capacity * shape_.row_bytes());
    return head;
  }
  // The layer buffer of a prefill: [kv_head][capacity] rows of slot 0.
  std::vector<std::byte> layer_rows() const {
    const auto row = static_cast<size_t>(shape_.row_bytes());
    std::vector<std::byte> rows(static_cast<size_t>(scene_.kv_heads * capacity_) * row);
    for (int32_t h = 0; h < scene_.kv_heads; ++h) {
      for (int64_t t = 0; t < capacity_; ++t) {
        std::memcpy(rows.data() + static_cast<size_t>(h * capacity_ + t) * row, host_row(0, h, t),
                    row);
      }
    }
    return rows;
  }
  int64_t capacity() const { return capacity_; }
  std::span<const float> importance_of(int32_t kv_head) const { return importance(kv_head); }

 private:
  // Attention::refresh; true: choose again.
  bool cpu_decide(const HeadTask& task, How how, KvCounters& counters) {
    std::vector<float> cosine(static_cast<size_t>(scene_.group));
    ops_.cosine({shape_, &task, cosine.data(), 1});
    const HeadState& state = *task.head->state;
    const double margin = how == How::kForesee ? prefetch_margin(scene_.policy) : 0;
    const bool too_small = scene_.policy.quality &&
                           4 * int64_t{state.num_set_tokens} <
                               3 * std::min(set_size(scene_.policy, task.context_tokens),
                                            candidates(scene_.policy, task.context_tokens).size());
    clo::Decision decision = decide(
        scene_.policy,
        {state.has_label != 0, state.label_length, state.candidates_end,
         state.num_set_tokens >= candidates(scene_.policy, state.label_length).size(), too_small},
        task.context_tokens, covers(scene_.policy, task.context_tokens),
        task.context_tokens - task.head->ring_tokens, cosine, importance(task.kv_head), margin);
    if (decision == clo::Decision::kHit &&
        refused_in(scene_, task, importance(task.kv_head), margin)) {
      decision = clo::Decision::kMiss;
    }
    const bool miss = decision != clo::Decision::kHit;
    if (task.head->is_resident()) {
      counters.resident_selections += miss;
    } else if (how == How::kCorrect) {
      counters.corrections += miss;
    } else {
      counters.hits += decision == clo::Decision::kHit;
      counters.rows_saved_by_hits += miss ? 0 : state.num_set_tokens;
      counters.misses += decision == clo::Decision::kMiss;
      counters.aged += decision == clo::Decision::kAged;
      counters.incomplete += decision == clo::Decision::kIncomplete;
    }
    return miss;
  }

  // Attention::select_and_fetch.
  void cpu_choose(const HeadTask& task, KvCounters& counters, bool counted) {
    const PolicyOptions& policy = scene_.policy;
    const CandidateRange range = candidates(policy, task.context_tokens);
    SelectTask select;
    select.head = task;
    select.hash = &hashes_[static_cast<size_t>(kLayer * scene_.kv_heads + task.kv_head)];
    select.kind = select_kind(policy.select);
    select.random_seed = rules_.random_seed ^ (static_cast<uint64_t>(task.context_tokens) << 20) ^
                         (static_cast<uint64_t>(kLayer) << 8) ^ static_cast<uint64_t>(task.kv_head);
    select.first_candidate = range.first;
    select.end_candidate = range.end;
    select.num_select = static_cast<int32_t>(std::min(
        {set_size(policy, task.context_tokens), range.size(), int64_t{task.head->slot_capacity}}));
    std::vector<int32_t> set(static_cast<size_t>(select.num_select));
    select.tokens = set.data();
    if (counted && policy.select == Select::kExact) counters.oracle_rows += range.size();
    ops_.select({shape_, &select, 1, kScale});
    const HeadCacheView& head = *task.head;
    if (head.is_resident()) {
      commit_resident(head, set);
    } else {
      const bool whole = policy.fetch == Fetch::kWhole;
      SetDifference difference;
      if (whole) {
        find_whole(set, difference);
      } else {
        find_difference(head, set, difference);
      }
      for (const SlotFill& fill : difference.fills) {
        std::memcpy(
            head.slots + fill.slot * shape_.row_bytes(),
            task.sequence->host_rows[fill.token / kPageTokens] +
                (task.kv_head * kPageTokens + fill.token % kPageTokens) * shape_.row_bytes(),
            static_cast<size_t>(shape_.row_bytes()));
      }
      if (counted) {
        counters.rows_requested += std::ssize(set);
        counters.rows_fetched += std::ssize(difference.fills);
        counters.rows_saved_by_delta += std::ssize(set) - std::ssize(difference.fills);
      }
      if (whole) {
        commit_whole(head, set);
      } else {
        commit_difference(head, set, difference);
      }
    }
    set_label(shape_, head, task.query, task.context_tokens, range.end);
  }
};

}  // namespace refresh_world
}  // namespace clo::kernels
