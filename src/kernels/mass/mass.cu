// A block for each head looked at. Rows drawn lie anywhere, most of them in host memory: what the
// block needs is many reads under way at once, and it computes next to nothing.
#include "base/check.h"
#include "kernels/key_scores.cuh"
#include "kernels/launch.cuh"
#include "kernels/mass/mass.h"
#include "kernels/refresh/decide.cuh"
#include "kernels/rules.cuh"
#include "kernels/sample/sample.h"
#include "ops/mass_draw.h"

namespace clo::kernels {

namespace {

constexpr int kMassThreads = 512, kMassWarps = kMassThreads / 32;
constexpr int kRowsAtOnce = 8;  // of a warp

// Where a head's rows lie, by token.
struct RowSource {
  const DecodeTables* tables;
  const std::byte* full_rows;  // the layer buffer's rows of this head; null: not there
  const std::byte* resident;   // null: in the host store
  int32_t slot, layer, kv_head;

  __device__ const std::byte* row(int64_t token) const {
    const DecodeTables& t = *tables;
    if (full_rows != nullptr) return full_rows + token * row_bytes(t.shape);
    if (resident != nullptr) return resident + token * stored_row_bytes(t.shape);
    return host_row(t, t.slots[slot], layer, kv_head, token);
  }
};

static_assert((kMassRows & (kMassRows - 1)) == 0 && (kFirstMassRows & (kFirstMassRows - 1)) == 0);

struct MassShared {
  float query[kMaxGroup * 128];
  int32_t tokens[kMassRows];
  SoftmaxSum sums[kMassWarps][kMaxGroup];
  int32_t warp_counts[kMassWarps + 1];
  float kept[kMaxGroup];
};

// One head with a set, at one context.
template <int kElements>
class HeadLook {
 public:
  __device__ HeadLook(const RowSource& source, const HeadCacheView& head, int64_t context_tokens,
                      MassShared& shared)
      : shape_(source.tables->shape),
        source_(source),
        head_(head),
        shared_(shared),
        context_(static_cast<int32_t>(context_tokens)),
        num_sinks_(min(head.sink_tokens, context_)),
        ring_begin_(max(num_sinks_, context_ - head.ring_tokens)),
        num_used_(__ldcg(&head.state->num_slots_used)),
        thread_(static_cast<int>(threadIdx.x)),
        warp_(static_cast<int>(threadIdx.x) / 32),
        lane_(static_cast<int>(threadIdx.x) % 32) {}

  // Adds watched tokens in context and those attended to the counters. `watched`: bits.
  __device__ void count_watched(const uint32_t* watched, DeviceCounters& counters) const {
    const auto bits_from = [](int32_t first,
                              int32_t token) {  // of tokens >= first, in token's word
      const int32_t skip = first - token;
      return skip <= 0 ? 0xFFFFFFFFu : skip >= 32 ? 0u : 0xFFFFFFFFu << skip;
    };
    uint32_t rows = 0, attended = 0;
    for (int32_t token = 32 * thread_; token < context_; token += 32 * kMassThreads) {
      const uint32_t bits = __ldg(watched + token / 32) & ~bits_from(context_, token);
      if (bits == 0) continue;
      uint32_t read = ~bits_from(num_sinks_, token) | bits_from(ring_begin_, token);
      if (head_.resident == nullptr) {
        read |= __ldcg(reinterpret_cast<const uint32_t*>(head_.held) + token / 32);
      }
      rows += __popc(bits);
      attended += __popc(bits & read);
    }
    if (head_.resident != nullptr) {
      for (int32_t i = thread_; i < num_used_; i += kMassThreads) {
        const int32_t token = __ldcg(head_.slot_token + i);
        if (token >= ring_begin_ || token < 0) continue;
        attended += __ldg(watched + token / 32) >> (token % 32) & 1u;
      }
    }
    rows = __reduce_add_sync(0xFFFFFFFFu, rows);
    attended = __reduce_add_sync(0xFFFFFFFFu, attended);
    if (lane_ != 0) return;
    atomicAdd(&counters.watched_rows, static_cast<unsigned long long>(rows));
    atomicAdd(&counters.watched_rows_attended, static_cast<unsigned long long>(attended));
  }

