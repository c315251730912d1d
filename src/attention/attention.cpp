#include "attention/attention.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>

#include "base/check.h"
#include "select/set_rule.h"

namespace clo {

Attention::Attention(KvSystem& system, float scale) : system_(system), scale_(scale) {}

void Attention::begin_decode(std::span<SequenceKv* const> batch) {
  batch_.assign(batch.begin(), batch.end());
  tokens_per_sequence_ = 1;
  prefill_ = prime_ = false;
  for (SequenceKv* sequence : batch_) {
    if (sequence->sampler() != nullptr) sequence->sampler()->begin_step();
  }
}

void Attention::begin_prefill(SequenceKv& sequence, int64_t num_tokens, bool last) {
  batch_.assign(1, &sequence);
  tokens_per_sequence_ = num_tokens;
  prefill_ = true;
  prime_ = last;
}

void Attention::append(int32_t layer, const float* keys, const float* values, int64_t row_stride) {
  views_.clear();
  first_tokens_.clear();
  for (SequenceKv* sequence : batch_) {
    views_.push_back(sequence->layer_view(layer));
    first_tokens_.push_back(sequence->num_tokens());
    if (views_.back().host_rows != nullptr) {
      sequence->counters(layer).rows_offloaded += tokens_per_sequence_ * system_.shape.num_kv_heads;
    }
  }
  AppendParams params;
  params.shape = system_.shape;
  params.sequences = views_.data();
  params.first_token = first_tokens_.data();
  params.hashes = system_.layer_hashes(layer);
  params.keys = keys;
  params.values = values;
  params.row_stride = row_stride;
  params.num_sequences = std::ssize(batch_);
  params.tokens_per_sequence = tokens_per_sequence_;
  system_.ops->append(params);
}

HeadTask Attention::make_task(SequenceKv& sequence, int32_t layer, int32_t kv_head,
                              const float* query, int64_t context_tokens) {
  HeadTask task;
  task.head = &sequence.head(layer, kv_head);
  task.query = query;
  task.context_tokens = context_tokens;
  task.kv_head = kv_head;
  task.layer = layer;
  task.attend_all = sequence.is_resident(layer, kv_head) &&
                    (sequence.is_dense_layer(layer) || covers(sequence.policy(), context_tokens));
  return task;
}

bool Attention::wants_prediction(int32_t layer) const {
  return !prefill_ && std::any_of(batch_.begin(), batch_.end(), [&](const SequenceKv* sequence) {
    return sequence->policy().predict == Predict::kPreviousLayer &&
           !sequence->is_dense_layer(layer);
  });
}

void Attention::prefetch(int32_t layer, const float* queries) {
  const KvShape& shape = system_.shape;
  views_.resize(batch_.size());
  candidates_.clear();
  for (size_t s = 0; s < batch_.size(); ++s) {
    SequenceKv& sequence = *batch_[s];
    if (sequence.policy().predict != Predict::kPreviousLayer) continue;
    views_[s] = sequence.layer_view(layer);
    const float* of_sequence =
        queries + static_cast<int64_t>(s) * shape.num_q_heads * shape.head_dim;
    for (int32_t h = 0; h < shape.num_kv_heads; ++h) {
      HeadTask task = make_task(sequence, layer, h,
                                of_sequence + int64_t{h} * shape.group_size() * shape.head_dim,
                                sequence.num_tokens() + 1);
      task.sequence = &views_[s];
      if (!task.attend_all) candidates_.push_back({&sequence, task});
    }
  }
  refresh(layer, Cause::kForesee);
}

void Attention::attend(int32_t layer, const float* queries, int64_t query_stride, float* out) {
  if (prefill_) {
    attend_prefill(layer, queries, query_stride, out);
  } else {
    attend_decode(layer, queries, query_stride, out);
  }
}

void Attention::attend_prefill(int32_t layer, const float* queries, int64_t query_stride,
                               float* out) {
  const KvShape& shape = system_.shape;
  SequenceKv& sequence = *batch_[0];
  PrefillAttentionParams params;
  params.shape = shape;
  params.sequence = views_[0];
  params.queries = queries;
  params.out = out;
  params.query_stride = query_stride;
  params.first_token = sequence.num_tokens();
  params.num_tokens = tokens_per_sequence_;
  params.scale = scale_;
  system_.ops->prefill_attention(params);
  if (!prime_) return;

  const float* last = queries + (tokens_per_sequence_ - 1) * query_stride;
  std::copy_n(last, int64_t{shape.num_q_heads} * shape.head_dim,
              sequence.last_query(layer).begin());
  sequence.has_last_query = true;
  candidates_.clear();
  for (int32_t h = 0; h < shape.num_kv_heads; ++h) {
    HeadTask task = make_task(
        sequence, layer, h,
        sequence.last_query(layer).data() + int64_t{h} * shape.group_size() * shape.head_dim,
        sequence.num_tokens() + tokens_per_sequence_);
    task.sequence = &views_[0];
    if (!task.attend_all) candidates_.push_back({&sequence, task});
  }
  refresh(layer, Cause::kPrime);
  if (sequence.policy().hit_test == HitTest::kDrift) note_spread(layer);
  if (sequence.sampler() != nullptr) sample_first_sets();
}

void Attention::attend_decode(int32_t layer, const float* queries, int64_t query_stride,
                              float* out) {
  const KvShape& shape = system_.shape;
  const int64_t width = int64_t{shape.num_q_heads} * shape.head_dim;
  const int64_t group_width = int64_t{shape.group_size()} * shape.head_dim;

  // Sets for this step from the queries of the one before it. A device starts this work half a
  // step earlier; what it chooses is the same.
  candidates_.clear();
  for (size_t s = 0; s < batch_.size(); ++s) {
    SequenceKv& sequence = *batch_[s];
    if (sequence.policy().predict != Predict::kPreviousStep || !sequence.has_last_query) continue;
    for (int32_t h = 0; h < shape.num_kv_heads; ++h) {
      HeadTask task =
          make_task(sequence, layer, h, sequence.last_query(layer).data() + h * group_width,
                    sequence.num_tokens() + 1);
      task.sequence = &views_[s];
      if (!task.attend_all) candidates_.push_back({&sequence, task});
    }
  }
  if (!candidates_.empty()) refresh(layer, Cause::kForesee);

  // Sets from the true query: where nothing predicts it, and where a prediction is corrected.
  tasks_.clear();
  candidates_.clear();
  corrections_.clear();
  for (size_t s = 0; s < batch_.size(); ++s) {
    SequenceKv& sequence = *batch_[s];
    const PolicyOptions& policy = sequence.policy();
    const bool foreseen = (policy.predict == Predict::kPreviousLayer && layer > 0) ||
                          (policy.predict == Predict::kPreviousStep && sequence.has_last_query);
    for (int32_t h = 0; h < shape.num_kv_heads; ++h) {
      HeadTask task = make_task(sequence, layer, h,
                                queries + static_cast<int64_t>(s) * query_stride + h * group_width,
                                sequence.num_tokens() + 1);
      task.sequence = &views_[s];
      task.out = out + static_cast<int64_t>(s) * width + h * group_width;
      tasks_.push_back(task);
      if (task.attend_all) continue;
      if (!foreseen) {
        candidates_.push_back({&sequence, task});
      } else if (policy.correction == Correction::kTrueQuery) {
        corrections_.push_back({&sequence, task});
      }
    }
  }
  if (!candidates_.empty()) refresh(layer, Cause::kDecide);
  if (!corrections_.empty()) {
    candidates_.swap(corrections_);
    refresh(layer, Cause::kCorrect);
  }

  AttendParams params;
  params.shape = shape;
  params.tasks = tasks_.data();
  params.num_tasks = std::ssize(tasks_);
  params.scale = scale_;
  rows_read_.resize(tasks_.size());
  params.rows_read = rows_read_.data();
  const size_t query_heads = tasks_.size() * static_cast<size_t>(shape.group_size());
  if (wants_mass()) {
    log_sum_exp_.resize(query_heads);
    params.log_sum_exp = log_sum_exp_.data();
  }
  if (wants_entropy()) {
    min_entropy_.resize(query_heads);
    params.min_entropy = min_entropy_.data();
  }
  const bool guard = system_.guard_host_rows && system_.store != nullptr;
  if (guard) system_.store->set_accessible(false);
  system_.ops->attend(params);
  if (guard) system_.store->set_accessible(true);

  for (size_t t = 0; t < tasks_.size(); ++t) {
    KvCounters& counters = batch_[t / static_cast<size_t>(shape.num_kv_heads)]->counters(layer);
    counters.rows_attended += rows_read_[t];
    if (shape.compressed()) {
      const HeadCacheView& head = *tasks_[t].head;
      counters.full_rows_attended +=
          std::min<int64_t>(tasks_[t].context_tokens, head.sink_tokens + head.ring_tokens);
    }
    counters.rows_in_context += tasks_[t].context_tokens;
  }
  if (params.min_entropy != nullptr) note_entropy(layer);
  if (params.log_sum_exp != nullptr) sample_mass(layer);
  if (system_.measure_mass) {
    measure_mass(layer);
    measure_queries(layer, queries, query_stride);
  }

  for (size_t s = 0; s < batch_.size(); ++s) {
    std::copy_n(queries + static_cast<int64_t>(s) * query_stride, width,
                batch_[s]->last_query(layer).begin());
    batch_[s]->has_last_query = true;
  }
}

void Attention::refresh(int32_t layer, Cause cause) {
  const auto group = static_cast<size_t>(system_.shape.group_size());
  misses_.clear();
  if (cause == Cause::kPrime) {
    misses_ = candidates_;
    select_and_fetch(layer, cause);
    return;
  }
  decided_.clear();
  for (const Candidate& candidate : candidates_) decided_.push_back(candidate.task);
  cosine_.resize(decided_.size() * group);
  system_.ops->cosine({system_.shape, decided_.data(), cosine_.data(), std::ssize(decided_)});

  for (size_t i = 0; i < candidates_.size(); ++i) {
    SequenceKv& sequence = *candidates_[i].sequence;
    const HeadTask& task = candidates_[i].task;
    const HeadState& state = *task.head->state;
    KvCounters& counters = sequence.counters(layer);
    const int64_t ring_begin = task.context_tokens - task.head->ring_tokens;
    const int64_t chosen_from = candidates(sequence.policy(), state.label_length).size();
    const int64_t wanted = std::min(set_size(sequence.policy(), task.context_tokens),
                                    candidates(sequence.policy(), task.context_tokens).size());
    const double ahead = cause == Cause::kForesee ? prefetch_margin(sequence.policy()) : 0;
    const double margin = 1 - (1 - ahead) * sequence.dial_angle();
    Decision decision =
        decide(sequence.policy(),
               {state.has_label != 0, state.label_length, state.candidates_end,
                state.num_set_tokens >= chosen_from,
                sequence.sampler() != nullptr && 4 * state.num_set_tokens < 3 * wanted},
               task.context_tokens, covers(sequence.policy(), task.context_tokens), ring_begin,
               std::span(cosine_).subspan(i * group, group),
               sequence.importance(layer, task.kv_head), margin);
    if (decision == Decision::kHit && refused(sequence, task, margin)) decision = Decision::kMiss;
    if (decision != Decision::kHit) misses_.push_back(candidates_[i]);
    if (task.head->is_resident()) {
      counters.resident_selections += decision != Decision::kHit;
      continue;
    }
    if (cause == Cause::kCorrect) {
      counters.corrections += decision != Decision::kHit;
      continue;
    }
    switch (decision) {
      case Decision::kHit:
        ++counters.hits;
        counters.rows_saved_by_hits += state.num_set_tokens;
        break;
      case Decision::kMiss:
        ++counters.misses;
        break;
      case Decision::kAged:
        ++counters.aged;
        break;
      case Decision::kIncomplete:
        ++counters.incomplete;
        break;
    }
  }
  if (!misses_.empty()) select_and_fetch(layer, cause);
}

void Attention::select_and_fetch(int32_t layer, Cause cause) {
  const KvShape& shape = system_.shape;
  const HashParams* hashes = system_.layer_hashes(layer);

  select_tasks_.clear();
  size_t total = 0;
  for (const Candidate& miss : misses_) {
    const PolicyOptions& policy = miss.sequence->policy();
    const CandidateRange range = candidates(policy, miss.task.context_tokens);
    SelectTask task;
    task.head = miss.task;
    task.hash = hashes == nullptr ? nullptr : hashes + miss.task.kv_head;
    task.kind = policy.select == Select::kExact    ? SelectKind::kExact
                : policy.select == Select::kRandom ? SelectKind::kRandom
                                                   : SelectKind::kHash;
    task.random_seed =
        miss.sequence->random_seed() ^ (static_cast<uint64_t>(miss.task.context_tokens) << 20) ^
        (static_cast<uint64_t>(layer) << 8) ^ static_cast<uint64_t>(miss.task.kv_head);
    task.first_candidate = range.first;
    task.end_candidate = range.end;
    task.num_select =
        static_cast<int32_t>(std::min({set_size(policy, miss.task.context_tokens), range.size(),
                                       int64_t{miss.task.head->slot_capacity}}));
    total += static_cast<size_t>(task.num_select);
    select_tasks_.push_back(task);
    if (task.kind == SelectKind::kExact) {
      miss.sequence->counters(layer).oracle_rows += range.size();
    }
  }
  selected_.resize(total);
  size_t at = 0;
  for (SelectTask& task : select_tasks_) {
    task.tokens = selected_.data() + at;
    at += static_cast<size_t>(task.num_select);
  }
  system_.ops->select({shape, select_tasks_.data(), std::ssize(select_tasks_), scale_});

  const int64_t stored_bytes = shape.stored_row_bytes();
  moves_.clear();
  differences_.resize(std::max(differences_.size(), misses_.size()));
  for (size_t i = 0; i < misses_.size(); ++i) {
    const HeadTask& task = misses_[i].task;
    const HeadCacheView& head = *task.head;
    const std::span<const int32_t> set(select_tasks_[i].tokens,
                                       static_cast<size_t>(select_tasks_[i].num_select));
    if (head.is_resident()) continue;
    SetDifference& difference = differences_[i];
    const bool whole = misses_[i].sequence->policy().fetch == Fetch::kWhole;
    if (whole) {
      find_whole(set, difference);
    } else {
      find_difference(head, set, difference);
    }
    for (const SlotFill& fill : difference.fills) {
      moves_.push_back(
          {task.sequence->host_rows[fill.token / kPageTokens] +
               (int64_t{task.kv_head} * kPageTokens + fill.token % kPageTokens) * stored_bytes,
           head.slots + int64_t{fill.slot} * stored_bytes});
    }
    KvCounters& counters = misses_[i].sequence->counters(layer);
    const int64_t fetched = std::ssize(difference.fills);
    if (cause == Cause::kPrime) {
      counters.rows_primed += fetched;
    } else {
      counters.rows_requested += std::ssize(set);
      counters.rows_fetched += fetched;
      counters.rows_saved_by_delta += std::ssize(set) - fetched;
    }
  }
  const auto start = std::chrono::steady_clock::now();
  system_.transfer.fetch(moves_, stored_bytes);
  if (cause != Cause::kPrime && !moves_.empty()) {
    // Every head of the batch waits for all of it.
    const std::chrono::nanoseconds waited = std::chrono::steady_clock::now() - start;
    for (size_t i = 0; i < misses_.size(); ++i) {
      const bool counted = i > 0 && misses_[i].sequence == misses_[i - 1].sequence;
      if (!counted) misses_[i].sequence->counters(layer).wait_ns += waited.count();
    }
  }

  // The old rows of these heads were read by the last step's attention; the new ones are read by
  // the attention that follows. Nothing in between may see a half-changed head.
  for (size_t i = 0; i < misses_.size(); ++i) {
    const HeadTask& task = misses_[i].task;
    const std::span<const int32_t> set(select_tasks_[i].tokens,
                                       static_cast<size_t>(select_tasks_[i].num_select));
    if (task.head->is_resident()) {
      commit_resident(*task.head, set);
    } else if (misses_[i].sequence->policy().fetch == Fetch::kWhole) {
      commit_whole(*task.head, set);
    } else {
      commit_difference(*task.head, set, differences_[i]);
    }
    set_label(shape, *task.head, task.query, task.context_tokens, select_tasks_[i].end_candidate);
  }
}

bool Attention::wants_mass() const {
  return system_.measure_mass ||
         std::any_of(batch_.begin(), batch_.end(),
                     [](SequenceKv* sequence) { return sequence->sampler() != nullptr; });
}

bool Attention::wants_entropy() const {
  return std::any_of(batch_.begin(), batch_.end(), [](const SequenceKv* sequence) {
    return sequence->policy().hit_test == HitTest::kEntropy;
  });
}

bool Attention::refused(SequenceKv& sequence, const HeadTask& task, double margin) {
  const PolicyOptions& policy = sequence.policy();
  if (policy.hit_test == HitTest::kCosine) return false;
  const SequenceKv::HeadMemory& memory = sequence.memory(task.layer, task.kv_head);
  const auto group = static_cast<size_t>(system_.shape.group_size());
  const auto dim = static_cast<size_t>(system_.shape.head_dim);
  std::vector<float> moved(group);
  for (size_t g = 0; g < group; ++g) {
    moved[g] = policy.hit_test == HitTest::kEntropy
                   ? memory.entropy[g] - memory.entropy_at_label[g]
                   : score_drift({task.query + g * dim, dim}, {task.head->label + g * dim, dim},
                                 memory.key_spread, scale_);
  }
  // Not known yet, right after the prompt: no reason to refuse.
  const double mean = group_mean(policy, moved, sequence.importance(task.layer, task.kv_head));
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
  const int64_t context = decided_.front().context_tokens;
  const int64_t count = std::min(kTokens, context);
  sampled_tokens_.clear();
  for (int64_t i = 0; i < count; ++i) {
    sampled_tokens_.push_back(static_cast<int32_t>(i * context / count));
  }
  std::vector<float> spread(decided_.size());
  system_.ops->key_spread({system_.shape, decided_.data(), std::ssize(decided_),
                           sampled_tokens_.data(), count, spread.data()});
  for (size_t i = 0; i < decided_.size(); ++i) {
    candidates_[i].sequence->memory(layer, decided_[i].kv_head).key_spread = spread[i];
  }
}

double Attention::kept_mass(SequenceKv& sequence, const HeadTask& task, int64_t rows_read,
                            std::span<const float> log_sum_exp, int32_t num_rows) {
  const auto group = log_sum_exp.size();
  const int64_t outside = task.context_tokens - rows_read;
  if (outside == 0) return 1;
  full_log_sum_exp_.resize(group);
  FullScoreParams params{system_.shape, &task, 1, scale_, full_log_sum_exp_.data(), nullptr, 0};
  double weight = 1;  // of a row outside: how many it stands for
  const bool whole = task.head->is_resident();
  if (!whole) {
    sequence.sampler()->draw_rows(*task.head, task.context_tokens, outside, num_rows,
                                  sampled_tokens_);
    params.tokens = sampled_tokens_.data();
    params.num_tokens = std::ssize(sampled_tokens_);
    weight = static_cast<double>(outside) / static_cast<double>(params.num_tokens);
  }
  system_.ops->full_scores(params);
  double sum = 0;
  for (size_t g = 0; g < group; ++g) {
    const double over =
        std::exp(static_cast<double>(full_log_sum_exp_[g]) - static_cast<double>(log_sum_exp[g]));
    sum += whole ? std::min(1.0, 1 / over) : 1 / (1 + weight * over);
  }
  return sum / static_cast<double>(group);
}

void Attention::sample_mass(int32_t layer) {
  const auto heads = static_cast<size_t>(system_.shape.num_kv_heads);
  const auto group = static_cast<size_t>(system_.shape.group_size());
  for (size_t t = 0; t < tasks_.size(); ++t) {
    SequenceKv& sequence = *batch_[t / heads];
    const HeadTask& task = tasks_[t];
    if (sequence.sampler() == nullptr || task.attend_all) continue;
    const int64_t head = int64_t{layer} * system_.shape.num_kv_heads + task.kv_head;
    if (!sequence.sampler()->is_looked_at(head)) continue;
    const double kept =
        kept_mass(sequence, task, rows_read_[t], std::span(log_sum_exp_).subspan(t * group, group),
                  MassSampler::kRows);
    sequence.sampler()->dial().add(kept, task.head->state->label_length == task.context_tokens);
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
    SequenceKv& sequence = *candidates_[i].sequence;
    sequence.sampler()->dial().add_first(
        kept_mass(sequence, decided_[i], rows_read_[i],
                  std::span(log_sum_exp_).subspan(i * group, group), MassSampler::kFirstRows));
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
      double dot = 0, now_square = 0, last_square = 0;
      for (int64_t d = first; d < first + shape.head_dim; ++d) {
        dot += double{now[d]} * last[d];
        now_square += double{now[d]} * now[d];
        last_square += double{last[d]} * last[d];
      }
      const double cosine = dot / std::sqrt(now_square * last_square);
      if (!std::isfinite(cosine)) continue;
      counters.query_cosine += cosine;
      ++counters.query_cosine_samples;
    }
  }
}

void Attention::end() {
  for (SequenceKv* sequence : batch_) {
    sequence->advance(tokens_per_sequence_);
    if (sequence->sampler() != nullptr && (!prefill_ || prime_)) sequence->follow_dial();
  }
}

}  // namespace clo
