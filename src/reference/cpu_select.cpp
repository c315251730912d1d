// Choosing sets: cosine against labels, and the num_select best candidates in token order. Among
// equal scores the lower token wins, so every backend chooses the same set.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/check.h"
#include "ops/token_mask.h"
#include "reference/cpu_ops.h"

namespace clo {

namespace {

// Per-thread buffers, kept between steps so that selection does not allocate.
struct Scratch {
  std::vector<TokenRange> runs;  // of candidates, ascending: one, or those between masked tokens
  std::vector<uint16_t> distances;
  std::vector<float> scores;
  std::vector<float> sorted;
  std::vector<uint32_t> histogram;
};

// Lists the runs of candidates. Returns how many candidates there are.
int64_t list_runs(const SelectTask& task, std::vector<TokenRange>& runs) {
  runs.clear();
  const TokenMask* mask = mask_of(task.head);
  if (mask == nullptr) {
    runs.push_back({task.first_candidate, task.end_candidate});
    return task.end_candidate - task.first_candidate;
  }
  mask->for_each_visible(task.first_candidate, task.end_candidate, [&](int64_t first, int64_t end) {
    runs.push_back({first, end});
  });
  return mask->num_visible(task.first_candidate, task.end_candidate);
}

// Calls piece(count, codes) for each page's share of each run.
template <typename Piece>
void for_each_page(const SelectTask& task, std::span<const TokenRange> runs, int words,
                   const Piece& piece) {
  for (const TokenRange& run : runs) {
    for (int64_t t = run.first; t < run.end;) {
      const int64_t page = t / kPageTokens;
      const int64_t last = std::min((page + 1) * kPageTokens, run.end);
      const uint64_t* codes = task.head.sequence->device_codes[page] +
                              (int64_t{task.head.kv_head} * kPageTokens + t % kPageTokens) * words;
      piece(last - t, codes);
      t = last;
    }
  }
}

// Distances of the candidates' codes from what the queries ask for, side by side in the order of
// their tokens (`count` of them), and how many there are at each.
void measure_distances(const SimdTable& simd, const KvShape& shape, const SelectTask& task,
                       int64_t count, Scratch& scratch) {
  const int group = shape.group_size(), words = shape.code_words(), bits = shape.code_bits;
  if (std::ssize(scratch.distances) < count) {
    scratch.distances.resize(static_cast<size_t>(count));
  }
  uint16_t* distance_at = scratch.distances.data();
  if (task.kind == SelectKind::kGradedHash) {
    const GradedQuery query = grade_query(simd, *task.hash, task.head.query, group);
    scratch.histogram.assign(static_cast<size_t>(query.most) * bits + 1, 0);
    for_each_page(task, scratch.runs, words, [&](int64_t tokens, const uint64_t* codes) {
      simd.graded(codes, words, tokens, query.signs, query.planes, distance_at,
                  scratch.histogram.data());
      distance_at += tokens;
    });
    return;
  }
  uint64_t queries[kMaxGroup * kMaxCodeBits / 64];
  float transform[kMaxHeadDim];
  for (int g = 0; g < group; ++g) {
    encode_row(simd, *task.hash, task.head.query + g * shape.head_dim, false, queries + g * words,
               transform);
  }
  scratch.histogram.assign(static_cast<size_t>(group) * bits + 1, 0);
  for_each_page(task, scratch.runs, words, [&](int64_t tokens, const uint64_t* codes) {
    simd.hamming(codes, words, tokens, queries, group, distance_at, scratch.histogram.data());
    distance_at += tokens;
  });
}

void select_hash(const SimdTable& simd, const KvShape& shape, const SelectTask& task, int64_t count,
                 Scratch& scratch) {
  measure_distances(simd, shape, task, count, scratch);
  // The largest distance still taken, and how many of those at exactly that distance.
  int64_t left = task.num_select;
  uint16_t threshold = 0;
  while (left > scratch.histogram[threshold]) left -= scratch.histogram[threshold++];
  int32_t* out = task.tokens;
  const uint16_t* next = scratch.distances.data();
  for (const TokenRange& run : scratch.runs) {
    for (int64_t t = run.first; t < run.end; ++t) {
      const uint16_t distance = *next++;
      const bool tie = distance == threshold && left > 0;
      left -= tie;
      // Written always, kept only when taken: no branch to mispredict. The last write stays inside
      // the buffer because nothing is written once num_select are taken.
      if (out == task.tokens + task.num_select) break;
      *out = static_cast<int32_t>(t);
      out += distance < threshold || tie;
    }
  }
  CLO_CHECK(out == task.tokens + task.num_select, out - task.tokens, task.num_select);
}

// Takes the num_select largest of the first `count` scores.
void take_largest(const SelectTask& task, size_t count, Scratch& scratch) {
  const auto wanted = static_cast<size_t>(task.num_select);
  scratch.sorted.assign(scratch.scores.begin(), scratch.scores.begin() + count);
  std::nth_element(scratch.sorted.begin(), scratch.sorted.begin() + (wanted - 1),
                   scratch.sorted.end(), std::greater<>());
  const float threshold = scratch.sorted[wanted - 1];
  size_t above = 0;
  for (size_t i = 0; i < count; ++i) above += scratch.scores[i] > threshold;
  size_t ties = wanted - above;
  int32_t* out = task.tokens;
  const float* next = scratch.scores.data();
  for (const TokenRange& run : scratch.runs) {
    for (int64_t t = run.first; t < run.end && out < task.tokens + wanted; ++t) {
      const float score = *next++;
      const bool tie = score == threshold && ties > 0;
      ties -= tie;
      if (score > threshold || tie) *out++ = static_cast<int32_t>(t);
    }
  }
}

void select_exact(const SimdTable& simd, const KvShape& shape, const SelectTask& task, size_t count,
                  float scale, Scratch& scratch) {
  const int group = shape.group_size(), dim = shape.head_dim;
  std::vector<float> query(static_cast<size_t>(group * dim));
  for (int i = 0; i < group * dim; ++i) query[static_cast<size_t>(i)] = task.head.query[i] * scale;
  std::vector<float> by_head(count * static_cast<size_t>(group));
  float block[kMaxGroup * kBlockRows];
  size_t first = 0;
  for (const TokenRange& run : scratch.runs) {
    for (int64_t t = run.first; t < run.end; t += kBlockRows) {
      const int here = static_cast<int>(std::min<int64_t>(kBlockRows, run.end - t));
      const std::byte* rows[kBlockRows];
      for (int i = 0; i < here; ++i) rows[i] = stored_row(shape, task.head, t + i);
      simd.score_rows(stored_kind(shape), dim, group, rows, here, query.data(), block);
      for (int g = 0; g < group; ++g) {
        for (int i = 0; i < here; ++i) {
          by_head[static_cast<size_t>(g) * count + first + static_cast<size_t>(i)] =
              block[g * kBlockRows + i];
        }
      }
      first += static_cast<size_t>(here);
    }
  }
  // Sum over the group of each head's softmax over the candidates.
  scratch.scores.assign(count, 0.0f);
  for (int g = 0; g < group; ++g) {
    const float* scores = by_head.data() + static_cast<size_t>(g) * count;
    const float best = *std::max_element(scores, scores + count);
    double total = 0;
    for (size_t i = 0; i < count; ++i) total += std::exp(scores[i] - best);
    for (size_t i = 0; i < count; ++i) {
      const float weight = static_cast<float>(std::exp(scores[i] - best) / total);
      scratch.scores[i] += std::isnan(weight) ? 0.0f : weight;
    }
  }
  take_largest(task, count, scratch);
}

void select_random(const SelectTask& task, size_t count, Scratch& scratch) {
  scratch.scores.resize(std::max(scratch.scores.size(), count));
  for (size_t i = 0; i < count; ++i) {
    uint64_t z = task.random_seed + 0x9E3779B97F4A7C15u * (i + 1);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    scratch.scores[i] = static_cast<float>(z >> 40);
  }
  take_largest(task, count, scratch);
}

}  // namespace

void CpuOps::cosine(const CosineParams& p) {
  const int group = p.shape.group_size(), dim = p.shape.head_dim;
  for (int64_t t = 0; t < p.num_tasks; ++t) {
    for (int g = 0; g < group; ++g) {
      const float* q = p.tasks[t].query + g * dim;
      const float* label = p.tasks[t].head->label + g * dim;
      float dot = 0, q_norm = 0, label_norm = 0;
      for (int d = 0; d < dim; ++d) {
        dot += q[d] * label[d];
        q_norm += q[d] * q[d];
        label_norm += label[d] * label[d];
      }
      // Roots before the product: it could underflow or overflow where they do not.
      const float cosine = dot / (std::sqrt(q_norm) * std::sqrt(label_norm));
      p.cosine[t * group + g] = std::isfinite(cosine) ? cosine : NAN;  // NaN is a miss
    }
  }
}

void CpuOps::select(const SelectParams& p) {
  pool_.run(p.num_tasks, [&](int64_t t, int) {
    const SelectTask& task = p.tasks[t];
    static thread_local Scratch scratch;
    const int64_t count = list_runs(task, scratch.runs);
    CLO_CHECK(task.num_select >= 0 && task.num_select <= count, task.num_select, count);
    if (task.num_select == 0) return;
    if (task.num_select == count) {
      int32_t* out = task.tokens;
      for (const TokenRange& run : scratch.runs) {
        for (int64_t token = run.first; token < run.end; ++token) {
          *out++ = static_cast<int32_t>(token);
        }
      }
      return;
    }
    switch (task.kind) {
      case SelectKind::kHash:
      case SelectKind::kGradedHash:
        select_hash(simd_, p.shape, task, count, scratch);
        break;
      case SelectKind::kExact:
        select_exact(simd_, p.shape, task, static_cast<size_t>(count), p.scale, scratch);
        break;
      case SelectKind::kRandom:
        select_random(task, static_cast<size_t>(count), scratch);
        break;
    }
  });
}

}  // namespace clo
