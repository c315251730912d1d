#include "base/check.h"
#include "kernels/attend/attend.h"
#include "kernels/attend/entropy.cuh"
#include "kernels/attend/softmax_tiles.cuh"
#include "kernels/launch.cuh"
#include "kernels/refresh/decide.cuh"

namespace clo::kernels {

namespace {

constexpr int kBatch = 16;  // heads whose lists are worked out together
// A head's merge keeps (max, sum) of every part, and its threads' sums, in the tiles' shared
// memory.
constexpr int kMaxGrid = 400;
constexpr int kMaxSlices = 8;  // threads that share the parts of four elements

template <int kWarps>
struct Shared {
  int32_t chunk_first[32 * kWarps + 1];  // first tile of each thread's heads
  // Aligned, so that reading them together reads nothing that another thread writes.
  alignas(16) int32_t warp_tiles[kWarps];
  int32_t found_head, found_first;
  int32_t num_tiles, num_blocks;  // tiles in all, blocks that have some
  int32_t run_first, run_last;    // this block's tiles
  int32_t batch_first[kBatch];    // first tile of each head of the batch
  HeadRows batch[kBatch];
  HeadRows early_head;           // that of the run's first tile, before the kernel ahead has ended
  bool early;                    // its set is there
  bool still_early;              // and has not been chosen again
  float max[kWarps][kMaxGroup];  // of each warp's tiles, then its weight in the part
  float sum[kWarps][kMaxGroup];
  float best[kMaxGroup], total[kMaxGroup];  // of the part, then of the head
  RowCounts rows[kWarps];                   // rows that each warp read
  bool last;
};

template <int kHeadDim, int kWarps, typename Element, RowFormat kStored>
class Block {
 public:
  static constexpr int kThreads = 32 * kWarps;

  __device__ Block(const AttendRows& params, Shared<kWarps>& shared, std::byte* tiles)
      : p_(params),
        t_(params.tables),
        shared_(shared),
        tiles_(tiles),
        thread_(static_cast<int>(threadIdx.x)),
        warp_(static_cast<int>(threadIdx.x) / 32),
        lane_(static_cast<int>(threadIdx.x) % 32),
        group_(params.tables.shape.num_q_heads / params.tables.shape.num_kv_heads) {}

  __device__ void run() {
    // Lengths, rules and addresses do not change between the start of a step and its last kernel,
    // so the deal is worked out while the kernels before this one still run.
    const bool idle_rows = deal();
    int32_t tile = shared_.run_first;
    if (tile >= shared_.run_last) {
      wait_for_predecessor();
      if (idle_rows) clear_idle_rows();
      return;
    }
    FirstTile early;
    while (tile < shared_.run_last) {
      find(tile);
      HeadRows h;
      if (warp_ == 0) h = describe_batch();
      if (tile == shared_.run_first) {
        early = start_early(h);
        wait_for_predecessor();
        if (idle_rows) clear_idle_rows();
      }
      if (warp_ == 0) read_batch(h);
      __syncthreads();
      // Not earlier: the next kernel's blocks must not take the room of a refresh waited for.
      if (tile == shared_.run_first) launch_dependents();
      for (int i = 0; i < kBatch && tile < shared_.run_last; ++i) {
        const int32_t first = shared_.batch_first[i];
        const int32_t end = first + tiles_of(shared_.batch[i].count);
        const int32_t stop = end < shared_.run_last ? end : shared_.run_last;
        if (stop <= tile) continue;  // a row without a sequence
        const bool started = tile == shared_.run_first && shared_.still_early;
        attend_segment(shared_.batch[i], shared_.found_head + i, first, end, tile, stop,
                       started ? early : FirstTile{});
        tile = stop;
      }
    }
  }

