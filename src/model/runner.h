#pragma once
// Runner: the steps of a model on one backend, as the engine sees them. Behind it the CPU backend
// runs layer by layer through Ops (transformer.h) and the CUDA backend replays a captured graph
// (cuda/). Engine thread only.
//
// A sequence's life here: begin -> prefill chunks -> any number of decode steps -> end. Between
// begin and end the runner may have work of the sequence in flight; end waits for it, so what the
// sequence holds may be freed afterwards.
#include <cstdint>
#include <functional>
#include <span>
#include <string>

#include "attention/sequence_kv.h"
#include "clo/engine.h"

namespace clo {

// One sequence in a decode step.
struct DecodeRow {
  SequenceKv* sequence = nullptr;
  int32_t token = 0;         // the sequence's latest token, to be fed
  bool need_logits = false;  // the caller samples or forces: the step runs alone and returns logits
};

struct DecodeOutcome {
  enum class Kind : uint8_t {
    kNotYet,  // the step that has finished did not serve this sequence; ask again
    kLogits,  // [vocab_size] logits of the next token, valid until the next call
    kToken,   // the next token, sampled by the runner
  };
  Kind kind = Kind::kNotYet;
  std::span<const float> logits;
  int32_t token = 0;
  bool finite = true;  // kToken: false when a logit was not finite
};

class Runner {
 public:
  virtual ~Runner() = default;

  // One line for reports.
  virtual std::string description() const = 0;

  // `sampling` is what decode() follows when it samples.
  virtual void begin(SequenceKv& sequence, const SamplingOptions& sampling) = 0;
  // Blocks: until nothing launched for the sequence is left.
  virtual void end(SequenceKv& sequence) = 0;
  // No step follows soon: what runs beside the steps ends. The next step starts it again.
  virtual void pause() {}
  // Before a sequence's head caches change behind the runner's back: waits until nothing launched
  // uses any. Returns how many of its rows are written: num_tokens(), and one more for each step
  // that was launched ahead of it.
  virtual int64_t settle(const SequenceKv& sequence) { return sequence.num_tokens(); }
  // Afterwards: this sequence's have changed.
  virtual void heads_changed(SequenceKv&) {}
  // Brings the sequence's counters up to date.
  virtual void read_counters(SequenceKv& sequence) = 0;

  // Prefill of the next `ids` of one sequence. With `last`, the first sets are primed and the
  // logits of the last token [vocab_size] are returned; otherwise the result is empty.
  // `proceed(layers)` is asked between layers with the number of layers done; when it says no, the
  // step is abandoned, nothing counts as appended and *abandoned is set.
  virtual std::span<const float> prefill(std::span<const int32_t> ids, SequenceKv& sequence,
                                         bool last, const std::function<bool(int32_t)>& proceed,
                                         bool* abandoned) = 0;

  // One decode step; outcomes [rows.size()]. A backend may have the next step launched when it
  // returns: a sequence that leaves then costs one token that nobody sees.
  virtual void decode(std::span<const DecodeRow> rows, std::span<DecodeOutcome> outcomes) = 0;
};

}  // namespace clo