  // Mean share of the mass kept; every thread gets it. query [group_size][head_dim], attended
  // [group_size] log-sum-exp of the rows attended, or null: it is worked out here.
  __device__ float kept(const float* query, const float* attended, int32_t num_rows) {
    const int group = group_size(shape_);
    for (int i = thread_; i < group * shape_.head_dim; i += kMassThreads) {
      shared_.query[i] = __ldcg(query + i) * source_.tables->scale;
    }
    const int32_t outside = ring_begin_ - num_sinks_ - count_set();
    if (outside <= 0) return 1;
    SoftmaxSum own = {-INFINITY, 0};  // thread g: of query head g
    if (attended == nullptr) {
      const int32_t entries = num_sinks_ + num_used_ + (context_ - ring_begin_);
      own = sum_scores(entries, [&](int32_t at) { return attended_token(at); });
    }
    const int32_t count = outside <= num_rows ? list_left_out() : draw(num_rows);
    if (outside > num_rows) sort_tokens(count);
    const SoftmaxSum drawn = sum_scores(count, [&](int32_t at) { return shared_.tokens[at]; });
    if (thread_ < group) {
      const float lse = attended != nullptr ? __ldcg(attended + thread_) : own.best + logf(own.sum);
      const float weight = static_cast<float>(outside) / static_cast<float>(count);
      const float over = expf(drawn.best + logf(drawn.sum) - lse);
      shared_.kept[thread_] = 1 / (1 + weight * over);
    }
    __syncthreads();
    float sum = 0;
    for (int g = 0; g < group; ++g) sum += shared_.kept[g];
    return sum / static_cast<float>(group);
  }