 private:
  // Every block works out the tile counts of all heads by itself, a few heads a thread. Whether
  // this thread met a head without tiles: its row serves no sequence.
  __device__ bool deal() {
    int32_t mine = 0;
    bool idle_rows = false;
    for (int32_t head = chunk_begin(thread_); head < chunk_begin(thread_ + 1); ++head) {
      const int32_t tiles = tiles_of(head_rows(t_, p_.layer, head).count);
      mine += tiles;
      idle_rows = idle_rows || tiles == 0;
    }
    int32_t inclusive = mine;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const int32_t before = __shfl_up_sync(kWholeWarp, inclusive, offset);
      if (lane_ >= offset) inclusive += before;
    }
    if (lane_ == 31) shared_.warp_tiles[warp_] = inclusive;
    __syncthreads();
    for (int w = 0; w < warp_; ++w) inclusive += shared_.warp_tiles[w];
    shared_.chunk_first[thread_] = inclusive - mine;
    if (thread_ == kThreads - 1) {
      const auto block = static_cast<int32_t>(blockIdx.x);
      const int32_t blocks = dealing_blocks(inclusive, static_cast<int32_t>(gridDim.x));
      shared_.chunk_first[kThreads] = shared_.num_tiles = inclusive;
      shared_.num_blocks = blocks;
      shared_.run_first = block < blocks ? first_tile(inclusive, block, blocks) : inclusive;
      shared_.run_last = block < blocks ? first_tile(inclusive, block + 1, blocks) : inclusive;
    }
    __syncthreads();
    return idle_rows;
  }
  __device__ void clear_idle_rows() {
    for (int32_t head = chunk_begin(thread_); head < chunk_begin(thread_ + 1); ++head) {
      const bool mine = head % static_cast<int32_t>(gridDim.x) == static_cast<int32_t>(blockIdx.x);
      if (mine && head_rows(t_, p_.layer, head).count == 0) clear_head(head);
    }
  }
  // Heads of a thread: the same number each.
  __device__ int32_t chunk_begin(int thread) const {
    return min(thread * ((num_heads() + kThreads - 1) / kThreads), num_heads());
  }
  // (row, KV head) pairs of the step.
  __device__ int32_t num_heads() const { return p_.rows * t_.shape.num_kv_heads; }

  // found_head, found_first: the head that has `tile`, and its first tile.
  __device__ void find(int32_t tile) {
    if (shared_.chunk_first[thread_] <= tile && tile < shared_.chunk_first[thread_ + 1]) {
      const int32_t end = chunk_begin(thread_ + 1);
      int32_t head = chunk_begin(thread_), first = shared_.chunk_first[thread_];
      for (; head + 1 < end; ++head) {
        const int32_t next = first + tiles_of(head_rows(t_, p_.layer, head).count);
        if (tile < next) break;
        first = next;
      }
      shared_.found_head = head;
      shared_.found_first = first;
    }
    __syncthreads();
  }

  // The list of one of the heads from found_head on, one a lane.
  __device__ HeadRows describe_batch() const {
    const int32_t head = shared_.found_head + lane_;
    if (lane_ >= kBatch || head >= num_heads()) return {};
    return head_rows(t_, p_.layer, head);
  }
  // While the kernels before this one still run: the warps' first tiles of the run's first head, as
  // far as these kernels do not change them. They may choose the head's set anew, which read_batch
  // finds out, and they write the row of the step's own token, the last of the list.
  __device__ FirstTile start_early(const HeadRows& described) {
    if (thread_ == 0) {
      HeadRows h = described;  // of found_head
      shared_.early = h.state == nullptr || load_acquire(pending(h, shared_.found_head)) == 0;
      if (shared_.early && h.state != nullptr) {
        h.num_used = min(__ldcg(&h.state->num_slots_used), h.num_mapped);
      }
      shared_.early_head = h;
      shared_.still_early = true;  // of a head without a set
    }
    __syncthreads();
    const HeadRows& h = shared_.early_head;
    const int32_t tile = shared_.run_first - shared_.found_first + warp_;
    const int32_t last = shared_.run_last - shared_.found_first;
    if (!shared_.early || tile >= last || (tile + 1) * kTileRows >= h.count) return {};
    return start_tile<kHeadDim, kStored>(h, tile, shared_address(warp_acc(warp_)), lane_);
  }
  __device__ const uint32_t* pending(const HeadRows& h, int32_t head) const {
    return t_.pending + table_index(t_, h.slot, p_.layer, head % t_.shape.num_kv_heads);
  }

