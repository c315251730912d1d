#include <algorithm>
#include <sstream>

#include "base/check.h"
#include "base/units.h"
#include "kernels/linear/linear.h"
#include "kernels/linear/tiles.h"

namespace clo::kernels {

namespace {

constexpr int64_t kElement = 2;  // bf16 or f16

// One kind of weights: how a block of 64 outputs goes through the ring.
struct Format {
  int64_t stage_inputs = 0;
  int64_t weight_stage_bytes = 0;
  // Rings that are compiled, for up to 8 rows and for up to 16: the deepest that leaves room for a
  // neighbour, and one for parts whose multiprocessors have 100 KB.
  int32_t deep[2] = {}, small[2] = {};

  int64_t shared_bytes(int32_t row_tiles, int32_t stages) const {
    const int64_t rows = 8 * row_tiles;
    const int64_t stage = weight_stage_bytes + kElement * rows * stage_inputs;
    // Two warps share a stage's inputs: one hands its sums over.
    const int64_t sums = int64_t{sizeof(float)} * kSkinnyTileOutputs * rows;
    return stages * stage + sums;
  }
};

SkinnyPlan plan_product(const Format& format, int64_t num_outputs, int64_t num_inputs, int32_t rows,
                        int32_t num_multiprocessors, int64_t shared_bytes_limit,
                        int32_t max_splits) {
  CLO_CHECK(num_outputs >= 1 && num_outputs < (int64_t{1} << 30), num_outputs);
  CLO_CHECK(num_inputs >= 8 && num_inputs % 8 == 0 && num_inputs < (int64_t{1} << 30), num_inputs);
  CLO_CHECK(rows >= 1 && rows <= kSkinnyRows, rows);
  CLO_CHECK(num_multiprocessors >= 1 && max_splits >= 1, num_multiprocessors, max_splits);

  const int64_t tiles = divide_up(num_outputs, kSkinnyTileOutputs);
  const int64_t chunks = divide_up(num_inputs, format.stage_inputs);

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
        divide_up(tiles * splits, num_multiprocessors) * split_chunks * format.weight_stage_bytes +
        splits * (2 * part_bytes / num_multiprocessors + kPartLatencyBytes);
    if (wanted > 1 && cost >= least) continue;
    least = cost;
    plan.splits = static_cast<int32_t>(splits);
    plan.split_inputs = split_chunks * format.stage_inputs;
  }
  plan.tile_outputs = kSkinnyTileOutputs;
  plan.grid = static_cast<int32_t>(std::min<int64_t>(tiles * plan.splits, num_multiprocessors));

  const int32_t row_tiles = rows <= 8 ? 1 : 2;
  const int64_t limit = std::min(shared_bytes_limit, kSkinnyMaxSharedBytes);
  plan.stages = format.deep[row_tiles - 1];
  if (format.shared_bytes(row_tiles, plan.stages) > limit)
    plan.stages = format.small[row_tiles - 1];
  plan.shared_bytes = format.shared_bytes(row_tiles, plan.stages);
  CLO_CHECK(plan.shared_bytes <= limit, plan.shared_bytes, limit);
  return plan;
}

}  // namespace

SkinnyPlan plan_skinny_linear(int64_t num_outputs, int64_t num_inputs, int32_t rows,
                              int32_t num_multiprocessors, int64_t shared_bytes_limit,
                              int32_t max_splits) {
  const Format plain = {.stage_inputs = kSkinnyStageInputs,
                        .weight_stage_bytes = kElement * kSkinnyTileOutputs * kSkinnyStageInputs,
                        .deep = {8, 7},
                        .small = {4, 4}};
  return plan_product(plain, num_outputs, num_inputs, rows, num_multiprocessors, shared_bytes_limit,
                      max_splits);
}

SkinnyPlan plan_tiled_linear(WeightBlocks blocks, int64_t num_outputs, int64_t num_inputs,
                             int32_t rows, int32_t num_multiprocessors, int64_t shared_bytes_limit,
                             int32_t max_splits) {
  CLO_CHECK(num_inputs % kBlockInputs == 0, num_inputs);
  const Format tiled = {
      .stage_inputs = tiled_stage_inputs(blocks),
      .weight_stage_bytes = kSkinnyTileOutputs / kTileOutputs * 8 * tile_bytes(blocks),
      .deep = {tiled_stages(blocks, 1, true), tiled_stages(blocks, 2, true)},
      .small = {tiled_stages(blocks, 1, false), tiled_stages(blocks, 2, false)}};
  return plan_product(tiled, num_outputs, num_inputs, rows, num_multiprocessors, shared_bytes_limit,
                      max_splits);
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
