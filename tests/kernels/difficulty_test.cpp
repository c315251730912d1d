// How hard heads are by a prompt's last queries, against the reuse rule.
#include "kernels/refresh/difficulty.h"

#include <cmath>

#include "kernels/refresh_world.h"

namespace clo::kernels {
namespace {

class DifficultyTest : public GpuTest {};

// A chunk's queries, [rows, kv_heads * group * head_dim]: a walk whose steps differ by head, with a
// jump here and there.
std::vector<float> walk_of(const Scene& scene, int64_t rows) {
  const int64_t of_head = int64_t{scene.group} * scene.head_dim, width = scene.kv_heads * of_head;
  std::vector<float> x = random_floats(rows * width, 7);
  for (int64_t r = 1; r < rows; ++r) {
    for (int64_t i = 0; i < width; ++i) {
      const auto head = static_cast<int32_t>(i / of_head);
      const float step = (r + head) % 5 == 0 ? 3.0f : 0.2f * static_cast<float>(head + 1);
      const auto at = static_cast<size_t>(r * width + i);
      x[at] = x[at - static_cast<size_t>(width)] + step * x[at];
    }
  }
  return x;
}

TEST_F(DifficultyTest, CountsWhatTheReuseRuleWouldMiss) {
  for (const int32_t head_dim : {64, 128}) {
    for (const int32_t group : {1, 3, 4, 8}) {
      for (const Aggregate aggregate : {Aggregate::kWeighted, Aggregate::kMean, Aggregate::kAll}) {
        for (const auto& [rows, count] : {std::pair{2, 1}, {9, 8}, {200, 64}}) {
          Scene scene;
          scene.head_dim = head_dim;
          scene.group = group;
          scene.kv_heads = 4;
          scene.num_slots = 2;
          scene.type = group % 2 == 0 ? DType::kBF16 : DType::kF16;
          scene.policy.threshold = 0.9;
          scene.policy.aggregate = aggregate;
          World world(scene);
          world.set_num_tokens(scene.context);
          const std::vector<uint16_t> bits = to_bits(scene.type, walk_of(scene, rows));
          const std::vector<float> values = from_bits(scene.type, bits);
          const DeviceArray<uint16_t> queries(bits);
          DeviceArray<uint32_t> misses(std::vector<uint32_t>(4, 77));
          PromptDifficulty params;
          params.tables = world.tables();
          params.queries = queries.data();
          params.misses = misses.data();
          params.rows = rows;
          params.count = count;
          params.slot = 1;
          params.layer = kLayer;
          prompt_difficulty(params, nullptr);
          CLO_CUDA(cudaDeviceSynchronize());
          const std::vector<uint32_t> found = misses.download();
          const int64_t width = int64_t{4} * group * head_dim;
          uint32_t total = 0;
          for (int32_t h = 0; h < 4; ++h) {
            uint32_t expected = 0;
            for (int64_t r = rows - count; r < rows; ++r) {
              std::vector<float> cosine;
              for (int32_t g = 0; g < group; ++g) {
                const float* now = values.data() + r * width + (h * group + g) * head_dim;
                double dot = 0, a = 0, b = 0;
                for (int32_t d = 0; d < head_dim; ++d) {
                  const double x = now[d], y = (now - width)[d];
                  dot += x * y, a += x * x, b += y * y;
                }
                cosine.push_back(static_cast<float>(dot / std::sqrt(a * b)));
              }
              expected += !similar_enough(scene.policy, cosine, world.importance_of(h));
            }
            EXPECT_EQ(found[static_cast<size_t>(h)], expected)
                << "head_dim " << head_dim << " group " << group << " rows " << rows << " head "
                << h;
            total += expected;
          }
          if (count == 64) {
            EXPECT_GT(total, 0u);
            EXPECT_LT(total, 4 * 64u);
          }
        }
      }
    }
  }
}

// Heads that have a set keep it; those without one choose it from where rows are stored.
TEST_F(DifficultyTest, SetsAreChosenAgainFromStoredRows) {
  for (const int64_t resident_of : {int64_t{0}, int64_t{3}}) {
    Scene scene;
    scene.kv_heads = 4;
    scene.resident_of = resident_of;
    scene.policy = always();
    scene.policy.set_tokens = 300;
    World world(scene);
    world.set_num_tokens(scene.context);
    const std::vector<float> first = world.next_queries(0.4f), last = world.next_queries(2.0f);
    const auto prime = [&](const std::vector<float>& queries) {
      const DeviceArray<float> on_device(queries);
      PrimeSets params;
      params.tables = world.tables();
      params.scratch = world.scratch(scene.kv_heads);
      params.queries = on_device.data();
      params.context_tokens = scene.context;
      params.layer = kLayer;
      prime_sets(params, nullptr);
      CLO_CUDA(cudaDeviceSynchronize());
    };
    world.cpu_refresh(first, scene.context, World::How::kPrime);
    prime(first);
    world.expect_equal("first sets");
    prime(last);
    world.expect_equal("kept sets");
    EXPECT_EQ(world.device_counters(0).misses, 0u);
  }
}

}  // namespace
}  // namespace clo::kernels