  // Those of this block's run wait until nothing is pending.
  __device__ void read_batch(HeadRows& h) {
    const int32_t head = shared_.found_head + lane_;
    const int32_t tiles = tiles_of(h.count);
    int32_t inclusive = tiles;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const int32_t before = __shfl_up_sync(kWholeWarp, inclusive, offset);
      if (lane_ >= offset) inclusive += before;
    }
    const int32_t first = shared_.found_first + inclusive - tiles;
    if (h.state != nullptr && first < shared_.run_last) {
      if (lane_ == 0) {
        const int64_t index = table_index(t_, h.slot, p_.layer, head % t_.shape.num_kv_heads);
        const bool changed =
            (__ldcg(t_.decided + index) & kChosenNow) != 0 || load_acquire(t_.pending + index) != 0;
        shared_.still_early = !changed;
      }
      wait_for_refresh(h, head % t_.shape.num_kv_heads, first >= shared_.run_first);
      const int32_t used = __ldcg(&h.state->num_slots_used);
      if (used > h.num_mapped) fail(FaultCode::kSetTooLong);
      h.num_used = min(used, h.num_mapped);
    }
    if (lane_ < kBatch) {
      shared_.batch[lane_] = h;
      shared_.batch_first[lane_] = first;
    }
  }

  // The head's rows, map and counts are the new set's once its flag is down. `counted`: this block
  // has the head's first tile, and it alone counts the wait.
  __device__ void wait_for_refresh(const HeadRows& h, int32_t kv_head, bool counted) {
    const int64_t index = table_index(t_, h.slot, p_.layer, kv_head);
    if (load_acquire(t_.pending + index) == 0) return;
    const unsigned long long start = global_timer_ns();
    (void)wait_until_refreshed(t_, index, FaultCode::kAttentionWait);
    if (counted) atomicAdd(&counters(h.slot).wait_ns, global_timer_ns() - start);
  }

  __device__ void fail(FaultCode code) {
    atomicCAS(&t_.queue->fault, uint32_t{0}, static_cast<uint32_t>(code));
  }
  __device__ DeviceCounters& counters(int32_t slot) {
    return t_.counters[static_cast<int64_t>(slot) * t_.shape.num_layers + p_.layer];
  }
  // Query head 0 of a head's group, as a number over all rows of the step.
  __device__ int64_t first_query(int32_t head) const { return static_cast<int64_t>(head) * group_; }

  // Tiles [begin, stop) of the line, all of `head`, whose tiles are [first, end). `started`: this
  // warp's first.
  __device__ void attend_segment(const HeadRows& h, int32_t head, int32_t first, int32_t end,
                                 int32_t begin, int32_t stop, FirstTile started) {
    RunningSoftmax<kHeadDim> softmax;
    const RowCounts rows = attend_tiles<kHeadDim, Element, kStored>(
        h, queries(head), group_, p_.tables.scale * 1.44269504f, begin - first + warp_,
        stop - first, kWarps, started, shared_address(warp_acc(warp_)), query_memory(), lane_,
        softmax);
    if (lane_ == 0) shared_.rows[warp_] = rows;
    combine_warps(softmax);
    if (thread_ == 0) {
      RowCounts sum;
      for (int w = 0; w < kWarps; ++w) {
        sum.all += shared_.rows[w].all;
        sum.full += shared_.rows[w].full;
      }
      DeviceCounters& c = counters(h.slot);
      atomicAdd(&c.rows_attended, static_cast<unsigned long long>(sum.all));
      if constexpr (kStored != RowFormat::kFull) {
        atomicAdd(&c.full_rows_attended, static_cast<unsigned long long>(sum.full));
      }
    }

    const int32_t first_block = block_of_tile(shared_.num_tiles, first, shared_.num_blocks);
    const int32_t num_parts =
        block_of_tile(shared_.num_tiles, end - 1, shared_.num_blocks) - first_block + 1;
    if (num_parts == 1) {
      finish(h, head, [&](int g, int d) { return combined(g, d); });
    } else {
      write_part(static_cast<int32_t>(blockIdx.x) + head);
      if (arrive_last(head, num_parts)) merge(h, head, first_block + head, num_parts);
    }
    __syncthreads();  // tiles_ and shared_ are free again
  }

