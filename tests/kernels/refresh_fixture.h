#pragma once
// Runs of decisions over consecutive contexts, on the device and on the CPU backend.
#include <span>
#include <string>
#include <vector>

#include "kernels/refresh_world.h"

namespace clo::kernels {
inline namespace refresh_world {

class RefreshTest : public GpuTest {
 protected:
  static void now(World& world, const std::vector<float>& queries, int64_t context,
                  int32_t num_clusters) {
    world.decode(queries, context);
    world.drain(num_clusters);
    CLO_CUDA(cudaDeviceSynchronize());
  }

  // Decisions from true queries over contexts that grow, both sides compared after each. What the
  // CPU counted, so that a test can tell that its case came up.
  static KvCounters walk(const Scene& scene, std::span<const int64_t> growth, float step = 0.4f,
                         World::How how = World::How::kDecide) {
    World world(scene);
    int64_t context = scene.context;
    for (size_t i = 0; i < growth.size(); ++i) {
      context += growth[i];
      const std::vector<float> queries = world.next_queries(step);
      const std::string where = "head_dim " + std::to_string(scene.head_dim) + " group " +
                                std::to_string(scene.group) + " context " +
                                std::to_string(context) + " step " + std::to_string(i);
      world.cpu_refresh(queries, context, how);
      now(world, queries, context, i % 2 == 0 ? 3 : 16);
      world.expect_equal(where);
      if (HasFatalFailure()) break;
    }
    KvCounters total;
    for (int32_t s = 0; s < scene.num_slots; ++s) total += world.cpu_counters(s);
    return total;
  }
  static constexpr int64_t kSteps[] = {0, 1, 1, 70, 1, 130};
};

}  // namespace refresh_world
}  // namespace clo::kernels