 private:
  // Set tokens that attention read: not holes, not those still in the ring.
  __device__ int32_t count_set() {
    int32_t mine = 0;
#pragma unroll 8
    for (int32_t i = thread_; i < num_used_; i += kMassThreads) {
      const int32_t token = __ldcg(head_.slot_token + i);
      mine += token >= 0 && token < ring_begin_ ? 1 : 0;
    }
    mine = static_cast<int32_t>(__reduce_add_sync(0xFFFFFFFFu, mine));
    __syncthreads();
    if (lane_ == 0) shared_.warp_counts[warp_] = mine;
    __syncthreads();
    int32_t total = 0;
    for (int w = 0; w < kMassWarps; ++w) total += shared_.warp_counts[w];
    return total;
  }
  // A resident head's set is a sorted list.
  __device__ bool in_set(int32_t token) const {
    if (head_.resident == nullptr) {
      const uint32_t word = __ldcg(reinterpret_cast<const uint32_t*>(head_.held) + token / 32);
      return (word >> (token % 32) & 1u) != 0;
    }
    int32_t low = 0, high = num_used_;
    while (low < high) {
      const int32_t middle = (low + high) / 2;
      const int32_t there = __ldcg(head_.slot_token + middle);
      if (there == token) return true;
      if (there < token) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return false;
  }
  // Entry of [sinks | set | ring]; -1: a hole, or one that is in the ring.
  __device__ int32_t attended_token(int32_t at) const {
    if (at < num_sinks_) return at;
    const int32_t entry = at - num_sinks_;
    if (entry >= num_used_) return ring_begin_ + (entry - num_used_);
    const int32_t token = __ldcg(head_.slot_token + entry);
    return token < ring_begin_ ? token : -1;
  }

  // Both leave the tokens in shared memory and return how many; the caller synchronises.
  __device__ int32_t draw(int32_t num_rows) {
    const int32_t index = source_.layer * shape_.num_kv_heads + source_.kv_head;
    for (int32_t number = thread_; number < num_rows; number += kMassThreads) {
      for (uint32_t attempt = 0;; ++attempt) {
        const auto token = static_cast<int32_t>(drawn_token(
            context_, index, number, attempt, num_sinks_, int64_t{ring_begin_} - num_sinks_));
        if (in_set(token)) continue;
        shared_.tokens[number] = token;
        break;
      }
    }
    return num_rows;
  }
  // In token order: rows drawn lie all over the store, and neighbours share address translations.
  // Bitonic. Requires: a power of two.
  __device__ void sort_tokens(int32_t count) {
    for (int32_t size = 2; size <= count; size *= 2) {
      for (int32_t step = size / 2; step > 0; step /= 2) {
        __syncthreads();
        for (int32_t i = thread_; i < count / 2; i += kMassThreads) {
          const int32_t low = 2 * step * (i / step) + i % step, high = low + step;
          const int32_t a = shared_.tokens[low], b = shared_.tokens[high];
          if ((a > b) != ((low & size) != 0)) {
            shared_.tokens[low] = b;
            shared_.tokens[high] = a;
          }
        }
      }
    }
  }
  // All of them, in token order: each warp a run of tokens, counted and then written.
  __device__ int32_t list_left_out() {
    const int32_t length = ring_begin_ - num_sinks_;
    const int32_t run = (length + kMassThreads - 1) / kMassThreads * 32;
    const int32_t begin = num_sinks_ + warp_ * run, end = min(begin + run, ring_begin_);
    const auto left_out = [&](int32_t token) {
      return __ballot_sync(0xFFFFFFFFu, token < end && !in_set(token));
    };
    int32_t mine = 0;
    for (int32_t token = begin; token < end; token += 32) mine += __popc(left_out(token + lane_));
    __syncthreads();
    if (lane_ == 0) shared_.warp_counts[warp_] = mine;
    __syncthreads();
    int32_t at = 0, total = 0;
    for (int w = 0; w < kMassWarps; ++w) {
      if (w < warp_) at += shared_.warp_counts[w];
      total += shared_.warp_counts[w];
    }
    for (int32_t token = begin; token < end; token += 32) {
      const uint32_t found = left_out(token + lane_);
      if ((found >> lane_ & 1u) != 0) {
        shared_.tokens[at + __popc(found & ((1u << lane_) - 1))] = token + lane_;
      }
      at += __popc(found);
    }
    return total;
  }

  // Thread g: the softmax sum of query head g over the listed tokens, added up in a fixed order.
  // token_of(i): -1: none.
  template <typename TokenOf>
  __device__ SoftmaxSum sum_scores(int32_t count, const TokenOf& token_of) {
    SoftmaxSum mine_of_head = {-INFINITY, 0};  // lane g: of query head g
    __syncthreads();                           // the tokens are listed
    for (int32_t first = warp_ * kRowsAtOnce; first < count; first += kMassWarps * kRowsAtOnce) {
      const int32_t mine = first + lane_;
      const int32_t token = lane_ < kRowsAtOnce && mine < count ? token_of(mine) : -1;
      const uint32_t there = __ballot_sync(0xFFFFFFFFu, token >= 0);
      score_rows<kElements, kRowsAtOnce>(
          shape_, source_.full_rows != nullptr, shared_.query, count - first,
          [&](int r) { return source_.row(max(__shfl_sync(0xFFFFFFFFu, token, r), 0)); },
          [&](int r, int g, float score) {
            if (lane_ == g && (there >> r & 1u) != 0) add_score(mine_of_head, score, 1);
          });
    }
    if (lane_ < kMaxGroup) shared_.sums[warp_][lane_] = mine_of_head;
    __syncthreads();
    SoftmaxSum total = {-INFINITY, 0};
    if (thread_ < group_size(shape_)) {
      for (int w = 0; w < kMassWarps; ++w) {
        add_score(total, shared_.sums[w][thread_].best, shared_.sums[w][thread_].sum);
      }
    }
    __syncthreads();  // the sums are free again
    return total;
  }

  const KvShape& shape_;
  const RowSource& source_;
  const HeadCacheView& head_;
  MassShared& shared_;
  const int32_t context_, num_sinks_, ring_begin_, num_used_;
  const int thread_, warp_, lane_;
};

template <int kElements>
__device__ void look(const StepMass& p, MassShared& shared, int32_t row, int32_t slot_index,
                     int32_t index, MassSample& sample) {
  const DecodeTables& t = p.tables;
  const BatchSlot& slot = t.slots[slot_index];
  const int32_t layer = index / t.shape.num_kv_heads, kv_head = index % t.shape.num_kv_heads;
  const int64_t cell = table_index(t, slot_index, layer, kv_head);
  const HeadCacheView& head = t.heads[cell];
  const int64_t context = slot.num_tokens + 1;
  if (!attends_all(slot.rules, head.resident != nullptr, layer, context)) {
    const RowSource source = {&t, nullptr, head.resident, slot_index, layer, kv_head};
    const int group = group_size(t.shape);
    const float* attended = p.log_sum_exp +
                            (static_cast<int64_t>(layer) * p.rows + row) * t.shape.num_q_heads +
                            kv_head * group;
    HeadLook<kElements> of_head(source, head, context, shared);
    const float kept = of_head.kept(kept_query(t, cell, query_turn(context)), attended, kMassRows);
    const int64_t length = __ldcg(reinterpret_cast<const long long*>(&head.state->label_length));
    sample = {index, length == context ? 1 : 0, kept, 0};
    DeviceCounters& counters =
        t.counters[static_cast<int64_t>(slot_index) * t.shape.num_layers + layer];
    if (slot.watched != nullptr) of_head.count_watched(slot.watched, counters);
    if (threadIdx.x == 0 && slot.rules.looks == MassLooks::kAll && isfinite(kept)) {
      atomicAdd(&counters.mass_samples, static_cast<unsigned long long>(group));
      atomicAdd(&counters.mass_kept, static_cast<double>(kept) * group);
    }
  }
  __syncthreads();  // the set has been read, by all threads
  if (threadIdx.x == 0) push_due_job(t, slot_index, layer, kv_head, context);
}

// A block for each look, or for each head.
__host__ __device__ __forceinline__ int32_t blocks_of_row(bool every_head, int32_t num_heads) {
  return every_head && num_heads > kMassLooks ? num_heads : kMassLooks;
}

template <int kElements>
__global__ void __launch_bounds__(kMassThreads, 2)
    step_mass_kernel(const __grid_constant__ StepMass p) {
  __shared__ MassShared shared;
  launch_dependents();
  wait_for_predecessor();
  const DecodeTables& t = p.tables;
  const int32_t num_heads = t.shape.num_layers * t.shape.num_kv_heads;
  const int32_t each = blocks_of_row(p.every_head, num_heads);
  const int32_t row = static_cast<int32_t>(blockIdx.x) / each;
  const int32_t at = static_cast<int32_t>(blockIdx.x) % each;
  MassSample* const samples =
      p.samples + (int64_t{t.queue->step % kResultRing} * t.max_batch + row) * kMassLooks;
  const int32_t slot_index = t.row_slot[row];
  // A step launched ahead may run past a sequence's end; nothing of it may be kept.
  const bool served = slot_index >= 0 && t.slots[slot_index].active != 0 &&
                      t.slots[slot_index].rules.looks != MassLooks::kNone &&
                      t.slots[slot_index].num_tokens < t.slots[slot_index].capacity_tokens;
  MassSample sample;
  if (!served) {
    if (at < kMassLooks && threadIdx.x == 0) samples[at] = sample;
    return;
  }
  const int64_t context = t.slots[slot_index].num_tokens + 1;
  const bool some = looks_at_some(context);
  const bool all = t.slots[slot_index].rules.looks == MassLooks::kAll;
  if (!some && at < kMassLooks && threadIdx.x == 0) samples[at] = sample;
  if (at >= (all ? num_heads : some ? kMassLooks : 0)) return;
  const int32_t head = all ? at : head_looked_at(context, at, num_heads);
  // The first of the looks at this head; further ones see nothing.
  int32_t first = at;
  for (int32_t j = kMassLooks - 1; some && j >= 0; --j) {
    if (head_looked_at(context, j, num_heads) == head) first = j;
  }
  if (all || first == at) look<kElements>(p, shared, row, slot_index, head, sample);
  if (threadIdx.x != 0 || !some) return;
  if (!all) {
    samples[at] = sample;
    return;
  }
  for (int32_t j = 0; j < kMassLooks; ++j) {
    if (head_looked_at(context, j, num_heads) != head) continue;
    samples[j] = j == first ? sample : MassSample{};
  }
}

template <int kElements>
__global__ void __launch_bounds__(kMassThreads, 2)
    first_mass_kernel(const __grid_constant__ FirstMass p) {
  __shared__ MassShared shared;
  launch_dependents();
  wait_for_predecessor();
  const DecodeTables& t = p.tables;
  const auto kv_head = static_cast<int32_t>(blockIdx.x);
  const HeadCacheView& head = t.heads[table_index(t, p.slot, p.layer, kv_head)];
  MassSample sample;
  if (!attends_all(t.slots[p.slot].rules, head.resident != nullptr, p.layer, p.context_tokens)) {
    const RowSource source = {
        &t,      p.layer_rows + kv_head * p.layer_capacity * row_bytes(t.shape),
        nullptr, p.slot,
        p.layer, kv_head};
    const float* query = p.queries + kv_head * group_size(t.shape) * t.shape.head_dim;
    const float kept = HeadLook<kElements>(source, head, p.context_tokens, shared)
                           .kept(query, nullptr, kFirstMassRows);
    sample = {p.layer * t.shape.num_kv_heads + kv_head, 1, kept, 0};
  }
  if (threadIdx.x == 0) p.samples[kv_head] = sample;
}

void check_shape(const KvShape& shape) {
  CLO_CHECK(shape.head_dim == 64 || shape.head_dim == 128, shape.head_dim);
  CLO_CHECK(shape.group_size() >= 1 && shape.group_size() <= kMaxGroup, shape.group_size());
  CLO_CHECK(shape.num_layers * shape.num_kv_heads <= 1 << 16, shape.num_layers);
}

}  // namespace

void step_mass(const StepMass& params, cudaStream_t stream) {
  const KvShape& shape = params.tables.shape;
  check_shape(shape);
  CLO_CHECK(params.rows >= 1, params.rows);
  const int32_t num_heads = shape.num_layers * shape.num_kv_heads;
  const int32_t each = blocks_of_row(params.every_head, num_heads);
  launch(shape.head_dim == 64 ? step_mass_kernel<2> : step_mass_kernel<4>,
         dim3(static_cast<unsigned>(params.rows * each)), dim3(kMassThreads), 0, stream, params);
}

void first_mass(const FirstMass& params, cudaStream_t stream) {
  check_shape(params.tables.shape);
  CLO_CHECK(params.context_tokens >= 1, params.context_tokens);
  launch(params.tables.shape.head_dim == 64 ? first_mass_kernel<2> : first_mass_kernel<4>,
         dim3(static_cast<unsigned>(params.tables.shape.num_kv_heads)), dim3(kMassThreads), 0,
         stream, params);
}

}  // namespace clo::kernels
