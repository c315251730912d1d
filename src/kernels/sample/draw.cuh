#pragma once
// Drawing a token as the CPU sampler does (engine/sampler.cpp), without sorting the vocabulary. The
// sampler's filters all keep a prefix of the candidates in order (score down, id up), and the draw
// finds where a running sum passes a target; so everything is one question, asked up to three
// times: which candidate, in order, takes the running count or weight past a target?
//
// It is answered by a histogram of counts and weights over bins of the score, made once, and by
// sorting the one bin where the target lies. A bin too full to sort (ties, outliers) is divided
// again, by the candidates' integer order, until it fits.
//
// Weights are exp((score - best) / temperature) in f64, kept as integers with 44 bits after the
// point: sums are exact, so neither the order of atomics nor the cut into bins can change a draw.
#include "kernels/sample/step_end.cuh"

namespace clo::kernels {

inline constexpr int kDrawThreads = 1024;
inline constexpr int kBinBits = 10;
inline constexpr int kBins = 1 << kBinBits;
static_assert(kBins == kDrawThreads);  // a thread owns a bin
inline constexpr int kSortable = 2 * kDrawThreads;

using Weight = unsigned long long;

struct Histogram {
  Weight weight[kBins];
  uint32_t count[kBins];
};

struct DrawShared {
  Histogram coarse;  // running sums, of all candidates by score
  union {
    Histogram fine;
    Order sorted[kSortable];
  };
  unsigned long long warps[kDrawThreads / 32];
  // Where the target lies in a histogram: written by one thread.
  unsigned long long before;  // running sum up to the bin, of what is searched for
  Weight weight_before;
  uint32_t bin, count;
  uint32_t gathered;
  Order found;
  Weight weight_through;
  Weight likely;  // of candidates that pass min-p
};

// A row's scores: logits under the repetition penalty.
struct Scores {
  const float* logits;
  int32_t vocab_size;
  const uint32_t* seen;  // bits of ids in the answer, or null: no penalty
  float penalty;

  // f(score, id) for each; eight loads in flight.
  template <typename F>
  __device__ __forceinline__ void for_each(F f) const {
    constexpr int kLoads = 8;
    for (int32_t first = threadIdx.x; first < vocab_size; first += kLoads * kDrawThreads) {
      float score[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int32_t id = first + i * kDrawThreads;
        score[i] = id < vocab_size ? logits[id] : 0;
      }
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int32_t id = first + i * kDrawThreads;
        if (id < vocab_size) f(penalised(score[i], id), id);
      }
    }
  }

 private:
  __device__ float penalised(float score, int32_t id) const {
    if (seen == nullptr || (seen[id / 32] >> (id % 32) & 1) == 0) return score;
    return score > 0 ? score / penalty : score * penalty;
  }
};

// Sum over the threads up to and with this one.
__device__ inline unsigned long long running_sum(unsigned long long value, DrawShared& s) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const unsigned long long before = __shfl_up_sync(0xFFFFFFFFu, value, offset);
    if (lane >= offset) value += before;
  }
  if (lane == 31) s.warps[warp] = value;
  __syncthreads();
  for (int w = 0; w < warp; ++w) value += s.warps[w];
  __syncthreads();
  return value;
}
__device__ inline unsigned long long block_sum(unsigned long long value, DrawShared& s) {
  (void)running_sum(value, s);
  unsigned long long sum = 0;
  for (const unsigned long long part : s.warps) sum += part;
  __syncthreads();
  return sum;
}
__device__ inline Order block_min(Order value, DrawShared& s) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    value = min(value, __shfl_xor_sync(0xFFFFFFFFu, value, offset));
  }
  if (threadIdx.x % 32 == 0) s.warps[threadIdx.x / 32] = value;
  __syncthreads();
  for (const Order part : s.warps) value = min(value, part);
  __syncthreads();
  return value;
}
__device__ inline Order block_max(Order value, DrawShared& s) { return ~block_min(~value, s); }

// Each thread owns one bin.
__device__ inline void clear(Histogram& h) {
  h.weight[threadIdx.x] = 0;
  h.count[threadIdx.x] = 0;
  __syncthreads();
}
__device__ inline void make_running(Histogram& h, DrawShared& s) {
  __syncthreads();
  const Weight weight = running_sum(h.weight[threadIdx.x], s);
  const auto count = static_cast<uint32_t>(running_sum(h.count[threadIdx.x], s));
  h.weight[threadIdx.x] = weight;
  h.count[threadIdx.x] = count;
  __syncthreads();
}

enum class By { kCount, kWeight };

