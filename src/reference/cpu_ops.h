#pragma once
// Ops on the CPU: the backend of machines without a GPU and the oracle for the kernels. "Device"
// memory is the device arena; these loops read rows only through the views they are given.
// Owned by the engine, called from its thread; loops that are worth it run on the pool's threads.
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/thread_pool.h"
#include "clo/result.h"
#include "ops/graded_query.h"
#include "ops/ops.h"
#include "reference/simd.h"

namespace clo {

// The kinds of a head's rows: in sink and ring, and everywhere else.
RowKind full_kind(const KvShape& shape);
RowKind stored_kind(const KvShape& shape);
// The stored row of a token: a resident head's own, or in the host store.
const std::byte* stored_row(const KvShape& shape, const HeadTask& task, int64_t token);
// The mask of the task's sequence; null: none.
inline const TokenMask* mask_of(const HeadTask& task) {
  return task.sequence == nullptr ? nullptr : task.sequence->mask;
}

// The rows that a head attends to in a step: those listed, then a run of a resident head's.
struct RowList {
  std::vector<const std::byte*> listed;
  int64_t num_full = 0;  // of the listed ones, at their beginning: full rows beside compressed ones
  const std::byte* run = nullptr;
  int64_t num_in_run = 0;

  int64_t size() const { return static_cast<int64_t>(listed.size()) + num_in_run; }
};

class CpuOps final : public Ops {
 public:
  // `pool` outlives this.
  explicit CpuOps(ThreadPool& pool);
  // With a pool of its own: as an oracle, away from an engine. Requires: num_threads >= 1.
  explicit CpuOps(int num_threads);

  // head_dim and group size that the loops are cut for. Fails: kUnsupported, naming the limit.
  static Status supports(const KvShape& shape);

  std::string description() const override;
  void embed(const EmbedParams& params) override;
  void rms_norm(const RmsNormParams& params) override;
  void linear(const LinearParams& params) override;
  void rotary_table(const RotaryTableParams& params) override;
  void rotate(const RotateParams& params) override;
  void gated_silu(const GatedSiluParams& params) override;
  void append(const AppendParams& params) override;
  void prefill_attention(const PrefillAttentionParams& params) override;
  void cosine(const CosineParams& params) override;
  void select(const SelectParams& params) override;
  void attend(const AttendParams& params) override;
  void full_scores(const FullScoreParams& params) override;
  void key_spread(const KeySpreadParams& params) override;

  // Up to so many rows the vector loops beat a blocked GEMM, and give each row the same result
  // whatever the batch; products of more widen the weights to f32.
  static constexpr int64_t kSmallRows = 16;

  // What the scratch of an instance grows to: weight conversion, packed pages, scores, row lists
  // and the GEMM library's own. Largest weight matrix [matrix_rows, matrix_cols], steps of
  // `step_rows` tokens, `batch` sequences of `context_tokens`. `widens`: weights are not all f32.
  static int64_t scratch_bytes_for(const KvShape& shape, int64_t matrix_rows, int64_t matrix_cols,
                                   int64_t step_rows, int64_t context_tokens, int64_t batch,
                                   bool widens);

 private:
  // x weight^T for many rows, by the GEMM library: weight [num_rows, num_cols] in f32.
  void gemm(const LinearParams& params, const float* weight);

  // Few rows, weights in blocks: the rows become 8-bit blocks too.
  void linear_blocks(const LinearParams& params);

  std::unique_ptr<ThreadPool> own_pool_;
  ThreadPool& pool_;
  const SimdTable& simd_;
  std::vector<float> weight_f32_;                   // one weight matrix widened for a GEMM
  std::vector<ActivationBlock> activations_;        // rows of a product with blocks
  std::vector<float> packed_keys_, packed_values_;  // one page of every KV head
  std::vector<float> row_max_, row_sum_;            // online softmax state of a prefill chunk
  std::vector<std::vector<float>> tile_;            // [thread] scores of a tile
  std::vector<float> scaled_queries_;               // decode queries times scale
  std::vector<float> partial_;                      // decode: one (max, sum, acc) per part
  std::vector<RowList> row_lists_;                  // decode: [task] rows attended
  std::vector<int64_t> first_part_;                 // decode: [task + 1] part numbers
};

// Bits of one key, or of one query (Select::kHash): a key's projections have a bias. x [head_dim],
// out [bits / 64]. scratch [width].
void encode_row(const SimdTable& simd, const HashParams& hash, const float* x, bool is_key,
                uint64_t* out, float* scratch);

// What a group's queries ask codes for together; see ops/graded_query.h.
struct GradedQuery {
  int32_t most = 0;                                         // weight of a bit
  uint64_t signs[kMaxCodeBits / 64] = {};                   // [words]
  uint64_t planes[kWeightPlanes * kMaxCodeBits / 64] = {};  // [kWeightPlanes][words]
};
// queries [group, head_dim].
GradedQuery grade_query(const SimdTable& simd, const HashParams& hash, const float* queries,
                        int group);
// From their sum's projection [bits].
GradedQuery grade_projection(std::span<const float> values);

}  // namespace clo
