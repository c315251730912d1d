#include "cuda/slot_table.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <numeric>

#include "base/check.h"
#include "reuse/reuse_rule.h"

namespace clo {

using kernels::BatchSlot;
using kernels::DeviceCounters;
using kernels::HeadRule;

// What a head's rule begins with: both thresholds.
constexpr int64_t kThresholdBytes = offsetof(HeadRule, weight);
static_assert(kThresholdBytes == 2 * sizeof(kernels::HeadThresholds));

namespace {

// What is left of an allowed angle or drift after a prefetch margin and the dial's share: 1 -
// margin, as Attention::refresh has it.
double margin_of(double ahead, double dial_angle) { return 1 - (1 - ahead) * dial_angle; }

// The parts of the rules that follow a dial's angle.
void follow_angle(kernels::SequenceRules& rules, const SequenceKv& sequence) {
  const PolicyOptions& policy = sequence.policy();
  rules.max_label_age = policy.max_label_age;
  const auto left_of = [&](double limit, double ahead) {
    const double margin = margin_of(ahead, sequence.dial_angle());
    return static_cast<float>((1 - margin) * limit);
  };
  const double ahead = prefetch_margin(policy);
  if (policy.hit_test == HitTest::kDrift) {
    rules.drift_limit = left_of(policy.drift_limit, 0);
    rules.drift_limit_ahead = left_of(policy.drift_limit, ahead);
  } else if (policy.hit_test == HitTest::kEntropy) {
    rules.entropy_rise = left_of(policy.entropy_rise, 0);
    rules.entropy_rise_ahead = left_of(policy.entropy_rise, ahead);
  }
}

}  // namespace

kernels::MassLooks mass_looks(const SequenceKv& sequence, const ForcedReuse& forced) {
  if (sequence.measures_mass || !sequence.watched.empty()) return kernels::MassLooks::kAll;
  return sequence.dial() != nullptr || forced.looks_at_mass ? kernels::MassLooks::kSome
                                                            : kernels::MassLooks::kNone;
}

kernels::SequenceRules sequence_rules(const SequenceKv& sequence, const ForcedReuse& forced) {
  const PolicyOptions& policy = sequence.policy();
  kernels::SequenceRules rules;
  rules.kv_ratio = policy.kv_ratio;
  rules.set_tokens = policy.set_tokens;
  rules.random_seed = sequence.random_seed();
  rules.sink = policy.sink;
  rules.recent = policy.recent;
  int32_t dense_layers = 0;
  while (dense_layers < std::ssize(sequence.layer_counters()) &&
         sequence.is_dense_layer(dense_layers)) {
    ++dense_layers;
  }
  rules.dense_layers = dense_layers;
  switch (policy.select) {
    case Select::kNone:
      rules.select = kernels::SelectRule::kNone;
      break;
    case Select::kHash:
      rules.select = kernels::SelectRule::kHash;
      break;
    case Select::kGradedHash:
      rules.select = kernels::SelectRule::kGradedHash;
      break;
    case Select::kExact:
      rules.select = kernels::SelectRule::kExact;
      break;
    case Select::kRandom:
      rules.select = kernels::SelectRule::kRandom;
      break;
  }
  switch (policy.predict) {
    case Predict::kAuto:
    case Predict::kNone:
      rules.predict = kernels::PredictRule::kNone;
      break;
    case Predict::kPreviousLayer:
      rules.predict = kernels::PredictRule::kPreviousLayer;
      break;
    case Predict::kPreviousStep:
      rules.predict = kernels::PredictRule::kPreviousStep;
      break;
  }
  rules.correct = policy.correction == Correction::kTrueQuery;
  rules.fetch_whole = policy.fetch == Fetch::kWhole;
  rules.looks = mass_looks(sequence, forced);
  follow_angle(rules, sequence);
  rules.aggregate_all = policy.aggregate == Aggregate::kAll;
  rules.forced_hit_rate = forced.hit_rate;
  rules.forced_new_share = forced.new_share;
  rules.forced_correction_share = rules.correct ? forced.correction_share : 0;
  return rules;
}

HeadRule head_rule(const PolicyOptions& policy, std::span<const float> importance,
                   double dial_angle) {
  HeadRule rule;
  CLO_CHECK(importance.size() <= kernels::kMaxGroup, importance.size());
  const bool weighted = policy.aggregate == Aggregate::kWeighted;
  const double at_once = margin_of(0, dial_angle);
  const double ahead = margin_of(prefetch_margin(policy), dial_angle);
  float largest = 0, total = 0;
  for (size_t j = 0; j < importance.size(); ++j) {
    rule.weight[j] = weighted ? importance[j] : 1.0;
    const double tau = head_threshold(policy, importance[j]);
    rule.at_once.query[j] = ahead_threshold(tau, at_once);
    rule.ahead.query[j] = ahead_threshold(tau, ahead);
    largest = std::max(largest, importance[j]);
    total += importance[j];
  }
  const auto count = static_cast<double>(importance.size());
  const float of_group =
      weighted ? largest : static_cast<float>(static_cast<double>(total) / count);
  const double tau = head_threshold(policy, of_group);
  rule.at_once.mean = ahead_threshold(tau, at_once);
  rule.ahead.mean = ahead_threshold(tau, ahead);
  return rule;
}

SlotTable::SlotTable(const KvSystem& system, const StepBuffers& buffers, const CudaLimits& limits,
                     const Stream& stream)
    : system_(system),
      buffers_(buffers),
      stream_(stream),
      max_context_(limits.max_context_tokens),
      staging_(PinnedBlock::create(limits.max_batch * int64_t{sizeof(BatchSlot)}).value()),
      thresholds_(PinnedBlock::create(limits.max_batch * int64_t{system.shape.num_layers} *
                                      system.shape.num_kv_heads * kThresholdBytes)
                      .value()) {
  const int64_t max_batch = limits.max_batch;
  // Handed out from the back, so slot 0 goes first.
  free_.resize(static_cast<size_t>(max_batch));
  std::iota(free_.rbegin(), free_.rend(), 0);
  const int64_t heads = int64_t{max_batch} * system.shape.num_layers * system.shape.num_kv_heads;
  const auto clear = [&](void* target, int64_t num_bytes) {
    CLO_CUDA(cudaMemsetAsync(target, 0, static_cast<size_t>(num_bytes), stream.get()));
  };
  clear(buffers.slots, max_batch * int64_t{sizeof(BatchSlot)});
  clear(buffers.pending, heads * 4);
  clear(buffers.decided, heads * 4);
  clear(buffers.queue, sizeof(kernels::RefreshQueue));
  clear(buffers.jobs,
        kernels::kNumRings * buffers.queue_capacity * int64_t{sizeof(kernels::RefreshJob)});
  std::vector<int32_t*> answer_of;
  for (int64_t slot = 0; slot < max_batch; ++slot) {
    answer_of.push_back(buffers.answers + slot * max_context_);
  }
  CLO_CUDA(cudaMemcpy(buffers.answer_of, answer_of.data(), answer_of.size() * sizeof(int32_t*),
                      cudaMemcpyHostToDevice));
}

void SlotTable::upload(void* target, const void* source, int64_t num_bytes) {
  CLO_CUDA(cudaMemcpyAsync(target, source, static_cast<size_t>(num_bytes), cudaMemcpyHostToDevice,
                           stream_.get()));
}

int32_t SlotTable::assign(SequenceKv& sequence, const SamplingOptions& sampling,
                          const ForcedReuse& forced) {
  CLO_CHECK(!free_.empty());
  CLO_CHECK(!entries_.contains(&sequence));
  const int32_t slot = free_.back();
  free_.pop_back();
  entries_[&sequence] = {slot, false, sampling.temperature > 0 || sampling.repetition_penalty != 1};

  upload_heads(sequence);
  const KvShape& shape = system_.shape;
  const int64_t heads_per_slot = int64_t{shape.num_layers} * shape.num_kv_heads;
  std::vector<HeadRule> rules;
  for (int32_t layer = 0; layer < shape.num_layers; ++layer) {
    for (int32_t h = 0; h < shape.num_kv_heads; ++h) {
      rules.push_back(head_rule(sequence.policy(), sequence.importance(layer, h)));
    }
  }
  const std::span<const PageId> pages = sequence.pages();
  const int64_t num_pages = (sequence.capacity_tokens() + kPageTokens - 1) / kPageTokens;
  const std::span<uint64_t* const> codes = sequence.device_code_table();

  upload(buffers_.rules + slot * heads_per_slot, rules.data(),
         heads_per_slot * int64_t{sizeof(HeadRule)});
  int32_t* const device_pages = buffers_.pages + slot * buffers_.max_pages;
  uint64_t** const device_codes = buffers_.code_blocks + slot * buffers_.max_pages;
  if (!pages.empty()) upload(device_pages, pages.data(), num_pages * 4);
  if (!codes.empty()) upload(device_codes, codes.data(), num_pages * 8);
  CLO_CUDA(cudaMemsetAsync(buffers_.counters + slot * int64_t{shape.num_layers}, 0,
                           static_cast<size_t>(shape.num_layers) * sizeof(DeviceCounters),
                           stream_.get()));
  std::vector<uint32_t> watched;
  if (!sequence.watched.empty()) {
    watched.resize(static_cast<size_t>(buffers_.watched_words));
    for (const TokenRange& range : sequence.watched) {
      for (int64_t t = range.first; t < range.end; ++t) watched[t / 32] |= 1u << (t % 32);
    }
    upload(buffers_.watched + slot * buffers_.watched_words, watched.data(),
           buffers_.watched_words * 4);
  }
  // All bits set: not a number.
  CLO_CUDA(cudaMemsetAsync(buffers_.entropies + slot * heads_per_slot, 0xFF,
                           static_cast<size_t>(heads_per_slot) * sizeof(kernels::HeadEntropy),
                           stream_.get()));
  // The vectors above are read by the copies.
  stream_.synchronize();

  BatchSlot& entry = staged(slot);
  entry = {};
  entry.capacity_tokens = sequence.capacity_tokens();
  entry.pages = pages.empty() ? nullptr : device_pages;
  entry.code_blocks = codes.empty() ? nullptr : device_codes;
  entry.watched = watched.empty() ? nullptr : buffers_.watched + slot * buffers_.watched_words;
  entry.rules = sequence_rules(sequence, forced);
  entry.sampling.temperature = sampling.temperature;
  entry.sampling.top_k = sampling.top_k;
  entry.sampling.top_p = sampling.top_p;
  entry.sampling.min_p = sampling.min_p;
  entry.sampling.repetition_penalty = sampling.repetition_penalty;
  entry.sampling.seed = sampling.seed;
  upload(buffers_.slots + slot, &entry, sizeof entry);
  return slot;
}

void SlotTable::upload_heads(SequenceKv& sequence) {
  const KvShape& shape = system_.shape;
  std::vector<HeadCacheView> heads;
  for (int32_t layer = 0; layer < shape.num_layers; ++layer) {
    for (int32_t h = 0; h < shape.num_kv_heads; ++h) heads.push_back(sequence.head(layer, h));
  }
  upload(buffers_.heads + slot_of(sequence) * std::ssize(heads), heads.data(),
         std::ssize(heads) * int64_t{sizeof(HeadCacheView)});
  stream_.synchronize();  // the copy reads the vector
}

void SlotTable::upload_thresholds(const SequenceKv& sequence) {
  const KvShape& shape = system_.shape;
  const int64_t heads = int64_t{shape.num_layers} * shape.num_kv_heads;
  const int32_t slot = slot_of(sequence);
  std::byte* const staged = thresholds_.as<std::byte>() + slot * heads * kThresholdBytes;
  for (int32_t layer = 0; layer < shape.num_layers; ++layer) {
    for (int32_t h = 0; h < shape.num_kv_heads; ++h) {
      const HeadRule rule =
          head_rule(sequence.policy(), sequence.importance(layer, h), sequence.dial_angle());
      std::memcpy(staged + (int64_t{layer} * shape.num_kv_heads + h) * kThresholdBytes, &rule,
                  kThresholdBytes);
    }
  }
  CLO_CUDA(cudaMemcpy2DAsync(buffers_.rules + slot * heads, sizeof(HeadRule), staged,
                             kThresholdBytes, kThresholdBytes, static_cast<size_t>(heads),
                             cudaMemcpyHostToDevice, stream_.get()));
}

void SlotTable::turn_dial(const SequenceKv& sequence, int64_t from_context) {
  const int32_t slot = slot_of(sequence);
  kernels::SequenceRules& rules = staged(slot).rules;
  const double scale = sequence.dial()->setting().set_scale;
  kernels::SetScale(&scales)[2] = rules.set_scales;
  scales[kernels::setting_to_replace(scales)] = {from_context, scale};
  rules.largest_scale = std::max(rules.largest_scale, scale);
  follow_angle(rules, sequence);
  upload(&buffers_.slots[slot].rules, &rules, sizeof rules);
  upload_thresholds(sequence);
}

void SlotTable::activate(const SequenceKv& sequence, int32_t token) {
  Entry& at = entries_.at(&sequence);
  BatchSlot& entry = staged(at.slot);
  if (sequence.dial() != nullptr) {
    // The first sets had the policy's size; the slot is idle, and both settings can be written.
    const double scale = sequence.dial()->setting().set_scale;
    entry.rules.has_dial = true;
    entry.rules.set_scales[0] = entry.rules.set_scales[1] = {0, scale};
    entry.rules.largest_scale = std::max(1.0, scale);
    follow_angle(entry.rules, sequence);
    upload_thresholds(sequence);
  }
  entry.num_tokens = sequence.num_tokens();
  entry.num_answered = 1;
  entry.token = token;
  entry.active = 1;
  upload(buffers_.slots + at.slot, &entry, sizeof entry);
  // The first token came from the prefill's logits.
  upload(buffers_.answers + at.slot * max_context_, &entry.token, sizeof entry.token);
  at.active = true;
}

void SlotTable::set_token(const SequenceKv& sequence, int32_t token) {
  const int32_t slot = slot_of(sequence);
  staged(slot).token = token;
  upload(&buffers_.slots[slot].token, &staged(slot).token, sizeof token);
  // Penalties look at what was answered, not at what this device would have drawn.
  const int64_t answer = sequence.num_tokens() - staged(slot).num_tokens;
  upload(buffers_.answers + slot * max_context_ + answer, &staged(slot).token, sizeof token);
}

void SlotTable::release(const SequenceKv& sequence) {
  const auto found = entries_.find(&sequence);
  CLO_CHECK(found != entries_.end());
  const int32_t slot = found->second.slot;
  staged(slot) = {};
  upload(buffers_.slots + slot, &staged(slot), sizeof(BatchSlot));
  stream_.synchronize();
  free_.push_back(slot);
  entries_.erase(found);
}

int32_t SlotTable::slot_of(const SequenceKv& sequence) const { return entries_.at(&sequence).slot; }

bool SlotTable::is_active(const SequenceKv& sequence) const {
  return entries_.at(&sequence).active;
}

bool SlotTable::draws(const SequenceKv& sequence) const { return entries_.at(&sequence).draws; }

void SlotTable::read_counters(SequenceKv& sequence) {
  const auto layers = static_cast<size_t>(system_.shape.num_layers);
  std::vector<DeviceCounters> counts(layers);
  DeviceCounters* const at =
      buffers_.counters + slot_of(sequence) * int64_t{system_.shape.num_layers};
  const size_t num_bytes = layers * sizeof(DeviceCounters);
  CLO_CUDA(cudaMemcpyAsync(counts.data(), at, num_bytes, cudaMemcpyDeviceToHost, stream_.get()));
  CLO_CUDA(cudaMemsetAsync(at, 0, num_bytes, stream_.get()));
  stream_.synchronize();
  times_ = {};
  const auto add = [](int64_t& total, unsigned long long more) {
    total += static_cast<int64_t>(more);
  };
  for (size_t layer = 0; layer < layers; ++layer) {
    KvCounters& c = sequence.counters(static_cast<int32_t>(layer));
    const DeviceCounters& d = counts[layer];
    add(c.hits, d.hits);
    add(c.misses, d.misses);
    add(c.aged, d.aged);
    add(c.incomplete, d.incomplete);
    add(c.corrections, d.corrections);
    add(c.resident_selections, d.resident_selections);
    add(c.rows_requested, d.rows_requested);
    add(c.rows_fetched, d.rows_fetched);
    add(c.rows_saved_by_delta, d.rows_saved_by_delta);
    add(c.rows_saved_by_hits, d.rows_saved_by_hits);
    add(c.rows_attended, d.rows_attended);
    add(c.full_rows_attended, d.full_rows_attended);
    add(c.rows_in_context, d.rows_in_context);
    add(c.oracle_rows, d.oracle_rows);
    if (sequence.measures_mass) {  // counted for watched rows too
      add(c.mass_samples, d.mass_samples);
      c.mass_kept += d.mass_kept;
    }
    add(c.watched_rows, d.watched_rows);
    add(c.watched_rows_attended, d.watched_rows_attended);
    // The device adds up heads, which wait side by side.
    add(c.wait_ns, d.wait_ns / static_cast<unsigned long long>(system_.shape.num_kv_heads));
    times_.wait_ns += d.wait_ns;
    times_.fetch_ns += d.fetch_ns;
  }
}

const int32_t* SlotTable::device_pages(const SequenceKv& sequence) const {
  if (sequence.pages().empty()) return nullptr;
  return buffers_.pages + slot_of(sequence) * buffers_.max_pages;
}

uint64_t* const* SlotTable::device_code_blocks(const SequenceKv& sequence) const {
  if (sequence.device_code_table().empty()) return nullptr;
  return buffers_.code_blocks + slot_of(sequence) * buffers_.max_pages;
}

const HeadCacheView* SlotTable::device_heads(const SequenceKv& sequence, int32_t layer) const {
  return buffers_.heads + (int64_t{slot_of(sequence)} * system_.shape.num_layers + layer) *
                              system_.shape.num_kv_heads;
}

}  // namespace clo
