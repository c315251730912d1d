#include "profile/structured_windows.h"

#include <algorithm>
#include <cmath>

#include "profile/training_parts.h"

namespace clo {

namespace {

constexpr int kRank = 12;         // directions in which a head's rows differ
constexpr float kSpread = 3;      // along each
constexpr float kNoise = 0.15f;   // elsewhere, per dimension
constexpr float kRemains = 0.9f;  // of a query's place at the next step

// What a head's rows have in common.
struct HeadSpace {
  std::vector<float> directions;  // [kRank, dim]
  std::vector<float> key_constant, query_constant;
};

HeadSpace space_of(int64_t dim, training::Random& random) {
  HeadSpace space;
  const float unit = 1 / std::sqrt(static_cast<float>(dim));
  for (int64_t i = 0; i < kRank * dim; ++i) space.directions.push_back(unit * random.normal());
  for (int64_t d = 0; d < dim; ++d) space.key_constant.push_back(random.normal());
  for (int64_t d = 0; d < dim; ++d) space.query_constant.push_back(random.normal());
  return space;
}

void write_row(const HeadSpace& space, std::span<const float> constant, const float* place,
               training::Random& random, std::span<float> row) {
  for (size_t d = 0; d < row.size(); d += 2) {
    // Two uniform numbers of standard deviation kNoise.
    const uint64_t bits = random.next();
    const auto noise = [](uint64_t half) {
      return kNoise * 1.7320508f * (static_cast<float>(half) * 0x1p-31f - 1);
    };
    row[d] = constant[d] + noise(bits >> 32);
    if (d + 1 < row.size()) row[d + 1] = constant[d + 1] + noise(bits & 0xFFFFFFFFu);
  }
  for (int i = 0; i < kRank; ++i) {
    const float* direction = space.directions.data() + i * row.size();
    for (size_t d = 0; d < row.size(); ++d) row[d] += place[i] * direction[d];
  }
}

void fill_head(const KvShape& shape, int32_t layer, int32_t kv_head, int64_t window, uint64_t seed,
               WindowTrace& trace) {
  const auto head = static_cast<uint64_t>(int64_t{layer} * shape.num_kv_heads + kv_head);
  training::Random of_head(seed + 0x9E3779B9u * (head + 1));
  const HeadSpace space = space_of(shape.head_dim, of_head);
  training::Random random(of_head.next() + 0x85EBCA6Bu * static_cast<uint64_t>(window + 1));
  float place[kRank];
  for (int64_t token = 0; token < trace.num_tokens(); ++token) {
    for (float& p : place) p = kSpread * random.normal();
    write_row(space, space.key_constant, place, random, trace.key(layer, kv_head, token));
  }
  const float moves = std::sqrt(1 - kRemains * kRemains);
  for (int32_t g = 0; g < shape.group_size(); ++g) {
    for (float& p : place) p = kSpread * random.normal();
    for (int64_t i = 0; i < trace.num_runs() * trace.num_steps(); ++i) {
      for (float& p : place) p = kRemains * p + moves * kSpread * random.normal();
      write_row(space, space.query_constant, place, random,
                trace.query(layer, kv_head * shape.group_size() + g, i / trace.num_steps(),
                            i % trace.num_steps()));
    }
  }
}

}  // namespace

std::vector<WindowTrace> structured_windows(const KvShape& shape, int64_t windows,
                                            int64_t num_tokens, int64_t num_steps, int64_t num_runs,
                                            uint64_t seed, ThreadPool& pool) {
  std::vector<WindowTrace> traces;
  for (int64_t w = 0; w < windows; ++w) {
    traces.emplace_back(shape, num_tokens, num_steps, num_runs);
  }
  const int64_t heads = int64_t{shape.num_layers} * shape.num_kv_heads;
  pool.run(windows * heads, [&](int64_t i, int) {
    const int64_t head = i % heads;
    fill_head(shape, static_cast<int32_t>(head / shape.num_kv_heads),
              static_cast<int32_t>(head % shape.num_kv_heads), i / heads, seed,
              traces[static_cast<size_t>(i / heads)]);
  });
  return traces;
}

}  // namespace clo
