#pragma once
// Attention: the seam a model sees. For each layer of a step: append the new K and V, prefetch for
// a predicted query, attend. Behind it dense, resident-sparse and offloaded heads are one.
// Owned by the engine; used from its thread, one step at a time:
//
//   begin -> for each layer: [prefetch(layer)] append(layer) attend(layer) -> end
//
// In a decode step each sequence of the batch has one new token; in a prefill step one sequence
// has several.
#include <span>
#include <vector>

#include "attention/sequence_kv.h"
#include "kv/head_cache.h"
#include "reuse/reuse_rule.h"

namespace clo {

class Attention {
 public:
  // `scale` multiplies query-key products. `system` outlives this.
  Attention(KvSystem& system, float scale);

  void begin_decode(std::span<SequenceKv* const> batch);
  // `last`: the chunk ends the prompt, so the first sets are chosen from its last query.
  void begin_prefill(SequenceKv& sequence, int64_t num_tokens, bool last);

  // keys, values: [rows, row_stride], the first num_kv_heads * head_dim elements of each row.
  void append(int32_t layer, const float* keys, const float* values, int64_t row_stride);
  // Whether some sequence wants the queries of `layer` foreseen.
  bool wants_prediction(int32_t layer) const;
  // queries [rows, num_q_heads * head_dim], rotated, foreseen for this step.
  void prefetch(int32_t layer, const float* queries);
  // queries [rows, query_stride], rotated; out [rows, num_q_heads * head_dim].
  void attend(int32_t layer, const float* queries, int64_t query_stride, float* out);
  void end();

 private:
  // One head to decide about: which sequence, head and query.
  struct Candidate {
    SequenceKv* sequence = nullptr;
    HeadTask task;
  };
  // kForesee: by a predicted query; kDecide: by the true one; kCorrect: by the true one after all.
  enum class Cause : uint8_t { kPrime, kForesee, kDecide, kCorrect };

  // Shows an observer a layer's keys, which append() kept, and queries of a chunk.
  void show_prefill(int32_t layer, const float* queries, int64_t query_stride);
  void attend_prefill(int32_t layer, const float* queries, int64_t query_stride, float* out);
  void attend_decode(int32_t layer, const float* queries, int64_t query_stride, float* out);
  HeadTask make_task(SequenceKv& sequence, int32_t layer, int32_t kv_head, const float* query,
                     int64_t context_tokens);
  // Applies the reuse rule to candidates_ and chooses, fetches and commits the sets of misses.
  void refresh(int32_t layer, Cause cause);
  void select_and_fetch(int32_t layer, Cause cause);
  // Whether the step's attention is to say more than its result: for samples or measurements of the
  // mass, and for a hit test.
  bool wants_mass() const;
  bool wants_entropy() const;
  // A hit by the cosine that the policy's other test refuses. margin: as the cosine's threshold
  // has.
  bool refused(SequenceKv& sequence, const HeadTask& task, double margin);
  void note_entropy(int32_t layer);
  void note_spread(int32_t layer);
  void settle_residents(SequenceKv& sequence);
  void note_difficulty(int32_t layer, const float* queries, int64_t query_stride);
  void sample_mass();
  void sample_first_sets();
  double kept_mass(const HeadTask& task, int64_t rows_read, std::span<const float> log_sum_exp,
                   int32_t num_rows);
  int32_t head_index(const HeadTask& task) const;  // layer * num_kv_heads + kv_head
  void measure_mass(int32_t layer);
  void measure_queries(int32_t layer, const float* queries, int64_t query_stride);
  void count_watched(int32_t layer);

  KvSystem& system_;
  float scale_;
  std::vector<SequenceKv*> batch_;
  int64_t tokens_per_sequence_ = 1;
  bool prefill_ = false;
  bool prime_ = false;

  std::vector<SequenceLayerView> views_;  // [batch] of the layer at hand
  std::vector<int64_t> first_tokens_;     // [batch]
  std::vector<Candidate> candidates_, corrections_, misses_;
  std::vector<HeadTask> tasks_;    // all heads of the step
  std::vector<HeadTask> decided_;  // those of candidates_, side by side
  std::vector<float> cosine_, log_sum_exp_, full_log_sum_exp_, min_entropy_, unused_out_, moved_;
  std::vector<int32_t> sampled_tokens_;
  std::vector<std::byte> observed_keys_;  // [tokens, num_kv_heads * head_dim] of the shape's type
  std::vector<int64_t> rows_read_;
  std::vector<SelectTask> select_tasks_;
  std::vector<int32_t> selected_;
  std::vector<SetDifference> differences_;
  std::vector<RowMove> moves_;
};

}  // namespace clo