  __device__ const float* queries(int32_t head) const {
    return p_.queries + first_query(head) * kHeadDim;
  }

  // The warps' results go to shared memory: acc as [query head][element] where the warp's tiles
  // were, its (max, sum) beside; then each warp's weight in the part.
  __device__ std::byte* query_memory() { return tiles_ + kWarps * TileShape<kHeadDim>::kWarpBytes; }
  static constexpr int kAccStride = kHeadDim + 4;  // columns of a quarter warp fall on other banks
  static_assert(kMaxGroup * kAccStride * 4 <= TileShape<kHeadDim>::kWarpBytes);
  static_assert(kMaxGrid * kMaxGroup * 2 * 4 + kThreads * 16 <=
                kWarps * TileShape<kHeadDim>::kWarpBytes);
  static_assert(kWarps >= kMaxGroup && kWarps <= 32 && (kWarps & (kWarps - 1)) == 0);
  __device__ float* warp_acc(int warp) {
    return reinterpret_cast<float*>(tiles_ + warp * TileShape<kHeadDim>::kWarpBytes);
  }
  __device__ void combine_warps(RunningSoftmax<kHeadDim>& softmax) {
    float* acc = warp_acc(warp_);
    const int column = lane_ % 4 * 2;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      float sum = softmax.sum[c];
#pragma unroll
      for (int offset = 4; offset < 32; offset *= 2) {
        sum += __shfl_xor_sync(kWholeWarp, sum, offset);
      }
      if (lane_ < 4) {
        shared_.max[warp_][column + c] = softmax.max[c];
        shared_.sum[warp_][column + c] = sum;
      }
#pragma unroll
      for (int i = 0; i < TileShape<kHeadDim>::kSteps; ++i) {
        float* at = acc + (column + c) * kAccStride + 16 * i + lane_ / 4;
        at[0] = softmax.acc[i][c];
        at[8] = softmax.acc[i][c + 2];
      }
    }
    __syncthreads();
    // A warp for each query head, a lane for each warp's result.
    if (warp_ < group_) {
      const bool mine = lane_ < kWarps;
      const float max = mine ? shared_.max[lane_][warp_] : -INFINITY;
      float best = max;
#pragma unroll
      for (int offset = kWarps / 2; offset > 0; offset /= 2) {
        best = fmaxf(best, __shfl_xor_sync(kWholeWarp, best, offset));
      }
      const float weight = exp2f(max - (best == -INFINITY ? 0.0f : best));
      // A part without rows weighs nothing, but its NaN must stay: no part is left out.
      float total = mine ? weight * shared_.sum[lane_][warp_] : 0.0f;
#pragma unroll
      for (int offset = kWarps / 2; offset > 0; offset /= 2) {
        total += __shfl_xor_sync(kWholeWarp, total, offset);
      }
      if (mine) shared_.max[lane_][warp_] = weight;
      if (lane_ == 0) {
        shared_.best[warp_] = best;
        shared_.total[warp_] = total;
      }
    }
    __syncthreads();
  }
  // Elements d to d + 3 of query head g of this block's part.
  __device__ float4 combined(int g, int d) {
    float4 sum = {0, 0, 0, 0};
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float weight = shared_.max[w][g];
      const float4 acc = *reinterpret_cast<const float4*>(warp_acc(w) + g * kAccStride + d);
      sum.x += weight * acc.x;
      sum.y += weight * acc.y;
      sum.z += weight * acc.z;
      sum.w += weight * acc.w;
    }
    return sum;
  }

  // A part: acc [group][head_dim], max [group], sum [group].
  __device__ float* part(int32_t index) const {
    return p_.parts + static_cast<int64_t>(index) * group_ * (kHeadDim + 2);
  }
  __device__ void write_part(int32_t index) {
    float* out = part(index);
    for (int i = thread_; i < group_ * kHeadDim / 4; i += kThreads) {
      const float4 v = combined(4 * i / kHeadDim, 4 * i % kHeadDim);
      reinterpret_cast<float2*>(out)[2 * i] = {v.x, v.y};
      reinterpret_cast<float2*>(out)[2 * i + 1] = {v.z, v.w};
    }
    if (thread_ < group_) {
      out[group_ * kHeadDim + thread_] = shared_.best[thread_];
      out[group_ * kHeadDim + group_ + thread_] = shared_.total[thread_];
    }
  }
  // Whether this block's part is the last of the head's to be written; then all can be read.
  __device__ bool arrive_last(int32_t head, int32_t num_parts) {
    __syncthreads();  // the part is written, by all threads
    if (thread_ == 0) {
      __threadfence();
      const uint32_t before = atomicAdd(p_.arrivals + head, 1u);
      __threadfence();
      shared_.last = before + 1 == static_cast<uint32_t>(num_parts);
      if (shared_.last) p_.arrivals[head] = 0;
    }
    __syncthreads();
    return shared_.last;
  }

  // Adds up all parts of a head, in a fixed order: that of their blocks, in as many slices as there
  // are threads for. This is on the way of a step, and a load takes as long as a dozen of them.
  __device__ void merge(const HeadRows& h, int32_t head, int32_t first_part, int32_t num_parts) {
    float* weight = reinterpret_cast<float*>(tiles_);  // [num_parts][group]: maxima, then weights
    float* sum = weight + num_parts * group_;
    auto* partial = reinterpret_cast<float4*>(tiles_ + kMaxGrid * kMaxGroup * 2 * 4);
    const int64_t stride = int64_t{group_} * (kHeadDim + 2);
    const float* parts = part(first_part);
    // Four elements a thread, `slices` threads for the same four.
    const int quads = group_ * kHeadDim / 4;
    const int slices = min(kThreads / quads, kMaxSlices);
    const int quad = thread_ % quads, slice = thread_ / quads;
    const int first = slice * num_parts / slices;
    const int last = slice < slices ? (slice + 1) * num_parts / slices : first;
    // The parts of odd groups are aligned to 8 bytes only.
    constexpr int kLoads = 5;
    float2 low[kLoads], high[kLoads];
    const auto load = [&](int from) {
#pragma unroll
      for (int j = 0; j < kLoads; ++j) {
        if (from + j >= last) continue;
        const auto* at = reinterpret_cast<const float2*>(parts + (from + j) * stride + 4 * quad);
        low[j] = __ldcg(at);
        high[j] = __ldcg(at + 1);
      }
    };
    load(first);  // on their way while the weights are worked out
    for (int i = thread_; i < num_parts * group_; i += kThreads) {
      const float* tail = parts + i / group_ * stride + group_ * kHeadDim + i % group_;
      weight[i] = __ldcg(tail);
      sum[i] = __ldcg(tail + group_);
    }
    __syncthreads();
    if (warp_ < group_) {
      const int g = warp_;
      float best = -INFINITY, total = 0;
      for (int i = lane_; i < num_parts; i += 32) best = fmaxf(best, weight[i * group_ + g]);
#pragma unroll
      for (int offset = 16; offset > 0; offset /= 2) {
        best = fmaxf(best, __shfl_xor_sync(kWholeWarp, best, offset));
      }
      const float base = best == -INFINITY ? 0.0f : best;
      for (int i = lane_; i < num_parts; i += 32) {
        const float w = exp2f(weight[i * group_ + g] - base);
        weight[i * group_ + g] = w;
        total += w * sum[i * group_ + g];
      }
#pragma unroll
      for (int offset = 16; offset > 0; offset /= 2) {
        total += __shfl_xor_sync(kWholeWarp, total, offset);
      }
      if (lane_ == 0) {
        shared_.best[g] = best;
        shared_.total[g] = total;
      }
    }
    __syncthreads();
    float4 value = {0, 0, 0, 0};
    const int g = 4 * quad / kHeadDim;
    for (int from = first; from < last; from += kLoads) {
      if (from > first) load(from);
#pragma unroll
      for (int j = 0; j < kLoads; ++j) {
        if (from + j >= last) continue;
        const float w = weight[(from + j) * group_ + g];
        value.x += w * low[j].x;
        value.y += w * low[j].y;
        value.z += w * high[j].x;
        value.w += w * high[j].y;
      }
    }
    if (slice < slices) partial[thread_] = value;
    __syncthreads();
    finish(h, head, [&](int, int) {
      float4 all = {0, 0, 0, 0};
      for (int i = 0; i < slices; ++i) {
        const float4 of_slice = partial[i * quads + quad];
        all.x += of_slice.x;
        all.y += of_slice.y;
        all.z += of_slice.z;
        all.w += of_slice.w;
      }
      return all;
    });
  }

  // All rows of the head have been read: the result is written, and what is due for the next step
  // is queued. `value(g, d)`: elements d to d + 3 of query head g, those of the calling thread's
  // number, not yet divided by shared_.total.
  template <typename Value>
  __device__ void finish(const HeadRows& h, int32_t head, Value value) {
    const int32_t kv_head = head % t_.shape.num_kv_heads;
    if (warp_ == kWarps - 1 && h.state != nullptr && t_.slots[h.slot].rules.entropy_rise > 0) {
      float entropy = 0;
      if (lane_ < group_) {
        entropy = (log2f(shared_.total[lane_]) - kWeightShift<Element, kStored>)*0.693147181f;
      }
      note_entropy(t_, h.slot, p_.layer, kv_head, h.context, entropy);
    }
    if (thread_ == kThreads - 1) {
      atomicAdd(&counters(h.slot).rows_in_context, static_cast<unsigned long long>(h.context));
      // A head whose mass is sampled keeps its set until that has been done.
      if (p_.log_sum_exp == nullptr || !looks_at_mass(t_, h.slot, p_.layer, kv_head, h.context)) {
        push_due_job(t_, h.slot, p_.layer, kv_head, h.context);
      }
    }
    static_assert(kMaxGroup * kHeadDim / 4 <= kThreads);
    if (thread_ < group_ * kHeadDim / 4) {
      auto* out = static_cast<uint2*>(p_.out) + first_query(head) * (kHeadDim / 4);
      const int g = 4 * thread_ / kHeadDim;
      const float4 v = value(g, 4 * thread_ % kHeadDim);
      const float scale = __fdividef(1.0f, shared_.total[g]);
      out[thread_] =
          uint2{Element::pack(v.x * scale, v.y * scale), Element::pack(v.z * scale, v.w * scale)};
    }
    if (p_.log_sum_exp != nullptr && thread_ < group_) {
      p_.log_sum_exp[first_query(head) + thread_] =
          (shared_.best[thread_] + log2f(shared_.total[thread_]) -
           kWeightShift<Element, kStored>)*0.693147181f;
    }
  }

  // A row without a sequence: zeros, and a sum over nothing.
  __device__ void clear_head(int32_t head) {
    auto* out = static_cast<uint4*>(p_.out) + first_query(head) * (kHeadDim / 8);
    for (int i = 0; i < group_ * kHeadDim / 8; ++i) out[i] = uint4{0, 0, 0, 0};
    if (p_.log_sum_exp == nullptr) return;
    for (int g = 0; g < group_; ++g) p_.log_sum_exp[first_query(head) + g] = -INFINITY;
  }

  const AttendRows& p_;
  const DecodeTables& t_;
  Shared<kWarps>& shared_;
  std::byte* tiles_;
  const int thread_, warp_, lane_;
  const int group_;
};

