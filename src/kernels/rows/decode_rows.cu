// One block per (row, KV head), one warp for each thing to do: every query of the group is
// normalised and rotated; so is the key, and the token's row and code go to every place that keeps
// them; and a last warp decides with the queries what becomes of the head's set. A few dozen small
// blocks: the kernel lasts as long as its longest chain of loads, so what does not depend on the
// kernel before is loaded ahead of it.
#include "base/check.h"
#include "kernels/element.cuh"
#include "kernels/launch.cuh"
#include "kernels/refresh/decide.cuh"
#include "kernels/rows/encode.cuh"
#include "kernels/rows/head_math.cuh"
#include "kernels/rows/offsets.h"
#include "kernels/rows/rows.h"
#include "kernels/rows/stored_rows.cuh"
#include "kernels/rules.cuh"

namespace clo::kernels {

namespace {

constexpr int kWarps = 4;                  // of a block of predicted queries
constexpr int kMostWarps = kMaxGroup + 2;  // of a block of decode rows

// Heads of a projection: parts [splits][rows][heads * head_dim], summed in order, then the bias.
struct Projection {
  const float* parts;
  const float* bias;
  int64_t row_stride;    // elements of a row
  int64_t split_stride;  // elements of a part
  int32_t splits;
};

template <int kElements>
__device__ __forceinline__ void load_head(float (&x)[kElements], const Projection& p, int32_t row,
                                          int32_t head, const float (&bias)[kElements], int lane) {
  const float* source =
      p.parts + row * p.row_stride + static_cast<int64_t>(head) * (32 * kElements);
  load_strided(x, source, lane);
  for (int32_t s = 1; s < p.splits; ++s) {
    float more[kElements];
    load_strided(more, source + s * p.split_stride, lane);
#pragma unroll
    for (int e = 0; e < kElements; ++e) x[e] = __fadd_rn(x[e], more[e]);
  }
  if (p.bias == nullptr) return;
#pragma unroll
  for (int e = 0; e < kElements; ++e) x[e] = __fadd_rn(x[e], bias[e]);
}

// The constants of one head, loaded before the kernel waits.
template <int kElements>
struct HeadConstants {
  float bias[kElements] = {};
  float norm[kElements] = {};

  __device__ __forceinline__ HeadConstants(const float* bias_of_head, const float* norm_weight,
                                           int lane) {
    if (bias_of_head != nullptr) load_strided(bias, bias_of_head, lane);
    if (norm_weight != nullptr) load_strided(norm, norm_weight, lane);
  }
};

// A row [K | V] in shared memory goes to `target` in pieces of 16 bytes, a whole row at once.
template <int kRowBytes>
__device__ __forceinline__ void store_row(std::byte* target, const uint4& piece, int lane) {
  if (lane * 16 < kRowBytes) reinterpret_cast<uint4*>(target)[lane] = piece;
}

// Threads of the first `count` warps that call it, and only they.
__device__ __forceinline__ void sync_warps(int count) {
  asm volatile("bar.sync 1, %0;" ::"r"(32 * count) : "memory");
}

// One (row, KV head) of a step.
template <typename Element, int kElements>
class HeadStep {
 public:
  static constexpr int kHeadDim = 32 * kElements, kRowBytes = 4 * kHeadDim;
  struct Shared {
    float queries[kMaxGroup * kHeadDim];
    alignas(16) uint16_t row[2 * kHeadDim];
  };

  // Requires: slot_index is that of `row`, and its slot is active.
  __device__ HeadStep(const DecodeRows& params, Shared& shared, int32_t row, int32_t kv_head,
                      int32_t slot_index)
      : p_(params),
        t_(params.tables),
        slot_(params.tables.slots[slot_index]),
        shared_(shared),
        row_(row),
        kv_head_(kv_head),
        slot_index_(slot_index),
        q_heads_(params.tables.shape.num_q_heads),
        kv_heads_(params.tables.shape.num_kv_heads),
        group_(q_heads_ / kv_heads_),
        lane_(static_cast<int>(threadIdx.x) % 32),
        index_(table_index(params.tables, slot_index, params.layer, kv_head)),
        resident_(params.tables.heads[index_].resident != nullptr),
        context_(slot_.num_tokens + 1) {
    // A step launched ahead may run past a sequence's end; nothing of it may be kept.
    in_range_ = slot_.num_tokens < slot_.capacity_tokens;
    decides_ = in_range_ && !(attends_all(slot_.rules, resident_, p_.layer, context_) &&
                              attends_all(slot_.rules, resident_, p_.layer, context_ + 1));
  }

  __device__ void run() {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    if (warp < group_) {
      query(warp);
    } else if (warp == group_) {
      key_and_value();
    } else {
      decide();
    }
  }

