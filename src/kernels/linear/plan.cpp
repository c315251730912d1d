#include <algorithm>
#include <sstream>

#include "base/check.h"
#include "base/units.h"
#include "kernels/linear/linear.h"

namespace clo::kernels {

namespace {

constexpr int64_t kElement = 2;  // bf16 or f16
constexpr int64_t kWeightStageBytes = kElement * kSkinnyTileOutputs * kSkinnyStageInputs;

// Rings that are compiled: the deepest that leaves room for a neighbour, and one for parts whose
// multiprocessors have 100 KB.
constexpr int kStagesDeep[] = {8, 7};  // for up to 8 rows, for up to 16
constexpr int kStagesSmall = 4;

int64_t shared_bytes(int32_t row_tiles, int32_t stages) {
  const int64_t rows = 8 * row_tiles;
  const int64_t stage = kWeightStageBytes + kElement * rows * kSkinnyStageInputs;
  const int64_t halves = int64_t{sizeof(float)} * kSkinnyTileOutputs * rows;  // see skinny.cu
  return stages * stage + halves;
}

}  // namespace

SkinnyPlan plan_skinny_linear(int64_t num_outputs, int64_t num_inputs, int32_t rows,
                              int32_t num_multiprocessors, int64_t shared_bytes_limit,
                              int32_t max_splits) {
  CLO_CHECK(num_outputs >= 1 && num_outputs < (int64_t{1} << 30), num_outputs);
  CLO_CHECK(num_inputs >= 8 && num_inputs % 8 == 0 && num_inputs < (int64_t{1} << 30), num_inputs);
  CLO_CHECK(rows >= 1 && rows <= kSkinnyRows, rows);
  CLO_CHECK(num_multiprocessors >= 1 && max_splits >= 1, num_multiprocessors, max_splits);

  const int64_t tiles = divide_up(num_outputs, kSkinnyTileOutputs);
  const int64_t chunks = divide_up(num_inputs, kSkinnyStageInputs);

  // A block that has more to read than the mean holds up the rest; parts are written, then read by
  // a kernel of few blocks. So: the cut with the least of (most bytes of a block + twice the parts'
  // traffic per block at full rows + what one more part to add costs in latency, as bytes of the
  // stream). Not a function of `rows`.
  constexpr int64_t kPartLatencyBytes = 4 << 10;
  SkinnyPlan plan;
  int64_t least = 0;
  for (int64_t wanted = 1; wanted <= std::min<int64_t>(max_splits, chunks); ++wanted) {
    const int64_t split_chunks = divide_up(chunks, wanted);
    const int64_t splits = divide_up(chunks, split_chunks);  // no part is empty
    const int64_t part_bytes = 2 * int64_t{sizeof(float)} * kSkinnyRows * num_outputs;
    const int64_t cost =
        divide_up(tiles * splits, num_multiprocessors) * split_chunks * kWeightStageBytes +
        splits * (2 * part_bytes / num_multiprocessors + kPartLatencyBytes);
    if (wanted > 1 && cost >= least) continue;
    least = cost;
    plan.splits = static_cast<int32_t>(splits);
    plan.split_inputs = split_chunks * kSkinnyStageInputs;
  }
  plan.tile_outputs = kSkinnyTileOutputs;
  plan.grid = static_cast<int32_t>(std::min<int64_t>(tiles * plan.splits, num_multiprocessors));

  const int32_t row_tiles = rows <= 8 ? 1 : 2;
  const int64_t limit = std::min(shared_bytes_limit, kSkinnyMaxSharedBytes);
  plan.stages = kStagesDeep[row_tiles - 1];
  if (shared_bytes(row_tiles, plan.stages) > limit) plan.stages = kStagesSmall;
  plan.shared_bytes = shared_bytes(row_tiles, plan.stages);
  CLO_CHECK(plan.shared_bytes <= limit, plan.shared_bytes, limit);
  return plan;
}

int64_t skinny_items(const SkinnyPlan& plan, int64_t num_outputs) {
  return divide_up(num_outputs, plan.tile_outputs) * plan.splits;
}

double skinny_balance(const SkinnyPlan& plan, int64_t num_outputs, int64_t num_inputs,
                      int32_t num_multiprocessors) {
  const int64_t tiles = divide_up(num_outputs, plan.tile_outputs);
  const int64_t chunks = divide_up(num_inputs, kSkinnyStageInputs);
  const int64_t split_chunks = plan.split_inputs / kSkinnyStageInputs;
  int64_t most = 0;
  for (int64_t block = 0; block < plan.grid; ++block) {
    int64_t own = 0;
    for (int64_t item = block; item < tiles * plan.splits; item += plan.grid) {
      own += std::min(split_chunks, chunks - item % plan.splits * split_chunks);
    }
    most = std::max(most, own);
  }
  return static_cast<double>(tiles * chunks) / (static_cast<double>(most) * num_multiprocessors);
}

std::string describe(const SkinnyPlan& plan) {
  std::ostringstream out;
  out << plan.splits << (plan.splits == 1 ? " part of " : " parts of ") << plan.split_inputs
      << " inputs, tiles of " << plan.tile_outputs << " outputs, " << plan.grid << " blocks, "
      << plan.stages << " stages, " << format_bytes(plan.shared_bytes) << " shared";
  return out.str();
}

}  // namespace clo::kernels
