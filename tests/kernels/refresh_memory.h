#pragma once
// The memory of a scene of refresh tests, twice: as device tables and as the CPU backend sees it.
#include <algorithm>
#include <memory>
#include <numeric>
#include <span>
#include <vector>

#include "clo/policy.h"
#include "clo/report.h"
#include "kernels/gpu_test.h"
#include "kernels/refresh_scene.h"
#include "kv/head_cache.h"
#include "reference/cpu_ops.h"
#include "select/hash_signs.h"
#include "select/set_rule.h"

namespace clo::kernels {
inline namespace refresh_world {  // other tests have worlds of their own

// Sequences with the same contents on both sides: rows in pages of pinned memory that both read,
// codes and head caches once for each.
class SceneMemory {
 public:
  int64_t num_heads() const { return int64_t{scene_.num_slots} * scene_.kv_heads; }
  int64_t group_width() const { return int64_t{scene_.group} * scene_.head_dim; }
  const std::byte* host_row(int32_t slot, int32_t kv_head, int64_t token) const {
    const auto page = static_cast<size_t>(slot * pages_each_ + token / kPageTokens);
    return rows_->data() +
           (((kLayer * layout_.num_pages + pages_[page]) * scene_.kv_heads + kv_head) *
                kPageTokens +
            token % kPageTokens) *
               shape_.row_bytes();
  }

 protected:
  explicit SceneMemory(const Scene& scene) : scene_(scene), ops_(2) {
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
    weights_ = random_floats(hash_weight_count(scene_.head_dim, scene_.code_bits), 5);
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
          shape_, specs_.back(), cpu_block_.data() + block_offset_[static_cast<size_t>(i)]);
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
    std::vector<HeadEntropy> entropies;
    for (size_t i = 0; i < cells; ++i) {
      entropies.push_back(entropy_of(static_cast<int32_t>(i) % scene_.kv_heads));
    }
    entropies_ = std::make_unique<DeviceArray<HeadEntropy>>(entropies);
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
    tables_.entropies = entropies_->data();
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
  std::unique_ptr<DeviceArray<HeadEntropy>> entropies_;
  std::unique_ptr<DeviceArray<DeviceCounters>> device_counters_;
  std::unique_ptr<DeviceArray<BatchSlot>> slots_;
  std::unique_ptr<DeviceArray<RefreshQueue>> queue_;
  std::unique_ptr<DeviceArray<RefreshJob>> jobs_;
};

}  // namespace refresh_world
}  // namespace clo::kernels