template <int kHeadDim, int kWarps, typename Element, RowFormat kStored>
// Registers: a block and a refresh block (256 threads of 64) share a multiprocessor.
__global__ void __maxnreg__(96) attend_kernel(const __grid_constant__ AttendRows params) {
  extern __shared__ __align__(16) std::byte tiles[];
  __shared__ Shared<kWarps> shared;
  Block<kHeadDim, kWarps, Element, kStored>(params, shared, tiles).run();
}

template <int kHeadDim, int kWarps, typename Element, RowFormat kStored>
void launch_attend(const AttendRows& params, cudaStream_t stream) {
  constexpr int kBytes =
      kWarps * TileShape<kHeadDim>::kWarpBytes + SplitQueries<kHeadDim, Element>::kBytes;
  static const bool prepared = [] {
    CLO_CUDA(cudaFuncSetAttribute(attend_kernel<kHeadDim, kWarps, Element, kStored>,
                                  cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
    return true;
  }();
  (void)prepared;
  launch(attend_kernel<kHeadDim, kWarps, Element, kStored>,
         dim3(static_cast<unsigned>(params.grid)), dim3(32 * kWarps), kBytes, stream, params);
}

// Sixteen warps keep 128 KB of rows on the way, which the largest multiprocessors have beside a
// refresh block; eight fit everywhere.
bool has_room_for_sixteen_warps() {
  static const bool room = [] {
    int device = 0, bytes = 0;
    CLO_CUDA(cudaGetDevice(&device));
    CLO_CUDA(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device));
    return bytes >= 200 * 1024;
  }();
  return room;
}

template <int kHeadDim, typename Element, RowFormat kStored>
void launch_for_device(const AttendRows& params, cudaStream_t stream) {
  if (has_room_for_sixteen_warps()) {
    launch_attend<kHeadDim, 16, Element, kStored>(params, stream);
  } else {
    launch_attend<kHeadDim, 8, Element, kStored>(params, stream);
  }
}

template <typename Function>
void with_format(RowFormat format, Function function) {
  switch (format) {
    case RowFormat::kFull:
      return function.template operator()<RowFormat::kFull>();
    case RowFormat::kInt8:
      return function.template operator()<RowFormat::kInt8>();
    case RowFormat::kFp8:
      return function.template operator()<RowFormat::kFp8>();
  }
}

}  // namespace

void attend(const AttendRows& params, cudaStream_t stream) {
  const KvShape& shape = params.tables.shape;
  CLO_CHECK(shape.head_dim == 64 || shape.head_dim == 128, shape.head_dim);
  CLO_CHECK(shape.group_size() >= 1 && shape.group_size() <= kMaxGroup, shape.group_size());
  CLO_CHECK(params.grid >= 1 && params.grid <= kMaxGrid, params.grid);
  CLO_CHECK(params.rows >= 1, params.rows);
  with_element(shape.type, [&]<typename Element>(Element) {
    with_format(shape.stored, [&]<RowFormat kStored>() {
      if (shape.head_dim == 64) {
        launch_for_device<64, Element, kStored>(params, stream);
      } else {
        launch_for_device<128, Element, kStored>(params, stream);
      }
    });
  });
}

}  // namespace clo::kernels
