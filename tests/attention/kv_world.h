#pragma once
// A KV system without a model, for the tests of sequences and attention: rows and queries are a
// function of (layer, position, token id), so that equal prompts have equal rows.
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <cmath>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#include "attention/attention.h"
#include "reference/cpu_ops.h"
#include "select/set_rule.h"

namespace clo {

inline std::vector<float> normals(uint64_t seed, int64_t count) {
  std::mt19937_64 engine(seed * 0x9E3779B97F4A7C15u + 1);
  std::normal_distribution<float> distribution;
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = distribution(engine);
  return values;
}

// The CPU backend with a look at each decode attention before it runs.
class WatchedOps final : public Ops {
 public:
  explicit WatchedOps(int num_threads) : ops_(num_threads) {}
  std::function<void(const AttendParams&)> before_attend;

  std::string description() const override { return ops_.description(); }
  void embed(const EmbedParams& p) override { ops_.embed(p); }
  void rms_norm(const RmsNormParams& p) override { ops_.rms_norm(p); }
  void linear(const LinearParams& p) override { ops_.linear(p); }
  void rotary_table(const RotaryTableParams& p) override { ops_.rotary_table(p); }
  void rotate(const RotateParams& p) override { ops_.rotate(p); }
  void gated_silu(const GatedSiluParams& p) override { ops_.gated_silu(p); }
  void append(const AppendParams& p) override { ops_.append(p); }
  void prefill_attention(const PrefillAttentionParams& p) override { ops_.prefill_attention(p); }
  void cosine(const CosineParams& p) override { ops_.cosine(p); }
  void select(const SelectParams& p) override { ops_.select(p); }
  void attend(const AttendParams& p) override {
    if (before_attend) before_attend(p);
    ops_.attend(p);
  }
  void full_scores(const FullScoreParams& p) override { ops_.full_scores(p); }
  void key_spread(const KeySpreadParams& p) override { ops_.key_spread(p); }

 private:
  CpuOps ops_;
};

struct KvWorld {
  KvWorld(const KvShape& kv_shape, int64_t device_bytes, int64_t host_pages)
      : shape(kv_shape),
        ops(1),
        transfer(make_memcpy_engine(pool)),
        device(Arena::create("device", device_bytes, ErrorCode::kDeviceMemory).value()),
        store(HostStore::create(shape, HostLayout{shape, 1}.page_bytes() * host_pages).value()),
        codes(store, device),
        signs(shape, kHashSeed),
        system{shape, &ops, *transfer, device, &store, &codes, {}, {}, {1, 2}, true, false} {
    if (shape.code_bits == 0) return;
    for (int32_t layer = 0; layer < shape.num_layers; ++layer) {
      for (int32_t h = 0; h < shape.num_kv_heads; ++h) {
        system.hashes.push_back(signs.params(layer, h));
      }
    }
  }
  KvWorld(const KvWorld&) = delete;
  KvWorld& operator=(const KvWorld&) = delete;

  int64_t kv_width() const { return int64_t{shape.num_kv_heads} * shape.head_dim; }
  int64_t q_width() const { return int64_t{shape.num_q_heads} * shape.head_dim; }
  // Keys (what = 0) or values (1) of all KV heads [num_kv_heads, head_dim].
  std::vector<float> rows(int what, int32_t layer, int64_t position, int32_t token) const {
    const uint64_t seed = (static_cast<uint64_t>(layer) * 2 + static_cast<uint64_t>(what)) << 50;
    return normals(seed ^ (static_cast<uint64_t>(position) << 20) ^ static_cast<uint64_t>(token),
                   kv_width());
  }
  float rounded(float x) const {
    return shape.type == DType::kF32 ? x : bf16_to_f32(f32_to_bf16(x));
  }
  int64_t pages_in_use() const { return store.used_pages() - store.unreferenced_pages(); }

  KvShape shape;
  ThreadPool pool{1};
  WatchedOps ops;
  std::unique_ptr<TransferEngine> transfer;
  Arena device;
  HostStore store;
  CodeCache codes;
  HashSigns signs;
  KvSystem system;
};

inline PolicyOptions arbitrary_policy(const KvShape& shape, bool with_label_age) {
  PolicyOptions policy;
  policy.select = shape.code_bits > 0 ? *rc::gen::element(Select::kHash, Select::kGradedHash,
                                                          Select::kExact, Select::kRandom)
                                      : *rc::gen::element(Select::kExact, Select::kRandom);
  if (*rc::gen::inRange(0, 12) == 0) policy.select = Select::kNone;
  policy.set_tokens = *rc::gen::element<int64_t>(1, 7, 20, 40, 150, 1000, 0);
  policy.kv_ratio = *rc::gen::element(0.1, 0.9, 1.0);
  policy.sink = *rc::gen::inRange(0, 6);
  policy.recent = *rc::gen::inRange(1, 20);
  policy.max_label_age = *rc::gen::inRange(with_label_age ? 1 : 0, 20);
  policy.dense_layers = *rc::gen::element(0, 0, 0, 1, -1);
  if (*rc::gen::arbitrary<bool>()) policy.threshold = *rc::gen::element(-1.0, 0.5, 0.8, 2.0);
  policy.eta = *rc::gen::element(0.5, 0.8, 0.95);
  policy.aggregate = *rc::gen::element(Aggregate::kMean, Aggregate::kWeighted, Aggregate::kAll);
  policy.predict =
      *rc::gen::element(Predict::kNone, Predict::kPreviousLayer, Predict::kPreviousStep);
  if (policy.predict != Predict::kNone) {
    policy.correction = *rc::gen::element(Correction::kNone, Correction::kTrueQuery);
    policy.prefetch_margin = *rc::gen::element(0.0, 0.5, 1.0);
  }
  policy.fetch = *rc::gen::element(Fetch::kWhole, Fetch::kDelta);
  policy.persistent = *rc::gen::element(
      PolicyOptions::Persistent::kFillBudget, PolicyOptions::Persistent::kPerLayer,
      PolicyOptions::Persistent::kList, PolicyOptions::Persistent::kAll);
  policy.persistent_per_layer = *rc::gen::inRange(0, shape.num_kv_heads + 1);
  if (policy.persistent == PolicyOptions::Persistent::kList) {
    policy.persistent_heads = {{0, *rc::gen::inRange(0, shape.num_kv_heads)}};
  }
  return policy;
}

inline KvShape arbitrary_small_shape() {
  KvShape shape;
  shape.num_layers = *rc::gen::inRange(1, 4);
  shape.num_kv_heads = *rc::gen::inRange(1, 3);
  shape.num_q_heads = shape.num_kv_heads * *rc::gen::inRange(1, 3);
  shape.head_dim = 16;
  shape.type = *rc::gen::element(DType::kF32, DType::kBF16);
  shape.code_bits = *rc::gen::element(0, 64, 128);
  shape.stored = *rc::gen::element(RowFormat::kFull, RowFormat::kInt8, RowFormat::kFp8);
  return shape;
}

}  // namespace clo
