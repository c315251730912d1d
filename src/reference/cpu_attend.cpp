// Decode attention over [sink | set | ring], or over all rows of a resident head. Sink and ring are
// full rows, the others stored ones; where these are compressed a part reads first its full rows,
// then the stored ones, and both carry one maximum, sum and accumulator. The rows of a head are cut
// into parts of fixed size; parts run in parallel and are merged by log-sum-exp in order, so the
// result depends neither on the number of threads nor on the rest of the batch.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/units.h"
#include "kv/head_cache.h"
#include "ops/token_mask.h"
#include "reference/cpu_ops.h"

namespace clo {

namespace {

constexpr int64_t kPartRows = 1024;
// Heads whose rows one thread lists, or whose parts it merges, at a time.
constexpr int64_t kListTasks = 4;
constexpr int64_t kMergeTasks = 16;

// Where sink and ring of a head lie among `context` tokens: [0, sinks) and [ring_begin, context).
struct FixedTokens {
  int64_t sinks = 0, ring_begin = 0;
};
FixedTokens fixed_tokens(const HeadCacheView& head, int64_t context) {
  const int64_t sinks = std::min<int64_t>(head.sink_tokens, context);
  return {sinks, std::max<int64_t>(sinks, context - head.ring_tokens)};
}

// The rows a head attends to, in the order sink, set, ring; beside compressed rows sink and ring
// come first, as one run of loops reads rows of one kind. A set token that is still in the ring is
// taken from the ring alone. A set has no masked tokens: these are no candidates.
void list_rows(const KvShape& shape, const HeadTask& task, RowList& rows) {
  const HeadCacheView& head = *task.head;
  const int64_t stored_bytes = shape.stored_row_bytes();
  const int64_t context = task.context_tokens;
  const bool mixed = shape.compressed();
  const TokenMask* mask = mask_of(task);
  rows.listed.clear();
  rows.num_full = rows.num_in_run = 0;
  if (task.attend_all && !mixed && mask == nullptr) {
    rows.run = head.resident;
    rows.num_in_run = context;
    return;
  }
  const auto [sinks, ring_begin] = fixed_tokens(head, context);
  const auto list_fixed = [&, last = context](int64_t first, int64_t end) {
    for (int64_t t = first; t < end; ++t) {
      if (mask == nullptr || !mask->hides(t))
        rows.listed.push_back(fixed_row(shape, head, t, last));
    }
  };
  list_fixed(0, sinks);
  if (mixed) list_fixed(ring_begin, context);
  if (mixed) rows.num_full = std::ssize(rows.listed);
  if (task.attend_all && mask == nullptr) {
    rows.run = head.resident + sinks * stored_bytes;
    rows.num_in_run = ring_begin - sinks;
    return;
  }
  if (task.attend_all) {
    mask->for_each_visible(sinks, ring_begin, [&](int64_t t, int64_t end) {
      for (; t < end; ++t) rows.listed.push_back(head.resident + t * stored_bytes);
    });
    if (!mixed) list_fixed(ring_begin, context);
    return;
  }
  for (int32_t slot = 0; slot < head.state->num_slots_used; ++slot) {
    const int32_t token = head.slot_token[slot];
    if (token < 0 || token >= ring_begin) continue;
    rows.listed.push_back(head.is_resident() ? head.resident + token * stored_bytes
                                             : head.slots + slot * stored_bytes);
  }
  if (!mixed) list_fixed(ring_begin, context);
}

void scale_query(const KvShape& shape, const HeadTask& task, float scale, float* out) {
  const int count = shape.group_size() * shape.head_dim;
  for (int i = 0; i < count; ++i) out[i] = task.query[i] * scale;
}

}  // namespace

void CpuOps::attend(const AttendParams& p) {
  const KvShape& shape = p.shape;
  const int group = shape.group_size(), dim = shape.head_dim;
  const auto tasks = static_cast<size_t>(p.num_tasks);
  row_lists_.resize(std::max(row_lists_.size(), tasks));
  scaled_queries_.resize(std::max(scaled_queries_.size(), tasks * group * dim));

  pool_.run_ranges(p.num_tasks, kListTasks, [&](int64_t begin, int64_t end) {
    for (auto t = static_cast<size_t>(begin); t < static_cast<size_t>(end); ++t) {
      list_rows(shape, p.tasks[t], row_lists_[t]);
      scale_query(shape, p.tasks[t], p.scale, scaled_queries_.data() + t * group * dim);
    }
  });
  first_part_.assign(1, 0);
  for (size_t t = 0; t < tasks; ++t) {
    const int64_t rows = row_lists_[t].size();
    first_part_.push_back(first_part_.back() + std::max<int64_t>(1, divide_up(rows, kPartRows)));
    if (p.rows_read != nullptr) p.rows_read[t] = rows;
  }
  const int64_t num_parts = first_part_.back();
  const int64_t part_floats = int64_t{group} * (2 + dim);
  partial_.resize(std::max(partial_.size(), static_cast<size_t>(num_parts * part_floats)));

  pool_.run(num_parts, [&](int64_t part, int) {
    const auto t = static_cast<size_t>(
        std::upper_bound(first_part_.begin(), first_part_.end(), part) - first_part_.begin() - 1);
    const RowList& list = row_lists_[t];
    float* max = partial_.data() + part * part_floats;
    float* sum = max + group;
    float* acc = sum + group;
    std::fill_n(max, group, -INFINITY);
    std::fill_n(sum, int64_t{group} * (1 + dim), 0.0f);
    const int64_t first = (part - first_part_[t]) * kPartRows;
    const int64_t last = std::min(first + kPartRows, list.size());
    const std::byte* run[kBlockRows + kRowsAhead];
    // Rows [begin, end) of one kind, of which [begin, known) can be asked for.
    const auto attend_kind = [&](RowKind kind, int64_t begin, int64_t end, int64_t known) {
      for (int64_t r = begin; r < end; r += kBlockRows) {
        const int count = static_cast<int>(std::min<int64_t>(kBlockRows, end - r));
        const int listed = static_cast<int>(std::min<int64_t>(kBlockRows + kRowsAhead, known - r));
        const std::byte* const* rows = list.listed.data() + r;
        if (list.num_in_run > 0 && r >= std::ssize(list.listed)) {
          const int64_t at = r - std::ssize(list.listed);
          for (int i = 0; i < listed; ++i) run[i] = list.run + (at + i) * shape.stored_row_bytes();
          rows = run;
        }
        simd_.attend_rows(kind, dim, group, rows, count, listed,
                          scaled_queries_.data() + t * group * dim, max, sum, acc);
      }
    };
    attend_kind(full_kind(shape), first, std::min(last, list.num_full), list.num_full);
    attend_kind(stored_kind(shape), std::max(first, list.num_full), last, list.size());
  });

  const auto merge = [&](size_t t) {
    for (int g = 0; g < group; ++g) {
      float best = -INFINITY, total = 0;
      bool nan = false;
      for (int64_t part = first_part_[t]; part < first_part_[t + 1]; ++part) {
        const float max = partial_[static_cast<size_t>(part * part_floats + g)];
        nan = nan || std::isnan(partial_[static_cast<size_t>(part * part_floats + group + g)]);
        best = std::max(best, max);
      }
      float* out = p.tasks[t].out + int64_t{g} * dim;
      std::fill_n(out, dim, 0.0f);
      for (int64_t part = first_part_[t]; part < first_part_[t + 1]; ++part) {
        const float* max = partial_.data() + part * part_floats;
        if (max[g] == -INFINITY) continue;
        const float weight = std::exp(max[g] - best);
        total += weight * max[group + g];
        const float* acc = max + 2 * group + int64_t{g} * dim;
        for (int d = 0; d < dim; ++d) out[d] += weight * acc[d];
      }
      const float scale = nan ? NAN : 1.0f / total;
      for (int d = 0; d < dim; ++d) out[d] *= scale;
      if (p.log_sum_exp != nullptr) {
        p.log_sum_exp[t * group + g] = nan ? NAN : best + std::log(total);
      }
      if (p.min_entropy != nullptr) p.min_entropy[t * group + g] = nan ? NAN : std::log(total);
    }
  };
  pool_.run_ranges(p.num_tasks, kMergeTasks, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) merge(static_cast<size_t>(t));
  });
}