// Finds the bin that takes the running sum past `target`, which is less than the whole.
__device__ inline void find_bin(const Histogram& h, By by, unsigned long long target,
                                DrawShared& s) {
  const uint32_t bin = threadIdx.x;
  const uint32_t count_before = bin == 0 ? 0 : h.count[bin - 1];
  const Weight weight_before = bin == 0 ? 0 : h.weight[bin - 1];
  const unsigned long long before = by == By::kCount ? count_before : weight_before;
  const unsigned long long through = by == By::kCount ? h.count[bin] : h.weight[bin];
  if (before <= target && target < through) {
    s.before = before;
    s.weight_before = weight_before;
    s.bin = bin;
    s.count = h.count[bin] - count_before;
  }
  __syncthreads();
}

// In place, ascending; size a power of two up to kSortable. Bitonic: one pair a thread and step.
__device__ inline void sort(Order* values, uint32_t size) {
  for (uint32_t run = 2; run <= size; run *= 2) {
    for (uint32_t gap = run / 2; gap > 0; gap /= 2) {
      if (threadIdx.x < size / 2) {
        const uint32_t i = 2 * threadIdx.x - (threadIdx.x & (gap - 1));
        const Order a = values[i], b = values[i + gap];
        if ((a > b) == ((i & run) == 0)) {
          values[i] = b;
          values[i + gap] = a;
        }
      }
      __syncthreads();
    }
  }
}

// As clo::philox_uniform: Philox 4x32-10 on key `seed`, counter `position`.
__device__ inline double philox_uniform(uint64_t seed, uint64_t position) {
  uint32_t c[4] = {static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32), 0, 0};
  uint32_t key[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53u} * c[0];
    const uint64_t b = uint64_t{0xCD9E8D57u} * c[2];
    c[0] = static_cast<uint32_t>(b >> 32) ^ c[1] ^ key[0];
    c[2] = static_cast<uint32_t>(a >> 32) ^ c[3] ^ key[1];
    c[1] = static_cast<uint32_t>(b);
    c[3] = static_cast<uint32_t>(a);
    key[0] += 0x9E3779B9u;
    key[1] += 0xBB67AE85u;
  }
  const uint64_t bits = (uint64_t{c[0]} << 21) ^ (uint64_t{c[1]} >> 11);
  return static_cast<double>(bits & ((uint64_t{1} << 53) - 1)) * 0x1p-53;
}

class Draw {
 public:
  __device__ Draw(const Scores& scores, const SamplingRules& rules, DrawShared& shared)
      : scores_(scores), s_(shared), temperature_(static_cast<double>(rules.temperature)) {}

  // `position`: the sampling counter.
  __device__ int32_t run(const SamplingRules& rules, int64_t position) {
    Order first = ~Order{0}, last = 0;
    scores_.for_each([&](float score, int32_t id) {
      first = min(first, order_of(score, id));
      last = max(last, order_of(score, id));
    });
    first = block_min(first, s_);
    if (rules.temperature == 0) return id_of(first);
    last = block_max(last, s_);
    best_ = score_of(first);
    // Beyond 32 units of the exponent a weight is zero in fixed point.
    const float range = best_ - score_of(last), negligible = 32 * rules.temperature;
    zero_tail_ = range >= negligible;
    bins_per_score_ = range > 0 ? (kBins - 1) / fminf(range, negligible) : 0;

    fill_coarse(static_cast<double>(rules.min_p));
    Weight kept = s_.coarse.weight[kBins - 1];
    // One place that locates, for the sake of code size and registers: top-k, top-p, the draw.
#pragma unroll 1
    for (int filter = 0; filter < 3; ++filter) {
      unsigned long long target = 0;
      if (filter == 0) {
        if (rules.top_k <= 0 || rules.top_k >= scores_.vocab_size) continue;
        target = static_cast<unsigned long long>(rules.top_k - 1);
      } else if (filter == 1) {
        if (!(rules.top_p < 1)) continue;
        const double mass = ceil(static_cast<double>(rules.top_p) * static_cast<double>(kept));
        target = mass >= 1 ? static_cast<Weight>(mass) - 1 : 0;
      } else {
        if (rules.min_p > 0) kept = min(kept, s_.likely);  // both are prefixes
        const double u = philox_uniform(rules.seed, static_cast<uint64_t>(position));
        target = min(static_cast<Weight>(u * static_cast<double>(kept)), kept - 1);
      }
      kept = locate(filter == 0 ? By::kCount : By::kWeight, target);
    }
    return id_of(s_.found);
  }

 private:
  __device__ double likelihood(float score) const {
    return exp((static_cast<double>(score) - static_cast<double>(best_)) / temperature_);
  }
  __device__ static Weight fixed_point(double likelihood) {
    return __double2ull_rn(likelihood * 0x1p44);
  }
  // Never falls along the order: every step rounds monotonically.
  __device__ uint32_t coarse_bin(float score) const {
    if (bins_per_score_ == 0) return kBins - 1;
    return static_cast<uint32_t>(min(__float2int_rz((best_ - score) * bins_per_score_), kBins - 1));
  }

