// Sequences whose stored rows are compressed: what a stored prefix gives back, what a demoted head
// keeps, and what such heads take of the device.
#include <gtest/gtest.h>

#include <cstring>
#include <map>

#include "kv_world.h"
#include "ops/stored_row.h"

namespace clo {
namespace {

// Prefills `tokens` of them, in chunks, with rows that are a function of their place.
void prefill(KvWorld& world, SequenceKv& kv, const std::vector<int32_t>& prompt, int64_t chunk) {
  Attention attention(world.system, 0.25f);
  while (kv.num_tokens() < std::ssize(prompt)) {
    const int64_t first = kv.num_tokens();
    const int64_t count = std::min(chunk, std::ssize(prompt) - first);
    attention.begin_prefill(kv, count, first + count == std::ssize(prompt));
    for (int32_t layer = 0; layer < world.shape.num_layers; ++layer) {
      std::vector<float> keys, values;
      for (int64_t t = first; t < first + count; ++t) {
        for (int what = 0; what < 2; ++what) {
          const auto row = world.rows(what, layer, t, prompt[static_cast<size_t>(t)]);
          auto& all = what == 0 ? keys : values;
          all.insert(all.end(), row.begin(), row.end());
        }
      }
      std::vector<float> queries;  // of each place its own, so that chunks change nothing
      for (int64_t t = first; t < first + count; ++t) {
        const auto query = normals(static_cast<uint64_t>(t) + 7, world.q_width());
        queries.insert(queries.end(), query.begin(), query.end());
      }
      std::vector<float> out(queries.size());
      attention.append(layer, keys.data(), values.data(), world.kv_width());
      attention.attend(layer, queries.data(), world.q_width(), out.data());
    }
    attention.end();
  }
}

std::vector<std::byte> bytes_at(const std::byte* row, int64_t size) { return {row, row + size}; }

// The forms of a token's row, made from its values by the rules of ops/stored_row.h.
struct Forms {
  std::vector<std::byte> full, stored, restored;
};
Forms forms_of(const KvWorld& world, int32_t layer, int32_t h, int64_t t, int32_t token) {
  const KvShape& shape = world.shape;
  const auto dim = static_cast<size_t>(shape.head_dim);
  const auto keys = world.rows(0, layer, t, token), values = world.rows(1, layer, t, token);
  std::vector<float> key(keys.begin() + h * std::ssize(keys) / shape.num_kv_heads,
                         keys.begin() + h * std::ssize(keys) / shape.num_kv_heads + dim);
  std::vector<float> value(values.begin() + h * std::ssize(keys) / shape.num_kv_heads,
                           values.begin() + h * std::ssize(keys) / shape.num_kv_heads + dim);
  for (float& x : key) x = world.rounded(x);
  for (float& x : value) x = world.rounded(x);
  Forms forms;
  forms.full.resize(static_cast<size_t>(shape.row_bytes()));
  forms.restored = forms.full;
  forms.stored.resize(static_cast<size_t>(shape.stored_row_bytes()));
  convert_from_f32(shape.type, key.data(), forms.full.data(), shape.head_dim);
  convert_from_f32(shape.type, value.data(), forms.full.data() + shape.value_offset(),
                   shape.head_dim);
  compress_row(shape, key.data(), value.data(), forms.stored.data());
  expand_to_full(shape, forms.stored.data(), forms.restored.data());
  return forms;
}

PolicyOptions small_policy(PolicyOptions::Persistent persistent) {
  PolicyOptions policy;
  policy.set_tokens = 60;
  policy.sink = 3;
  policy.recent = 10;
  policy.max_label_age = 20;
  policy.persistent = persistent;
  return policy;
}

class CompressedRows : public testing::TestWithParam<std::pair<DType, RowFormat>> {
 protected:
  KvShape shape() const { return {2, 4, 2, 32, GetParam().first, 128, GetParam().second}; }
};
INSTANTIATE_TEST_SUITE_P(Kinds, CompressedRows,
                         testing::Values(std::pair{DType::kF32, RowFormat::kInt8},
                                         std::pair{DType::kBF16, RowFormat::kInt8},
                                         std::pair{DType::kBF16, RowFormat::kFp8}));

constexpr int64_t kPrompt = 530, kRing = 30;

// Compares every row that a head has on the device, and its page's, with what it must be.
// `restored_below`: full rows of earlier tokens were made from stored ones.
void expect_rows(KvWorld& world, SequenceKv& kv, const std::vector<int32_t>& prompt,
                 int64_t restored_below) {
  const int64_t full = world.shape.row_bytes(), stored = world.shape.stored_row_bytes();
  int64_t num_full = 0;
  for (int32_t layer = 0; layer < world.shape.num_layers; ++layer) {
    const SequenceLayerView view = kv.layer_view(layer);
    for (int32_t h = 0; h < world.shape.num_kv_heads; ++h) {
      const HeadCacheView& head = kv.head(layer, h);
      for (int64_t t = 0; t < kPrompt; ++t) {
        const Forms forms = forms_of(world, layer, h, t, prompt[static_cast<size_t>(t)]);
        ASSERT_EQ(
            bytes_at(view.host_rows[t / kPageTokens] + (h * kPageTokens + t % kPageTokens) * stored,
                     stored),
            forms.stored);
        if (head.is_resident()) {
          ASSERT_EQ(bytes_at(head.resident + t * stored, stored), forms.stored) << t;
        }
        const std::byte* fixed = fixed_row(world.shape, head, t, kPrompt);
        ASSERT_EQ(fixed != nullptr, t < 3 || t >= kPrompt - kRing);
        if (fixed == nullptr) continue;
        ASSERT_EQ(bytes_at(fixed, full), t < restored_below ? forms.restored : forms.full) << t;
        ++num_full;
      }
      for (int32_t slot = 0; !head.is_resident() && slot < head.state->num_slots_used; ++slot) {
        const int64_t t = head.slot_token[slot];
        ASSERT_GE(t, 0);
        const Forms forms = forms_of(world, layer, h, t, prompt[static_cast<size_t>(t)]);
        ASSERT_EQ(bytes_at(head.slots + slot * stored, stored), forms.stored);
      }
    }
  }
  EXPECT_EQ(num_full, 4 * (3 + kRing));
}

TEST_P(CompressedRows, LieInTheFormOfTheirPlaceAndComeBackFromAPrefix) {
  for (const auto persistent :
       {PolicyOptions::Persistent::kPerLayer, PolicyOptions::Persistent::kAll}) {
    KvWorld world(shape(), 40000000, 12);
    SequenceKv::Options options;
    options.policy = small_policy(persistent);
    options.capacity_tokens = 600;
    const std::vector<int32_t> prompt(kPrompt, 1);
    options.prompt = prompt;
    const auto first = SequenceKv::create(world.system, options).value();
    ASSERT_EQ(first->reused_tokens(), 0);
    prefill(world, *first, prompt, 100);
    expect_rows(world, *first, prompt, 0);
    first->publish(prompt);

    const auto second = SequenceKv::create(world.system, options).value();
    ASSERT_EQ(second->reused_tokens(), 512);
    // As ever: rows of resident heads, or sinks and ring.
    EXPECT_EQ(second->layer_counters()[0].rows_restored,
              2 * (persistent == PolicyOptions::Persistent::kAll ? 512 : 3 + kRing));
    prefill(world, *second, prompt, 100);
    expect_rows(world, *second, prompt, 512);
    // The first set is chosen by codes, and these are of full rows on both sides.
    for (int32_t h = 0; h < 2; ++h) {
      const HeadCacheView& a = first->head(1, h);
      const HeadCacheView& b = second->head(1, h);
      EXPECT_GT(a.state->num_set_tokens, 0);
      EXPECT_TRUE(std::equal(a.slot_token, a.slot_token + a.slot_capacity, b.slot_token));
    }
  }
}

TEST_P(CompressedRows, CodesAreThoseOfTheFullRows) {
  KvShape plain = shape();
  plain.stored = RowFormat::kFull;
  const std::vector<int32_t> prompt(kPrompt, 1);
  SequenceKv::Options options;
  options.policy = small_policy(PolicyOptions::Persistent::kPerLayer);
  options.capacity_tokens = 600;
  options.prompt = prompt;
  std::vector<std::vector<uint64_t>> codes;
  for (const KvShape& kind : {shape(), plain}) {
    KvWorld world(kind, 40000000, 12);
    const auto kv = SequenceKv::create(world.system, options).value();
    prefill(world, *kv, prompt, 100);
    const SequenceLayerView view = kv->layer_view(1);
    codes.emplace_back(view.device_codes[1], view.device_codes[1] + 2 * kPageTokens * 2);
  }
  EXPECT_EQ(codes[0], codes[1]);
}

// A head that gives up its rows keeps its sink and ring as they were, in full.
TEST_P(CompressedRows, ADemotedHeadKeepsItsFullRows) {
  KvWorld world(shape(), 40000000, 12);
  SequenceKv::Options options;
  options.policy = small_policy(PolicyOptions::Persistent::kFillBudget);
  options.capacity_tokens = 600;
  options.num_budget_heads = 3;
  options.may_demote = true;
  const std::vector<int32_t> prompt(kPrompt, 1);
  options.prompt = prompt;
  const auto kv = SequenceKv::create(world.system, options).value();
  prefill(world, *kv, prompt, 100);
  ASSERT_EQ(kv->num_resident_heads(), 3);
  expect_rows(world, *kv, prompt, 0);
  const int64_t before = world.device.used_bytes(), own_before = kv->device_kv_bytes();
  const int64_t each = kv->bytes_of_demotion();
  ASSERT_GT(each, 0);
  kv->demote(2, kv->num_tokens());
  EXPECT_EQ(kv->num_resident_heads(), 1);
  EXPECT_EQ(kv->device_kv_bytes(), own_before - 2 * each);
  EXPECT_EQ(world.device.used_bytes(), before - 2 * each);
  expect_rows(world, *kv, prompt, 0);
  for (int32_t layer = 0; layer < 2; ++layer) {
    for (int32_t h = 0; h < 2; ++h) {
      const HeadCacheView& head = kv->head(layer, h);
      // Those demoted have no set yet; the others kept theirs.
      EXPECT_TRUE(head.state->has_label == 1 || head.state->num_slots_used == 0);
    }
  }
}

// With a set so large that slots and all take more than the rows did, demotion gives nothing back.
TEST_P(CompressedRows, AHeadThatWouldGrowIsNotDemoted) {
  for (const RowFormat stored : {GetParam().second, RowFormat::kFull}) {
    KvShape kind = shape();
    kind.stored = stored;
    KvWorld world(kind, 40000000, 12);
    SequenceKv::Options options;
    options.policy = small_policy(PolicyOptions::Persistent::kFillBudget);
    options.policy.set_tokens = 2500;
    options.policy.sink = 0;
    options.policy.recent = 1;
    options.capacity_tokens = 2500;
    options.num_budget_heads = 4;
    options.may_demote = true;
    const auto kv = SequenceKv::create(world.system, options).value();
    EXPECT_LT(kv->bytes_of_demotion(), 0);
    EXPECT_EQ(kv->num_budget_heads(), 0);
    EXPECT_EQ(kv->num_resident_heads(), 4);
    kv->demote(0, kv->num_tokens());
    EXPECT_EQ(kv->num_resident_heads(), 4);
  }
}

TEST_P(CompressedRows, TakeLessOfTheDeviceAndTheStore) {
  KvShape plain = shape();
  plain.stored = RowFormat::kFull;
  for (const auto persistent :
       {PolicyOptions::Persistent::kPerLayer, PolicyOptions::Persistent::kAll}) {
    SequenceKv::Options options;
    options.policy = small_policy(persistent);
    options.policy.set_tokens = 400;
    options.capacity_tokens = 2000;
    std::vector<int64_t> device, host;
    for (const KvShape& kind : {shape(), plain}) {
      KvWorld world(kind, 40000000, 12);
      const auto kv = SequenceKv::create(world.system, options).value();
      EXPECT_EQ(kv->device_kv_bytes(), SequenceKv::device_bytes(world.system, options));
      EXPECT_EQ(kv->device_kv_bytes(), world.device.used_bytes());
      device.push_back(kv->device_kv_bytes());
      host.push_back(kv->host_kv_bytes());
    }
    EXPECT_LT(device[0], device[1]);
    const int64_t saved = plain.row_bytes() - shape().stored_row_bytes();
    EXPECT_EQ(host[1] - host[0], int64_t{8} * kPageTokens * 4 * saved);
  }
}

}  // namespace
}  // namespace clo
