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
#include "kernels/refresh_scene.h"
#include "kernels/rows/rows.h"
#include "kv/head_cache.h"
#include "reference/cpu_ops.h"
#include "reuse/reuse_rule.h"
#include "select/hash_signs.h"
#include "select/set_rule.h"

namespace clo::kernels {
inline namespace refresh_world {  // other tests have worlds of their own

// Sequences with the same contents on both sides: rows in pages of pinned memory that both read,
// codes and head caches once for each.
class World {
 public:
  explicit World(const Scene& scene) : scene_(scene), ops_(2) {
    shape_.num_layers = kLayers;
    shape_.num_q_heads = scene.group * scene.kv_heads;
    shape_.num_kv_heads = scene.kv_heads;
    shape_.head_dim = scene.head_dim;
    shape_.type = scene.type;
    shape_.code_bits = scene.code_bits;
    capacity_ = scene.context + 300;
    pages_each_ = (capacity_ + kPageTokens - 1) / kPageTokens;
    layout_.shape = shape_;
    layout_.num_pages = pages_each_ * scene.num_slots + 3;
    for (const int32_t page : scene.first_pages) {
      layout_.num_pages = std::max<int64_t>(layout_.num_pages, page + 3);
    }
    make_rows();
    make_hashes();
    make_codes();
    make_heads();
    make_tables();
  }

  const KvShape& shape() const { return shape_; }
  const DecodeTables& tables() const { return tables_; }
  int64_t num_heads() const { return int64_t{scene_.num_slots} * scene_.kv_heads; }
  int64_t group_width() const { return int64_t{scene_.group} * scene_.head_dim; }
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
  const std::byte* host_row(int32_t slot, int32_t kv_head, int64_t token) const {
    const auto page = static_cast<size_t>(slot * pages_each_ + token / kPageTokens);
    return rows_->data() +
           (((kLayer * layout_.num_pages + pages_[page]) * scene_.kv_heads + kv_head) *
                kPageTokens +
            token % kPageTokens) *
               shape_.row_bytes();
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

 private:
  void make_rows() {
    const int64_t bytes =
        kLayers * layout_.num_pages * scene_.kv_heads * kPageTokens * shape_.row_bytes();
    rows_ = std::make_unique<PinnedArray<std::byte>>(bytes);
    // Normal values, repeated: what must differ is the rows.
    const std::vector<uint16_t> values = to_bits(shape_.type, random_floats(65521, 1));
    pages_.resize(static_cast<size_t>(layout_.num_pages));
    std::iota(pages_.begin(), pages_.end(), 0);
    std::shuffle(pages_.begin(), pages_.end(), std::mt19937(3));
    for (size_t i = 0; i < scene_.first_pages.size(); ++i) {
      std::iter_swap(pages_.begin() + static_cast<std::ptrdiff_t>(i),
                     std::find(pages_.begin(), pages_.end(), scene_.first_pages[i]));
    }
    page_table_ = std::make_unique<DeviceArray<int32_t>>(pages_);
    // Of the pages that sequences have; the others keep what must never be read.
    const int64_t page_values = scene_.kv_heads * kPageTokens * shape_.row_bytes() / 2;
    int64_t n = 0;
    for (int64_t layer = 0; layer < kLayers; ++layer) {
      for (int64_t i = 0; i < pages_each_ * scene_.num_slots; ++i) {
        auto* const target =
            reinterpret_cast<uint16_t*>(rows_->data()) +
            (layer * layout_.num_pages + pages_[static_cast<size_t>(i)]) * page_values;
        for (int64_t v = 0; v < page_values; ++v) {
          target[v] = values[static_cast<size_t>(n)];
          if (++n == 65521) n = 0;
        }
      }
    }
  }

  void make_hashes() {
    signs_ = std::make_unique<HashSigns>(shape_, kHashSeed);
    const std::vector<uint32_t> words = [&] {  // all heads, one after another
      const HashParams first = signs_->params(0, 0);
      const int64_t bases = (scene_.code_bits + first.width - 1) / first.width;
      const int64_t each = bases * 2 * (first.width / 32);
      return std::vector<uint32_t>(first.signs, first.signs + each * kLayers * scene_.kv_heads);
    }();
    device_signs_ = std::make_unique<DeviceArray<uint32_t>>(words);
    weights_ = random_floats(int64_t{scene_.head_dim} * scene_.code_bits, 5);
    device_weights_ = std::make_unique<DeviceArray<float>>(weights_);
    std::vector<HashParams> on_device;
    for (int32_t l = 0; l < kLayers; ++l) {
      for (int32_t h = 0; h < scene_.kv_heads; ++h) {
        HashParams params = signs_->params(l, h);
        if (scene_.trained) params.weights = weights_.data();
        hashes_.push_back(params);
        params.signs = device_signs_->data() + (params.signs - signs_->params(0, 0).signs);
        if (scene_.trained) params.weights = device_weights_->data();
        on_device.push_back(params);
      }
    }
    device_hashes_ = std::make_unique<DeviceArray<HashParams>>(on_device);
  }

  // A code block per page: [layer][kv_head][token][word]. Random words: selection does not care.
  void make_codes() {
    const int64_t block_words =
        int64_t{kLayers} * scene_.kv_heads * kPageTokens * shape_.code_words();
    const int64_t num_blocks = pages_each_ * scene_.num_slots;
    std::mt19937_64 generator(9);
    codes_.resize(static_cast<size_t>(block_words * num_blocks));
    for (uint64_t& word : codes_) word = generator();
    device_codes_ = std::make_unique<DeviceArray<uint64_t>>(codes_);
    std::vector<uint64_t*> blocks;
    for (int64_t b = 0; b < num_blocks; ++b) {
      blocks.push_back(device_codes_->data() + b * block_words);
      cpu_codes_.push_back(codes_.data() + b * block_words +
                           int64_t{kLayer} * scene_.kv_heads * kPageTokens * shape_.code_words());
      cpu_rows_.push_back(rows_->data() +
                          (kLayer * layout_.num_pages + pages_[static_cast<size_t>(b)]) *
                              scene_.kv_heads * kPageTokens * shape_.row_bytes());
    }
    code_blocks_ = std::make_unique<DeviceArray<uint64_t*>>(blocks);
    views_.resize(static_cast<size_t>(scene_.num_slots));
    for (size_t s = 0; s < views_.size(); ++s) {
      views_[s].host_rows = cpu_rows_.data() + static_cast<int64_t>(s) * pages_each_;
      views_[s].device_codes = cpu_codes_.data() + static_cast<int64_t>(s) * pages_each_;
    }
  }

  void make_heads() {
    int64_t total = 0;
    for (int64_t i = 0; i < num_heads(); ++i) {
      HeadCacheSpec spec;
      spec.sink_tokens = scene_.policy.sink;
      spec.ring_tokens = ring_tokens(scene_.policy);
      spec.slot_capacity = slot_capacity(scene_.policy, capacity_);
      spec.capacity_tokens = capacity_;
      spec.resident = scene_.resident_of > 0 && i % scene_.resident_of == 1;
      specs_.push_back(spec);
      block_offset_.push_back(total);
      total += (head_cache_bytes(shape_, spec) + 255) / 256 * 256;
    }
    cpu_block_.resize(static_cast<size_t>(total));
    blocks_ = std::make_unique<DeviceArray<std::byte>>(total);
    std::vector<HeadCacheView> on_device(
        static_cast<size_t>(scene_.num_slots * kLayers * scene_.kv_heads));
    for (int64_t i = 0; i < num_heads(); ++i) {
      HeadCacheView head = bind_head_cache(
          shape_, spec(i), cpu_block_.data() + block_offset_[static_cast<size_t>(i)]);
      cpu_heads_.push_back(head);
      const int64_t slot = i / scene_.kv_heads, kv_head = i % scene_.kv_heads;
      if (head.is_resident()) {
        for (int64_t t = 0; t < capacity_; ++t) {
          std::memcpy(head.resident + t * shape_.row_bytes(),
                      host_row(static_cast<int32_t>(slot), static_cast<int32_t>(kv_head), t),
                      static_cast<size_t>(shape_.row_bytes()));
        }
      }
      const auto move = [&](auto*& p) {
        if (p == nullptr) return;
        p = reinterpret_cast<std::remove_reference_t<decltype(p)>>(
            blocks_->data() + (reinterpret_cast<std::byte*>(p) - cpu_block_.data()));
      };
      move(head.sink), move(head.ring), move(head.slots), move(head.resident);
      move(head.slot_token), move(head.held), move(head.label), move(head.state);
      // Both layers have the same heads; only those of kLayer are compared.
      for (int64_t layer = 0; layer < kLayers; ++layer) {
        on_device[static_cast<size_t>((slot * kLayers + layer) * scene_.kv_heads + kv_head)] = head;
      }
    }
    blocks_->upload(cpu_block_);
    device_heads_ = std::make_unique<DeviceArray<HeadCacheView>>(on_device);
  }

  void make_tables() {
    rules_ = to_rules(scene_.policy);
    importance_.resize(static_cast<size_t>(scene_.kv_heads * scene_.group));
    for (size_t i = 0; i < importance_.size(); ++i) {
      importance_[i] = static_cast<float>(i % 5 + 1) / 5.0f;
    }
    const auto cells = static_cast<size_t>(scene_.num_slots * kLayers * scene_.kv_heads);
    std::vector<HeadRule> rules(cells);
    for (size_t i = 0; i < cells; ++i) {
      const int32_t kv_head = static_cast<int32_t>(i) % scene_.kv_heads;
      rules[i] = to_head_rule(scene_.policy, importance(kv_head), kv_head);
    }
    device_rules_ = std::make_unique<DeviceArray<HeadRule>>(rules);
    pending_ = std::make_unique<DeviceArray<uint32_t>>(std::vector<uint32_t>(cells, 0));
    counters_.resize(static_cast<size_t>(scene_.num_slots));
    device_counters_ = std::make_unique<DeviceArray<DeviceCounters>>(
        std::vector<DeviceCounters>(static_cast<size_t>(scene_.num_slots * kLayers)));
    slots_ = std::make_unique<DeviceArray<BatchSlot>>(scene_.num_slots);
    std::vector<int32_t> row_slot(static_cast<size_t>(scene_.num_slots));
    std::iota(row_slot.begin(), row_slot.end(), 0);
    row_slot_ = std::make_unique<DeviceArray<int32_t>>(row_slot);
    decided_ = std::make_unique<DeviceArray<uint32_t>>(std::vector<uint32_t>(cells, 0));
    kept_queries_ =
        std::make_unique<DeviceArray<float>>(2 * static_cast<int64_t>(cells) * group_width());
    queue_ = std::make_unique<DeviceArray<RefreshQueue>>(std::vector<RefreshQueue>(1));
    uint32_t queue_capacity = 1;
    while (queue_capacity < cells) queue_capacity *= 2;
    jobs_ = std::make_unique<DeviceArray<RefreshJob>>(
        std::vector<RefreshJob>(kNumRings * size_t{queue_capacity}));

    tables_.shape = shape_;
    tables_.max_batch = scene_.num_slots;
    tables_.scale = kScale;
    tables_.slots = slots_->data();
    tables_.row_slot = row_slot_->data();
    tables_.heads = device_heads_->data();
    tables_.rules = device_rules_->data();
    tables_.pending = pending_->data();
    tables_.counters = device_counters_->data();
    tables_.decided = decided_->data();
    tables_.kept_queries = kept_queries_->data();
    tables_.hashes = device_hashes_->data();
    tables_.host_rows = rows_->data();
    tables_.host = layout_;
    tables_.queue = queue_->data();
    tables_.jobs = jobs_->data();
    tables_.queue_capacity = queue_capacity;
  }

  std::span<const float> importance(int32_t kv_head) const {
    return std::span(importance_)
        .subspan(static_cast<size_t>(kv_head * scene_.group), static_cast<size_t>(scene_.group));
  }

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
        drifted_in(scene_, task, importance(task.kv_head), margin)) {
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
    select.kind = policy.select == Select::kExact    ? SelectKind::kExact
                  : policy.select == Select::kRandom ? SelectKind::kRandom
                                                     : SelectKind::kHash;
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

  Scene scene_;
  CpuOps ops_;
  KvShape shape_;
  HostLayout layout_;
  int64_t capacity_ = 0, pages_each_ = 0;
  int32_t active_ = 1;
  uint64_t seed_ = 100;
  SequenceRules rules_;
  std::vector<float> queries_, importance_, weights_;
  std::vector<int32_t> pages_;
  std::vector<uint64_t> codes_;
  std::vector<std::byte*> cpu_rows_;
  std::vector<uint64_t*> cpu_codes_;
  std::vector<SequenceLayerView> views_;
  std::vector<HeadCacheSpec> specs_;
  std::vector<int64_t> block_offset_;
  std::vector<std::byte> cpu_block_;
  std::vector<HeadCacheView> cpu_heads_;
  std::vector<HashParams> hashes_;
  std::vector<KvCounters> counters_;
  std::unique_ptr<HashSigns> signs_;

  DecodeTables tables_;
  std::unique_ptr<PinnedArray<std::byte>> rows_;
  std::unique_ptr<DeviceArray<int32_t>> page_table_, row_slot_;
  std::unique_ptr<DeviceArray<uint32_t>> device_signs_, pending_, decided_;
  std::unique_ptr<DeviceArray<float>> device_weights_, kept_queries_;
  std::vector<std::unique_ptr<DeviceArray<float>>> decode_inputs_;  // live until the next decode
  std::unique_ptr<DeviceArray<HashParams>> device_hashes_;
  std::unique_ptr<DeviceArray<uint64_t>> device_codes_;
  std::unique_ptr<DeviceArray<uint64_t*>> code_blocks_;
  std::unique_ptr<DeviceArray<std::byte>> blocks_, scratch_;
  std::unique_ptr<DeviceArray<HeadCacheView>> device_heads_;
  std::unique_ptr<DeviceArray<HeadRule>> device_rules_;
  std::unique_ptr<DeviceArray<DeviceCounters>> device_counters_;
  std::unique_ptr<DeviceArray<BatchSlot>> slots_;
  std::unique_ptr<DeviceArray<RefreshQueue>> queue_;
  std::unique_ptr<DeviceArray<RefreshJob>> jobs_;
};

}  // namespace refresh_world
}  // namespace clo::kernels