  // The coarse histogram, and the weight of candidates that pass min-p.
  __device__ void fill_coarse(double min_p) {
    clear(s_.coarse);
    Weight likely = 0, tail_weight = 0;
    uint32_t tail_count = 0;  // most candidates may be in the last bin: not with atomics
    scores_.for_each([&](float score, int32_t) {
      const uint32_t bin = coarse_bin(score);
      Weight weight = 0;
      if (!(zero_tail_ && bin == kBins - 1)) {
        const double l = likelihood(score);
        weight = fixed_point(l);
        if (l >= min_p) likely += weight;
      }
      if (bin == kBins - 1) {
        tail_weight += weight;
        ++tail_count;
      } else {
        atomicAdd(&s_.coarse.weight[bin], weight);
        atomicAdd(&s_.coarse.count[bin], 1);
      }
    });
    tail_weight = block_sum(tail_weight, s_);
    tail_count = static_cast<uint32_t>(block_sum(tail_count, s_));
    if (threadIdx.x == 0) {
      s_.coarse.weight[kBins - 1] = tail_weight;
      s_.coarse.count[kBins - 1] = tail_count;
    }
    likely = block_sum(likely, s_);
    if (threadIdx.x == 0) s_.likely = likely;
    make_running(s_.coarse, s_);
  }

  // The first candidate in order that takes the running count or weight past `target`: left in
  // s_.found; returns the weight up to and with it.
  __device__ Weight locate(By by, unsigned long long target) {
    find_bin(s_.coarse, by, target, s_);
    const uint32_t coarse = s_.bin;
    uint32_t count = s_.count;
    Weight weight_before = s_.weight_before;
    target -= s_.before;
    bool by_bin = true;  // what is left: a coarse bin, or candidates from lo to hi
    Order lo = ~Order{0}, hi = 0;
    if (count > kSortable) {
      by_bin = false;
      scores_.for_each([&](float score, int32_t id) {
        if (coarse_bin(score) != coarse) return;
        lo = min(lo, order_of(score, id));
        hi = max(hi, order_of(score, id));
      });
      lo = block_min(lo, s_);
      hi = block_max(hi, s_);
    }
    while (count > kSortable) {
      const int shift = max(0, 64 - __clzll(static_cast<long long>(hi - lo)) - kBinBits);
      clear(s_.fine);
      scores_.for_each([&](float score, int32_t id) {
        const Order order = order_of(score, id);
        if (order < lo || order > hi) return;
        const auto bin = static_cast<uint32_t>((order - lo) >> shift);
        atomicAdd(&s_.fine.weight[bin], fixed_point(likelihood(score)));
        atomicAdd(&s_.fine.count[bin], 1);
      });
      make_running(s_.fine, s_);
      find_bin(s_.fine, by, target, s_);
      target -= s_.before;
      weight_before += s_.weight_before;
      count = s_.count;
      lo += Order{s_.bin} << shift;
      hi = min(hi, lo + ((Order{1} << shift) - 1));
    }

    uint32_t size = 2;
    while (size < count) size *= 2;
    for (uint32_t i = threadIdx.x; i < size; i += kDrawThreads) s_.sorted[i] = ~Order{0};
    if (threadIdx.x == 0) s_.gathered = 0;
    __syncthreads();
    scores_.for_each([&](float score, int32_t id) {
      const Order order = order_of(score, id);
      if (by_bin ? coarse_bin(score) == coarse : order >= lo && order <= hi) {
        s_.sorted[atomicAdd(&s_.gathered, 1)] = order;
      }
    });
    __syncthreads();
    sort(s_.sorted, size);

    const uint32_t i = 2 * threadIdx.x;
    const Order even = i < count ? s_.sorted[i] : 0, odd = i + 1 < count ? s_.sorted[i + 1] : 0;
    const Weight even_weight = i < count ? fixed_point(likelihood(score_of(even))) : 0;
    const Weight odd_weight = i + 1 < count ? fixed_point(likelihood(score_of(odd))) : 0;
    const Weight through = running_sum(even_weight + odd_weight, s_);
    const Weight between = through - odd_weight, before = between - even_weight;
    const bool is_even = by == By::kCount ? target == i : before <= target && target < between;
    const bool is_odd = by == By::kCount ? target == i + 1 : between <= target && target < through;
    if (is_even || is_odd) {
      s_.found = is_even ? even : odd;
      s_.weight_through = weight_before + (is_even ? between : through);
    }
    __syncthreads();
    return s_.weight_through;
  }

  const Scores& scores_;
  DrawShared& s_;
  double temperature_;
  float best_ = 0;
  float bins_per_score_ = 0;  // 0: all in the last bin
  bool zero_tail_ = false;
};

}  // namespace clo::kernels