 private:
  __device__ const float* bias_of(int32_t head) const {
    return p_.bias == nullptr ? nullptr : p_.bias + static_cast<int64_t>(head) * kHeadDim;
  }
  // Of the query, key and value heads side by side.
  __device__ Projection projection() const {
    const int64_t width = static_cast<int64_t>(q_heads_ + 2 * kv_heads_) * kHeadDim;
    return {p_.parts, p_.bias, width, width * p_.rows, p_.splits};
  }
  // Sum of parts, bias, norm, rotation. Waits for the kernel before.
  __device__ void rotated_head(float (&x)[kElements], int32_t head,
                               const float* norm_weight) const {
    const HeadConstants<kElements> constants(bias_of(head), norm_weight, lane_);
    float cosine[kElements / 2], sine[kElements / 2];
    wait_for_predecessor();
    load_head(x, projection(), row_, head, constants.bias, lane_);
    load_strided(cosine, p_.cosine + static_cast<int64_t>(row_) * (kHeadDim / 2), lane_);
    load_strided(sine, p_.sine + static_cast<int64_t>(row_) * (kHeadDim / 2), lane_);
    if (norm_weight != nullptr) norm_head(x, constants.norm, p_.norm_epsilon);
    rotate_head(x, cosine, sine);
  }

  __device__ void query(int g) {
    float x[kElements];
    const int32_t head = kv_head_ * group_ + g;
    rotated_head(x, head, p_.q_norm);
    float* out = p_.queries + (static_cast<int64_t>(row_) * q_heads_ + head) * kHeadDim;
#pragma unroll
    for (int e = 0; e < kElements; ++e) out[e * 32 + lane_] = x[e];
    if (!decides_) return;
    float* kept = kept_query(t_, index_, query_turn(context_)) + g * kHeadDim;
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      shared_.queries[g * kHeadDim + e * 32 + lane_] = x[e];
      kept[e * 32 + lane_] = x[e];
    }
    sync_group();
  }

  // Sets are chosen among tokens before this one, so the decision need not wait for its row.
  __device__ void key_and_value() {
    float x[kElements], value[kElements];
    const int32_t value_head = q_heads_ + kv_heads_ + kv_head_;
    const HeadConstants<kElements> of_value(bias_of(value_head), nullptr, lane_);
    rotated_head(x, q_heads_ + kv_head_, p_.k_norm);
    load_head(value, projection(), row_, value_head, of_value.bias, lane_);
    // K is rounded first: the code is that of the full row's key.
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      const uint16_t key = Element::bits(x[e]);
      shared_.row[e * 32 + lane_] = key;
      shared_.row[kHeadDim + e * 32 + lane_] = Element::bits(value[e]);
      x[e] = Element::value(key);
    }
    __syncwarp();
    const uint4 piece =
        lane_ * 16 < kRowBytes ? reinterpret_cast<const uint4*>(shared_.row)[lane_] : uint4{};
    if (in_range_) store(piece, x);
  }

  // x: the full row's key.
  __device__ void store(const uint4& piece, const float (&x)[kElements]) const {
    const int64_t position = slot_.num_tokens;
    const HeadCacheView& view = t_.heads[index_];
    const RowFormat format = t_.shape.stored;
    if (resident_ && format == RowFormat::kFull) {
      store_row<kRowBytes>(view.resident + position * kRowBytes, piece, lane_);
    } else {
      if (position < view.sink_tokens) {
        store_row<kRowBytes>(view.sink + position * kRowBytes, piece, lane_);
      }
      if (view.ring_tokens > 0) {
        // In 32 bits: a 64-bit division is a call.
        const int64_t ring_row = static_cast<int32_t>(position) % view.ring_tokens;
        store_row<kRowBytes>(view.ring + ring_row * kRowBytes, piece, lane_);
      }
    }
    const int64_t page_index = position / kPageTokens;
    const auto page_slot = static_cast<int32_t>(position % kPageTokens);
    const int64_t host_index = slot_.pages == nullptr
                                   ? -1
                                   : host_row_index(t_.host.num_pages, kv_heads_, p_.layer,
                                                    slot_.pages[page_index], kv_head_, page_slot);
    if (format != RowFormat::kFull) {
      const StoredPiece stored = compress_piece<Element, kHeadDim / 8>(format, piece);
      const int64_t bytes = stored_row_bytes(t_.shape);
      store_piece<kHeadDim / 8>(resident_ ? view.resident + position * bytes : nullptr, format,
                                stored, lane_);
      store_piece<kHeadDim / 8>(host_index >= 0 ? t_.host_rows + host_index * bytes : nullptr,
                                format, stored, lane_);
    } else if (host_index >= 0) {
      store_row<kRowBytes>(t_.host_rows + host_index * kRowBytes, piece, lane_);
    }

    const bool host_code = host_index >= 0 && t_.host_codes != nullptr;
    if (t_.hashes == nullptr || (!host_code && slot_.code_blocks == nullptr)) return;
    const uint32_t word = encode_warp(
        t_.hashes[static_cast<int64_t>(p_.layer) * kv_heads_ + kv_head_], x, true, lane_);
    const int64_t words = t_.shape.code_bits / 32;
    if (lane_ >= words) return;
    if (host_code) reinterpret_cast<uint32_t*>(t_.host_codes)[host_index * words + lane_] = word;
    if (slot_.code_blocks != nullptr) {
      auto* block = reinterpret_cast<uint32_t*>(slot_.code_blocks[page_index]);
      block[block_code_index(kv_heads_, p_.layer, kv_head_, page_slot) * words + lane_] = word;
    }
  }

