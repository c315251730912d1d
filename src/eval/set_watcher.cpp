#include "eval/set_watcher.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "kv/head_cache.h"
#include "ops/stored_row.h"
#include "ops/token_mask.h"
#include "profile/head_attention.h"
#include "tensor/dtype.h"

namespace clo {

double jaccard(std::span<const int32_t> a, std::span<const int32_t> b) {
  size_t both = 0;
  for (size_t i = 0, j = 0; i < a.size() && j < b.size();) {
    both += a[i] == b[j];
    const bool first = a[i] <= b[j], second = b[j] <= a[i];
    i += first;
    j += second;
  }
  const size_t either = a.size() + b.size() - both;
  return either == 0 ? 1 : static_cast<double>(both) / static_cast<double>(either);
}

int64_t count_modes(std::span<const TokenWeight> tokens) {
  int64_t modes = 0, last_heavy = -2;
  for (size_t i = 0; i < tokens.size();) {
    const int64_t block = tokens[i].token / kModeBlockTokens;
    double weight = 0;
    for (; i < tokens.size() && tokens[i].token / kModeBlockTokens == block; ++i) {
      weight += tokens[i].weight;
    }
    if (weight < kModeMass) continue;
    modes += block != last_heavy + 1;
    last_heavy = block;
  }
  return modes;
}

void SetWatcher::on_decode(const KvShape& shape, int32_t layer, std::span<const HeadTask> tasks) {
  CLO_CHECK(std::ssize(tasks) == shape.num_kv_heads, tasks.size(), layer);
  for (const HeadTask& task : tasks) {
    if (!task.attend_all) compare_sets(task);
    list_rows(shape, task);
    add_modes(shape, task);
  }
}

void SetWatcher::compare_sets(const HeadTask& task) {
  const int32_t* slots = task.head->slot_token;
  std::vector<int32_t> set(slots, slots + task.head->state->num_slots_used);
  std::erase(set, -1);
  std::sort(set.begin(), set.end());
  const auto [found, is_new] = last_.try_emplace({task.layer, task.kv_head});
  if (!is_new) {
    figures_.overlap_sum += jaccard(found->second, set);
    ++figures_.overlaps;
  }
  found->second = std::move(set);
}

void SetWatcher::list_rows(const KvShape& shape, const HeadTask& task) {
  const HeadCacheView& head = *task.head;
  const int64_t context = task.context_tokens, stored_bytes = shape.stored_row_bytes();
  const int64_t sinks = std::min<int64_t>(head.sink_tokens, context);
  const int64_t ring_begin = std::max<int64_t>(sinks, context - head.ring_tokens);
  const TokenMask* mask = task.sequence->mask;
  rows_.clear();
  const auto add_fixed = [&](int64_t token) {
    if (mask != nullptr && mask->hides(token)) return;
    rows_.push_back({token, fixed_row(shape, head, token, context), true});
  };
  for (int64_t t = 0; t < sinks; ++t) add_fixed(t);
  if (task.attend_all) {
    for (int64_t t = sinks; t < ring_begin; ++t) {
      if (mask != nullptr && mask->hides(t)) continue;
      rows_.push_back({t, head.resident + t * stored_bytes, false});
    }
  } else {
    for (int32_t slot = 0; slot < head.state->num_slots_used; ++slot) {
      const int64_t token = head.slot_token[slot];
      if (token < sinks || token >= ring_begin) continue;
      rows_.push_back({token,
                       head.is_resident() ? head.resident + token * stored_bytes
                                          : head.slots + slot * stored_bytes,
                       false});
    }
    std::sort(rows_.begin(), rows_.end(),
              [](const Row& a, const Row& b) { return a.token < b.token; });
  }
  for (int64_t t = ring_begin; t < context; ++t) add_fixed(t);
}

void SetWatcher::add_modes(const KvShape& shape, const HeadTask& task) {
  const auto group = static_cast<size_t>(shape.group_size());
  const auto dim = static_cast<size_t>(shape.head_dim);
  const double scale = 1 / std::sqrt(static_cast<double>(dim));
  scores_.resize(group * rows_.size());
  key_.resize(dim);
  value_.resize(dim);
  for (size_t r = 0; r < rows_.size(); ++r) {
    if (rows_[r].full || !shape.compressed()) {
      convert_to_f32(shape.type, rows_[r].bytes, key_.data(), shape.head_dim);
    } else {
      expand_row(shape, rows_[r].bytes, key_.data(), value_.data());
    }
    for (size_t g = 0; g < group; ++g) {
      double dot = 0;
      for (size_t d = 0; d < dim; ++d) dot += double{task.query[g * dim + d]} * key_[d];
      scores_[g * rows_.size() + r] = dot * scale;
    }
  }
  for (size_t g = 0; g < group; ++g) {
    const double* scores = scores_.data() + g * rows_.size();
    const double best = *std::max_element(scores, scores + rows_.size());
    double total = 0;
    for (size_t r = 0; r < rows_.size(); ++r) total += std::exp(scores[r] - best);
    weights_.clear();
    for (size_t r = 0; r < rows_.size(); ++r) {
      weights_.push_back({rows_[r].token, std::exp(scores[r] - best) / total});
    }
    figures_.modes_sum += static_cast<double>(count_modes(weights_));
    ++figures_.modes;
  }
}

}  // namespace clo