void CpuOps::full_scores(const FullScoreParams& p) {
  const KvShape& shape = p.shape;
  const int group = shape.group_size(), dim = shape.head_dim;
  pool_.run(p.num_tasks, [&](int64_t t, int) {
    const HeadTask& task = p.tasks[t];
    std::vector<float> query(static_cast<size_t>(group * dim));
    scale_query(shape, task, p.scale, query.data());
    std::vector<float> scores(static_cast<size_t>(group) * kBlockRows);
    std::vector<double> max(static_cast<size_t>(group), -INFINITY), sum(max.size(), 0.0);
    const auto scan = [&](RowKind kind, int64_t begin, int64_t end, const auto& row_of) {
      for (int64_t first = begin; first < end; first += kBlockRows) {
        const int count = static_cast<int>(std::min<int64_t>(kBlockRows, end - first));
        const std::byte* rows[kBlockRows];
        for (int i = 0; i < count; ++i) rows[i] = row_of(first + i);
        simd_.score_rows(kind, dim, group, rows, count, query.data(), scores.data());
        for (int g = 0; g < group; ++g) {
          const auto at = static_cast<size_t>(g);
          for (int i = 0; i < count; ++i) {
            const double s = scores[at * kBlockRows + static_cast<size_t>(i)];
            if (s > max[at]) {
              sum[at] = sum[at] * std::exp(max[at] - s) + 1;
              max[at] = s;
            } else {
              sum[at] += std::exp(s - max[at]);
            }
          }
        }
      }
    };
    const auto scan_visible = [&](RowKind kind, int64_t begin, int64_t end, const auto& row_of) {
      const TokenMask* mask = mask_of(task);
      if (mask == nullptr) return scan(kind, begin, end, row_of);
      mask->for_each_visible(begin, end, [&](int64_t a, int64_t b) { scan(kind, a, b, row_of); });
    };
    const auto fixed = [&](int64_t token) {
      return fixed_row(shape, *task.head, token, task.context_tokens);
    };
    const auto stored = [&](int64_t token) { return stored_row(shape, task, token); };
    if (p.tokens != nullptr) {
      scan(stored_kind(shape), 0, p.num_tokens, [&](int64_t i) { return stored(p.tokens[i]); });
    } else {
      // Each row as dense attention would read it.
      const int64_t context = task.context_tokens;
      const auto [sinks, ring_begin] =
          shape.compressed() ? fixed_tokens(*task.head, context) : FixedTokens{0, context};
      scan_visible(full_kind(shape), 0, sinks, fixed);
      scan_visible(stored_kind(shape), sinks, ring_begin, stored);
      scan_visible(full_kind(shape), ring_begin, context, fixed);
    }
    for (int g = 0; g < group; ++g) {
      const auto at = static_cast<size_t>(g);
      p.log_sum_exp[t * group + g] = static_cast<float>(max[at] + std::log(sum[at]));
    }
  });
}

void CpuOps::key_spread(const KeySpreadParams& p) {
  const int dim = p.shape.head_dim;
  pool_.run(p.num_tasks, [&](int64_t t, int) {
    std::vector<float> key(static_cast<size_t>(dim)), value(key.size());
    std::vector<double> sum(key.size(), 0.0);
    double squares = 0;
    for (int64_t i = 0; i < p.num_tokens; ++i) {
      simd_.widen_row(stored_kind(p.shape), stored_row(p.shape, p.tasks[t], p.tokens[i]), dim,
                      key.data(), value.data());
      for (size_t d = 0; d < key.size(); ++d) {
        sum[d] += key[d];
        squares += double{key[d]} * key[d];
      }
    }
    const auto n = static_cast<double>(p.num_tokens);
    for (const double s : sum) squares -= s * s / n;
    p.spread[t] = static_cast<float>(std::sqrt(std::max(squares, 0.0) / (n * dim)));
  });
}

}  // namespace clo