  // By then the other warps have the queries ready, for which the label need not wait.
  __device__ void decide() {
    wait_for_predecessor();
    if (!decides_) {
      if (lane_ == 0) t_.decided[index_] = 0;
      return;
    }
    HeadLabel<kElements> label;
    label.load(t_, slot_.rules, index_, context_, lane_);
    sync_group();
    decide_with_true_query(t_, slot_index_, p_.layer, kv_head_, shared_.queries, label, context_);
  }
  // The warps of the queries and the one that decides.
  __device__ void sync_group() const { sync_warps(group_ + 1); }

  const DecodeRows& p_;
  const DecodeTables& t_;
  const BatchSlot& slot_;
  Shared& shared_;
  const int32_t row_, kv_head_, slot_index_, q_heads_, kv_heads_, group_;
  const int lane_;
  const int64_t index_;
  const bool resident_;
  const int64_t context_;  // this step's token included
  bool in_range_, decides_;
};

template <typename Element, int kElements>
__global__ void __launch_bounds__(32 * kMostWarps, 1)
    decode_rows_kernel(const __grid_constant__ DecodeRows params) {
  __shared__ typename HeadStep<Element, kElements>::Shared shared;
  launch_dependents();
  // Slots, rules and addresses do not change within a step: read before the kernel ahead has ended.
  const DecodeTables& t = params.tables;
  const auto block = static_cast<int32_t>(blockIdx.x);
  const int32_t row = block / t.shape.num_kv_heads, kv_head = block % t.shape.num_kv_heads;
  const int32_t slot_index = t.row_slot[row];
  if (slot_index < 0 || t.slots[slot_index].active == 0) {
    wait_for_predecessor();
    return;
  }
  HeadStep<Element, kElements>(params, shared, row, kv_head, slot_index).run();
}

template <int kElements>
__global__ void __launch_bounds__(32 * kWarps, 1)
    predicted_queries_kernel(const __grid_constant__ PredictedQueries p) {
  constexpr int kHeadDim = 32 * kElements;
  launch_dependents();
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int32_t index =
      static_cast<int32_t>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / 32;
  const int32_t row = index / p.shape.num_q_heads, head = index % p.shape.num_q_heads;
  const HeadConstants<kElements> constants(
      p.bias == nullptr ? nullptr : p.bias + static_cast<int64_t>(head) * kHeadDim, p.q_norm, lane);
  wait_for_predecessor();
  if (row >= p.rows) return;
  const int64_t width = static_cast<int64_t>(p.shape.num_q_heads) * kHeadDim;
  float x[kElements], cosine[kElements / 2], sine[kElements / 2];
  load_head(x, Projection{p.parts, p.bias, width, width * p.rows, p.splits}, row, head,
            constants.bias, lane);
  load_strided(cosine, p.cosine + static_cast<int64_t>(row) * (kHeadDim / 2), lane);
  load_strided(sine, p.sine + static_cast<int64_t>(row) * (kHeadDim / 2), lane);
  if (p.q_norm != nullptr) norm_head(x, constants.norm, p.norm_epsilon);
  rotate_head(x, cosine, sine);
  float* out = p.queries + row * width + static_cast<int64_t>(head) * kHeadDim;
#pragma unroll
  for (int e = 0; e < kElements; ++e) out[e * 32 + lane] = x[e];
}

unsigned blocks_for(int64_t warps) { return static_cast<unsigned>((warps + kWarps - 1) / kWarps); }

}  // namespace

void decode_rows(const DecodeRows& params, cudaStream_t stream) {
  const KvShape& shape = params.tables.shape;
  CLO_CHECK(shape.head_dim == 64 || shape.head_dim == 128, shape.head_dim);
  CLO_CHECK(params.rows >= 1 && params.splits >= 1, params.rows, params.splits);
  CLO_CHECK(shape.group_size() <= kMaxGroup, shape.group_size());
  const dim3 grid(static_cast<unsigned>(params.rows * shape.num_kv_heads));
  const dim3 block(static_cast<unsigned>(32 * (shape.group_size() + 2)));
  with_element(shape.type, [&]<typename Element>(Element) {
    launch(shape.head_dim == 64 ? decode_rows_kernel<Element, 2> : decode_rows_kernel<Element, 4>,
           grid, block, 0, stream, params);
  });
}

void predicted_queries(const PredictedQueries& params, cudaStream_t stream) {
  CLO_CHECK(params.shape.head_dim == 64 || params.shape.head_dim == 128, params.shape.head_dim);
  CLO_CHECK(params.rows >= 1 && params.splits >= 1, params.rows, params.splits);
  launch(params.shape.head_dim == 64 ? predicted_queries_kernel<2> : predicted_queries_kernel<4>,
         dim3(blocks_for(int64_t{params.rows} * params.shape.num_q_heads)), dim3(32 * kWarps), 0,
         stream, params);
}

}  // namespace clo::kernels
