#pragma once
// What decode attention attends to, from step to step: how far a head's set is that of the step
// before, and in how many places its weight lies. Sees decode steps through the engine's observer.
#include <cstdint>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "attention/attention_observer.h"

namespace clo {

// Sums over decode steps and heads.
struct SetFigures {
  // Jaccard overlap of a KV head's set with its set of the step before; of heads that choose one.
  double overlap_sum = 0;
  int64_t overlaps = 0;
  // Modes of a query head's attention.
  double modes_sum = 0;
  int64_t modes = 0;

  double mean_overlap() const {
    return overlaps == 0 ? 0 : overlap_sum / static_cast<double>(overlaps);
  }
  double mean_modes() const { return modes == 0 ? 0 : modes_sum / static_cast<double>(modes); }
};

// |a and b| / |a or b|; 1 for two empty sets. Both ascending, without repeats.
double jaccard(std::span<const int32_t> a, std::span<const int32_t> b);

// A token and its share of a query head's attention.
struct TokenWeight {
  int64_t token = 0;
  double weight = 0;
};
// Maximal runs of heavy blocks, as a profile counts them (profile/head_attention.h); a token that
// is not listed weighs nothing. tokens: ascending.
int64_t count_modes(std::span<const TokenWeight> tokens);

// Requires: an engine that runs one request at a time, on the CPU backend.
class SetWatcher final : public AttentionObserver {
 public:
  // A request begins: its first step has none before it.
  void begin() { last_.clear(); }
  // What was seen since the last take().
  SetFigures take() { return std::exchange(figures_, {}); }

  bool watches_decode() const override { return true; }
  void on_prefill(const KvShape&, int32_t, const PrefillRows&) override {}
  void on_decode(const KvShape& shape, int32_t layer, std::span<const HeadTask> tasks) override;

 private:
  struct Row {
    int64_t token = 0;
    const std::byte* bytes = nullptr;
    bool full = false;  // or stored
  };
  void list_rows(const KvShape& shape, const HeadTask& task);  // into rows_, ascending
  void compare_sets(const HeadTask& task);
  void add_modes(const KvShape& shape, const HeadTask& task);

  SetFigures figures_;
  std::map<std::pair<int32_t, int32_t>, std::vector<int32_t>> last_;  // (layer, KV head) -> set
  std::vector<Row> rows_;
  std::vector<double> scores_;  // [group_size, rows]
  std::vector<float> key_, value_;
  std::vector<TokenWeight> weights_;
};

}  // namespace clo
