// What a step's attention knows of the mass it keeps: hit tests beside the cosine, samples for the
// dial, measurements, and how hard heads are by the end of a prompt.
#include <algorithm>
#include <cmath>

#include "attention/attention.h"
#include "attention/mass_rows.h"
#include "ops/mass_draw.h"
#include "select/set_rule.h"

namespace clo {

namespace {

// Not finite where one of the two is no direction.
float cosine_of(const float* a, const float* b, int64_t dim) {
  double dot = 0, a_square = 0, b_square = 0;
  for (int64_t d = 0; d < dim; ++d) {
    dot += double{a[d]} * b[d];
    a_square += double{a[d]} * a[d];
    b_square += double{b[d]} * b[d];
  }
  return static_cast<float>(dot / std::sqrt(a_square * b_square));
}

}  // namespace

// How often the last queries of a prompt, each against the one before, would have missed.
void Attention::note_difficulty(int32_t layer, const float* queries, int64_t query_stride) {
  const KvShape& shape = system_.shape;
  SequenceKv& sequence = *batch_[0];
  const int64_t count = SequenceKv::difficulty_samples(tokens_per_sequence_);
  if (count <= 0) return;
  const auto group = static_cast<size_t>(shape.group_size());
  std::vector<float> cosine(group);
  for (int32_t h = 0; h < shape.num_kv_heads; ++h) {
    int64_t misses = 0;
    for (int64_t t = tokens_per_sequence_ - count; t < tokens_per_sequence_; ++t) {
      for (size_t g = 0; g < group; ++g) {
        const float* now =
            queries + t * query_stride +
            (static_cast<int64_t>(h) * shape.group_size() + static_cast<int64_t>(g)) *
                shape.head_dim;
        cosine[g] = cosine_of(now, now - query_stride, shape.head_dim);
      }
      misses += !similar_enough(sequence.policy(), cosine, sequence.importance(layer, h));
    }
    sequence.note_difficulty(layer, h, static_cast<double>(misses) / static_cast<double>(count),
                             count);
  }
}

// Those that changed places choose their first sets again, so that where a head lies changes no
// answer.
void Attention::settle_residents(SequenceKv& sequence) {
  const KvShape& shape = system_.shape;
  const std::vector<size_t> swapped = sequence.settle_residents();
  const auto kv_heads = static_cast<size_t>(shape.num_kv_heads);
  for (size_t i = 0; i < swapped.size();) {
    const auto layer = static_cast<int32_t>(swapped[i] / kv_heads);
    views_.assign(1, sequence.layer_view(layer));
    candidates_.clear();
    for (; i < swapped.size() && static_cast<int32_t>(swapped[i] / kv_heads) == layer; ++i) {
      const auto h = static_cast<int32_t>(swapped[i] % kv_heads);
      HeadTask task = make_task(
          sequence, layer, h,
          sequence.last_query(layer).data() + int64_t{h} * shape.group_size() * shape.head_dim,
          sequence.num_tokens());
      task.sequence = views_.data();
      if (!task.attend_all) candidates_.push_back({&sequence, task});
    }
    refresh(layer, Cause::kPrime);
  }
}

bool Attention::wants_mass() const {
  return system_.measure_mass ||
         std::any_of(batch_.begin(), batch_.end(),
                     [](SequenceKv* sequence) { return sequence->dial() != nullptr; });
}

bool Attention::wants_entropy() const {
  return std::any_of(batch_.begin(), batch_.end(), [](const SequenceKv* sequence) {
    return sequence->policy().hit_test == HitTest::kEntropy;
  });
}

bool Attention::refused(SequenceKv& sequence, const HeadTask& task, double margin) {
  const PolicyOptions& policy = sequence.policy();
  if (policy.hit_test == HitTest::kCosine) return false;
  // The entropies are of the set before a prediction for this step replaced it.
  const bool is_new = task.head->state->label_length == task.context_tokens;
  if (policy.hit_test == HitTest::kEntropy && is_new) return false;
  const SequenceKv::HeadMemory& memory = sequence.memory(task.layer, task.kv_head);
  const auto group = static_cast<size_t>(system_.shape.group_size());
  const auto dim = static_cast<size_t>(system_.shape.head_dim);
  moved_.resize(group);
  for (size_t g = 0; g < group; ++g) {
    moved_[g] = policy.hit_test == HitTest::kEntropy
                    ? memory.entropy[g] - memory.entropy_at_label[g]
                    : score_drift({task.query + g * dim, dim}, {task.head->label + g * dim, dim},
                                  memory.key_spread, scale_);
  }
  // Not known yet, right after the prompt: no reason to refuse.
  const double mean = group_mean(policy, moved_, sequence.importance(task.layer, task.kv_head));
  const double limit =
      policy.hit_test == HitTest::kEntropy ? policy.entropy_rise : policy.drift_limit;
  return mean > (1 - margin) * limit;
}

void Attention::note_entropy(int32_t layer) {
  const auto group = static_cast<size_t>(system_.shape.group_size());
  for (size_t t = 0; t < tasks_.size(); ++t) {
    SequenceKv& sequence = *batch_[t / static_cast<size_t>(system_.shape.num_kv_heads)];
    if (sequence.policy().hit_test != HitTest::kEntropy || tasks_[t].attend_all) continue;
    SequenceKv::HeadMemory& memory = sequence.memory(layer, tasks_[t].kv_head);
    std::copy_n(min_entropy_.begin() + static_cast<std::ptrdiff_t>(t * group), group,
                memory.entropy.begin());
    // The first step after a prompt speaks for the set that the prompt's end has chosen.
    const bool is_new = tasks_[t].head->state->label_length == tasks_[t].context_tokens;
    if (is_new || std::isnan(memory.entropy_at_label[0])) memory.entropy_at_label = memory.entropy;
  }
}

void Attention::note_spread(int32_t layer) {
  constexpr int64_t kTokens = 256;
  decided_.clear();
  for (const Candidate& candidate : candidates_) decided_.push_back(candidate.task);
  if (decided_.empty()) return;
  // Tokens all over the context; a resident head has them itself, the others the host store.
  const SequenceKv& sequence = *batch_[0];
  const int64_t visible = sequence.num_visible(0, decided_.front().context_tokens);
  const int64_t count = std::min(kTokens, visible);
  sampled_tokens_.clear();
  for (int64_t i = 0; i < count; ++i) {
    const int64_t rank = i * visible / count;
    sampled_tokens_.push_back(static_cast<int32_t>(
        sequence.mask() == nullptr ? rank : sequence.mask()->visible_token(rank)));
  }
  std::vector<float> spread(decided_.size());
  system_.ops->key_spread({system_.shape, decided_.data(), std::ssize(decided_),
                           sampled_tokens_.data(), count, spread.data()});
  for (size_t i = 0; i < decided_.size(); ++i) {
    candidates_[i].sequence->memory(layer, decided_[i].kv_head).key_spread = spread[i];
  }
}

double Attention::kept_mass(const HeadTask& task, int64_t rows_read,
                            std::span<const float> log_sum_exp, int32_t num_rows) {
  const auto group = log_sum_exp.size();
  const TokenMask* mask = task.sequence->mask;
  const int64_t visible =
      mask == nullptr ? task.context_tokens : mask->num_visible(0, task.context_tokens);
  const int64_t outside = visible - rows_read;
  if (outside == 0) return 1;
  draw_rows(*task.head, mask, task.context_tokens, head_index(task), outside, num_rows,
            sampled_tokens_);
  full_log_sum_exp_.resize(group);
  system_.ops->full_scores({system_.shape, &task, 1, scale_, full_log_sum_exp_.data(),
                            sampled_tokens_.data(), std::ssize(sampled_tokens_)});
  // Of a drawn row: how many it stands for.
  const double weight = static_cast<double>(outside) / static_cast<double>(sampled_tokens_.size());
  double sum = 0;
  for (size_t g = 0; g < group; ++g) {
    const double over =
        std::exp(static_cast<double>(full_log_sum_exp_[g]) - static_cast<double>(log_sum_exp[g]));
    sum += 1 / (1 + weight * over);
  }
  return sum / static_cast<double>(group);
}

int32_t Attention::head_index(const HeadTask& task) const {
  return task.layer * system_.shape.num_kv_heads + task.kv_head;
}

void Attention::sample_mass() {
  const auto heads = static_cast<size_t>(system_.shape.num_kv_heads);
  const auto group = static_cast<size_t>(system_.shape.group_size());
  for (size_t t = 0; t < tasks_.size(); ++t) {
    SequenceKv& sequence = *batch_[t / heads];
    const HeadTask& task = tasks_[t];
    if (sequence.dial() == nullptr || task.attend_all) continue;
    const int32_t num_heads = system_.shape.num_layers * system_.shape.num_kv_heads;
    if (!is_looked_at(task.context_tokens, head_index(task), num_heads)) continue;
    const double kept = kept_mass(task, rows_read_[t],
                                  std::span(log_sum_exp_).subspan(t * group, group), kMassRows);
    sequence.dial()->add(kept, task.head->state->label_length == task.context_tokens);
  }
}

// The sets that the end of a prompt has chosen, for its last query.
void Attention::sample_first_sets() {
  const KvShape& shape = system_.shape;
  const auto group = static_cast<size_t>(shape.group_size());
  const size_t width = group * static_cast<size_t>(shape.head_dim);
  decided_.clear();
  unused_out_.resize(candidates_.size() * width);
  for (size_t i = 0; i < candidates_.size(); ++i) {
    decided_.push_back(candidates_[i].task);
    decided_.back().out = unused_out_.data() + i * width;
  }
  if (decided_.empty()) return;
  log_sum_exp_.resize(decided_.size() * group);
  rows_read_.resize(decided_.size());
  AttendParams params;
  params.shape = shape;
  params.tasks = decided_.data();
  params.num_tasks = std::ssize(decided_);
  params.scale = scale_;
  params.log_sum_exp = log_sum_exp_.data();
  params.rows_read = rows_read_.data();
  system_.ops->attend(params);
  for (size_t i = 0; i < decided_.size(); ++i) {
    candidates_[i].sequence->dial()->add_first(
        kept_mass(decided_[i], rows_read_[i], std::span(log_sum_exp_).subspan(i * group, group),
                  kFirstMassRows));
  }
}

void Attention::measure_mass(int32_t layer) {
  const auto group = static_cast<size_t>(system_.shape.group_size());
  // Heads that attend to everything keep all of it, and are not counted.
  std::vector<size_t> measured;
  decided_.clear();
  for (size_t t = 0; t < tasks_.size(); ++t) {
    if (tasks_[t].attend_all) continue;
    measured.push_back(t);
    decided_.push_back(tasks_[t]);
  }
  if (measured.empty()) return;
  full_log_sum_exp_.resize(measured.size() * group);
  system_.ops->full_scores(
      {system_.shape, decided_.data(), std::ssize(decided_), scale_, full_log_sum_exp_.data()});
  for (size_t i = 0; i < measured.size(); ++i) {
    const size_t t = measured[i];
    KvCounters& counters =
        batch_[t / static_cast<size_t>(system_.shape.num_kv_heads)]->counters(layer);
    double sum = 0;
    for (size_t g = 0; g < group; ++g) {
      const double mass = std::exp(log_sum_exp_[t * group + g] - full_log_sum_exp_[i * group + g]);
      sum += std::min(mass, 1.0);
      ++counters.mass_samples;
    }
    counters.mass_kept += sum;
    SequenceKv& sequence = *batch_[t / static_cast<size_t>(system_.shape.num_kv_heads)];
    SequenceKv::HeadMemory& memory = sequence.memory(layer, tasks_[t].kv_head);
    const double mass = sum / static_cast<double>(group);
    // As with the entropy, the first step after a prompt speaks for the first set.
    const bool is_new = tasks_[t].head->state->label_length == tasks_[t].context_tokens;
    if (is_new || std::isnan(memory.mass_at_label)) {
      memory.mass_at_label = mass;
    } else {
      ++counters.kept_sets;
      counters.hidden_changes += mass < memory.mass_at_label - 0.05;
    }
  }
}

void Attention::measure_queries(int32_t layer, const float* queries, int64_t query_stride) {
  const KvShape& shape = system_.shape;
  for (size_t s = 0; s < batch_.size(); ++s) {
    if (!batch_[s]->has_last_query) continue;
    const float* last = batch_[s]->last_query(layer).data();
    const float* now = queries + static_cast<int64_t>(s) * query_stride;
    KvCounters& counters = batch_[s]->counters(layer);
    for (int64_t first = 0; first < int64_t{shape.num_q_heads} * shape.head_dim;
         first += shape.head_dim) {
      const float cosine = cosine_of(now + first, last + first, shape.head_dim);
      if (!std::isfinite(cosine)) continue;
      counters.query_cosine += cosine;
      ++counters.query_cosine_samples;
    }
  }
}

void Attention::count_watched(int32_t layer) {
  const auto heads = static_cast<size_t>(system_.shape.num_kv_heads);
  for (size_t t = 0; t < tasks_.size(); ++t) {
    SequenceKv& sequence = *batch_[t / heads];
    // As with mass: heads that attend to everything would only dilute what sets miss.
    if (sequence.watched.empty() || tasks_[t].attend_all) continue;
    const HeadCacheView& head = *tasks_[t].head;
    const int64_t context = tasks_[t].context_tokens;
    const int64_t sinks = std::min<int64_t>(head.sink_tokens, context);
    const int64_t ring_begin = std::max<int64_t>(sinks, context - head.ring_tokens);
    KvCounters& counters = sequence.counters(layer);
    for (const TokenRange& range : sequence.watched) {
      const auto overlap = [&](int64_t first, int64_t end) {
        return std::max<int64_t>(0, std::min(range.end, end) - std::max(range.first, first));
      };
      counters.watched_rows += overlap(0, context);
      counters.watched_rows_attended += overlap(0, sinks) + overlap(ring_begin, context);
      for (int32_t slot = 0; slot < head.state->num_slots_used; ++slot) {
        const int64_t token = head.slot_token[slot];
        counters.watched_rows_attended +=
            token >= range.first && token < range.end && token < ring_begin;
      }
    }
  }
}

}  // namespace clo
