#include "attention/attention.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>

#include "base/check.h"
#include "select/set_rule.h"
#include "tensor/dtype.h"

namespace clo {

Attention::Attention(KvSystem& system, float scale) : system_(system), scale_(scale) {}

void Attention::begin_decode(std::span<SequenceKv* const> batch) {
  batch_.assign(batch.begin(), batch.end());
  tokens_per_sequence_ = 1;
  prefill_ = prime_ = false;
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
  if (prefill_ && system_.observer != nullptr) {
    const int64_t width = int64_t{system_.shape.num_kv_heads} * system_.shape.head_dim;
    const int64_t row_bytes = width * dtype_bytes(system_.shape.type);
    observed_keys_.resize(static_cast<size_t>(tokens_per_sequence_ * row_bytes));
    for (int64_t t = 0; t < tokens_per_sequence_; ++t) {
      convert_from_f32(system_.shape.type, keys + t * row_stride,
                       observed_keys_.data() + t * row_bytes, width);
    }
  }
}

void Attention::show_prefill(int32_t layer, const float* queries, int64_t query_stride) {
  const KvShape& shape = system_.shape;
  const int64_t key_bytes = shape.head_dim * dtype_bytes(shape.type);
  PrefillRows rows;
  rows.first_token = batch_[0]->num_tokens();
  rows.num_tokens = tokens_per_sequence_;
  rows.keys = observed_keys_.data();
  rows.key_head_bytes = key_bytes;
  rows.key_token_bytes = shape.num_kv_heads * key_bytes;
  rows.queries = reinterpret_cast<const std::byte*>(queries);
  rows.query_token_bytes = query_stride * static_cast<int64_t>(sizeof(float));
  system_.observer->on_prefill(shape, layer, rows);
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
                    (sequence.is_dense_layer(layer) || sequence.covers(context_tokens));
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
  if (system_.observer != nullptr) show_prefill(layer, queries, query_stride);
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
  if (sequence.can_settle_residents()) note_difficulty(layer, queries, query_stride);
  if (sequence.policy().hit_test == HitTest::kDrift) note_spread(layer);
  if (sequence.dial() != nullptr) sample_first_sets();
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
    SequenceKv& sequence = *batch_[t / static_cast<size_t>(shape.num_kv_heads)];
    KvCounters& counters = sequence.counters(layer);
    const int64_t context = tasks_[t].context_tokens;
    counters.rows_attended += rows_read_[t];
    if (shape.compressed()) {
      const HeadCacheView& head = *tasks_[t].head;
      const int64_t sinks = std::min<int64_t>(head.sink_tokens, context);
      counters.full_rows_attended +=
          sequence.num_visible(0, sinks) +
          sequence.num_visible(std::max<int64_t>(sinks, context - head.ring_tokens), context);
    }
    counters.rows_in_context += sequence.num_visible(0, context);
  }
  if (params.min_entropy != nullptr) note_entropy(layer);
  if (params.log_sum_exp != nullptr) sample_mass();
  if (system_.measure_mass) {
    measure_mass(layer);
    measure_queries(layer, queries, query_stride);
  }
  if (system_.observer != nullptr && system_.observer->watches_decode()) {
    system_.observer->on_decode(shape, layer, tasks_);
  }
  count_watched(layer);

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
    const int64_t chosen_from = sequence.num_candidates(state.label_length);
    bool too_small = false;  // only a dial makes sets grow by more than the context does
    if (sequence.dial() != nullptr) {
      const int64_t wanted = std::min(sequence.num_set_tokens(task.context_tokens),
                                      sequence.num_candidates(task.context_tokens));
      too_small = 4 * state.num_set_tokens < 3 * wanted;
    }
    const double ahead = cause == Cause::kForesee ? prefetch_margin(sequence.policy()) : 0;
    const double margin = 1 - (1 - ahead) * sequence.dial_angle();
    Decision decision = decide(sequence.policy(),
                               {state.has_label != 0, state.label_length, state.candidates_end,
                                state.num_set_tokens >= chosen_from, too_small},
                               task.context_tokens, sequence.covers(task.context_tokens),
                               ring_begin, std::span(cosine_).subspan(i * group, group),
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
    task.kind = select_kind(policy.select);
    task.random_seed =
        miss.sequence->random_seed() ^ (static_cast<uint64_t>(miss.task.context_tokens) << 20) ^
        (static_cast<uint64_t>(layer) << 8) ^ static_cast<uint64_t>(miss.task.kv_head);
    task.first_candidate = range.first;
    task.end_candidate = range.end;
    const int64_t num_candidates = miss.sequence->num_candidates(miss.task.context_tokens);
    task.num_select =
        static_cast<int32_t>(std::min({miss.sequence->num_set_tokens(miss.task.context_tokens),
                                       num_candidates, int64_t{miss.task.head->slot_capacity}}));
    total += static_cast<size_t>(task.num_select);
    select_tasks_.push_back(task);
    if (task.kind == SelectKind::kExact) {
      miss.sequence->counters(layer).oracle_rows += num_candidates;
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

void Attention::end() {
  for (SequenceKv* sequence : batch_) {
    sequence->advance(tokens_per_sequence_);
    if (prime_ && sequence->can_settle_residents()) settle_residents(*sequence);
    if (sequence->dial() == nullptr || (prefill_ && !prime_)) continue;
    if (prime_) sequence->dial()->start();
    sequence->follow_dial();
  }
}

}  // namespace clo
