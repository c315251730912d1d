#pragma once
// CudaRunner: the steps of a model on a GPU. A decode step is one captured graph per batch bucket;
// the host launches it and reads one mapped word. The next step is launched before the last one's
// token has been read, so the device never waits for the host. Prefill runs layer by layer while
// finished rows leave on a copy stream. Engine thread only.
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <unordered_map>
#include <vector>

#include "cuda/backend.h"
#include "cuda/buffers.h"
#include "cuda/slot_table.h"
#include "cuda/timeline.h"
#include "device/device_memory.h"
#include "device/stream.h"
#include "kernels/linear/matmul.h"
#include "kernels/prefill/sdpa.h"
#include "kernels/refresh/refresh.h"
#include "kernels/sample/sample.h"

namespace clo {

// What decides which kernels a decode graph holds. Everything else is in device tables.
struct GraphKey {
  int32_t rows = 0;            // bucket
  bool predict_layer = false;  // some sequence foresees the next layer's query
  bool draws = false;          // some sequence samples, or has a penalty
  kernels::MassLooks looks = kernels::MassLooks::kNone;  // the most that some sequence needs
  auto operator<=>(const GraphKey&) const = default;
};

class CudaRunner final : public Runner {
 public:
  static Result<std::unique_ptr<CudaRunner>> create(const Weights& weights, KvSystem& system,
                                                    Arena& arena, const CudaLimits& limits,
                                                    std::string description);
  ~CudaRunner() override;

  std::string description() const override {
    return description_ + ", prefill attention: " + attention_kernel_;
  }
  void begin(SequenceKv& sequence, const SamplingOptions& sampling) override;
  void end(SequenceKv& sequence) override;
  void read_counters(SequenceKv& sequence) override;
  void pause() override { stop_refreshes(); }
  int64_t settle(const SequenceKv& sequence) override;
  void heads_changed(SequenceKv& sequence) override { slots_->upload_heads(sequence); }
  std::span<const float> prefill(std::span<const int32_t> ids, SequenceKv& sequence, bool last,
                                 const std::function<bool(int32_t)>& proceed,
                                 bool* abandoned) override;
  void decode(std::span<const DecodeRow> rows, std::span<DecodeOutcome> outcomes) override;

  // Measurement.
  void force_reuse(const ForcedReuse& forced) { forced_ = forced; }
  // Prefills note into it what ran when; null: none do. Outlives them.
  void record_timeline(Timeline* timeline) { timeline_ = timeline; }
  SlotTable::Times times() const { return slots_->times(); }
  const Stream& stream() const { return main_; }
  const SlotTable& slots() const { return *slots_; }
  const StepBuffers& buffers() const { return buffers_; }
  size_t graph_nodes() const { return last_nodes_; }
  std::string attention_kernel() const { return attention_kernel_; }
  const CudaLimits& limits() const { return limits_; }
  // One kind of kernel of a step, in all its layers, and the bytes it must move.
  struct StageWork {
    std::string name;
    double bytes = 0;
    std::function<void()> record;
  };
  std::vector<StageWork> stage_work(int32_t rows);
  // Makes slots known to the kernels without a decode step.
  void activate_all(std::span<const std::unique_ptr<SequenceKv>> batch);
  // Seconds until every head of every row has fetched its set through the refresh queue, with or
  // without products running beside it. Requires: sequences that foresee the next layer's query.
  double time_fetch(int32_t rows, bool products);
  // Waits until nothing launched is left.
  void synchronize();

 private:
  // A launched step whose tokens have not been read.
  struct Launched {
    uint32_t step = 0;
    std::vector<SequenceKv*> rows;
    bool logits_wanted = false;  // nothing else has written the logits since
  };
  static constexpr size_t kMaxLaunched = 2;

  friend class StepRecorder;

  CudaRunner(const Weights& weights, KvSystem& system, const CudaLimits& limits,
             std::string description);
  Status build(Arena& arena);
  void upload_constants();

  // step_graph.cpp
  GraphKey key_of(std::span<SequenceKv* const> rows) const;
  const GraphExec& graph(const GraphKey& key);
  void record_step(const GraphKey& key);
  // The library chooses its algorithms outside a capture.
  void prepare_products(int32_t rows);
  // chunk.cpp
  void chunk_layer(SequenceKv& sequence, int32_t layer, int64_t rows, bool last);
  void load_earlier_rows(SequenceKv& sequence, int32_t layer);
  void chunk_attention(int32_t layer, int64_t first, int64_t rows);
  void mlp_rows(int32_t layer, int64_t rows);
  // For an observer: a layer's rows and queries of the chunk to the host, after what computes them;
  // and, once they are there, to the observer.
  void copy_observed(int32_t layer, int64_t first, int64_t rows);
  void show_observed(int32_t layer, int64_t first, int64_t rows);
  // Of the last row of a prompt's last chunk: [num_q_heads * head_dim], until the next one's.
  float* last_query(int32_t layer) {
    return buffers_.chunk_query +
           int64_t{layer} * system_.shape.num_q_heads * system_.shape.head_dim;
  }
  kernels::PrimeSets prime_params(const SequenceKv& sequence, int32_t layer,
                                  int64_t context_tokens);
  // rows: of the prompt's last chunk.
  static bool settles_residents(const SequenceKv& sequence, int64_t rows);
  void settle_residents(SequenceKv& sequence, int64_t rows);
  int64_t first_set_rows(SequenceKv& sequence, int32_t layer, int32_t kv_head) const;
  template <typename Launch>
  void timed(const Stream& stream, const char* lane, const char* work, int32_t layer,
             const Launch& launch) {
    if (timeline_ == nullptr) return launch();
    timeline_->record(stream, lane, work, layer, launch);
  }
  // The matrix in plain elements: itself, or a copy in `scratch` made by the main stream.
  WeightView expanded(const WeightView& weight, void* scratch);
  // out = x weight^T + bias (both of the weights' type), and f32 out += x weight^T + bias (f32).
  void multiply(const WeightView& weight, const void* bias, const void* x, int64_t rows, void* out);
  void multiply_add(const WeightView& weight, const float* bias, const void* x, int64_t rows,
                    float* out);
  static const void* library_bias(const void* biases, const WeightView& weight, int32_t layer);

  void launch(std::span<SequenceKv* const> rows, bool logits_wanted);
  // Blocks: until that step has finished. Fails: as CLO_CUDA, and for a fault the device reports.
  void wait(uint32_t step);
  void count_jobs();
  void check_fault();
  // The kernel that serves refreshes lives beside the steps, from the first that may need it until
  // something needs its scratch, its multiprocessors or its counts.
  void start_refreshes();
  kernels::RefreshQueueParams refresh_params(bool drain) const;
  void stop_refreshes();
  void drain_queue();
  bool in_flight(const SequenceKv& sequence) const;
  // Gives what step `step` has sampled of row `row` to the sequence's dial, which may turn.
  void follow_dial(SequenceKv& sequence, uint32_t step, std::ptrdiff_t row);
  // Tells the device what a dial has turned to, once the sequence has come to its time.
  void turn_dial(SequenceKv& sequence);
  // The context of the sequence's next step, those launched included.
  int64_t next_context(const SequenceKv& sequence) const;
  // For the hit test by drift: into the head rules, on the main stream. Requires: rows are written.
  void find_key_spread(const SequenceKv& sequence, int64_t context_tokens);

  const Weights& weights_;
  KvSystem& system_;
  CudaLimits limits_;
  std::string description_;
  std::string attention_kernel_;
  DeviceNumbers device_;
  StepBuffers buffers_;
  kernels::DecodeTables tables_;
  ForcedReuse forced_;
  Timeline* timeline_ = nullptr;

  Stream main_;      // decode and prefill compute
  Stream refresh_;   // refreshes beside the steps: higher priority
  Stream copy_out_;  // finished rows to the host
  Stream copy_in_;   // earlier rows back from the host
  Event refresh_after_, refresh_ended_;
  bool refreshing_ = false;
  int32_t running_clusters_ = 0;
  // Jobs of refreshing a step has had of late.
  double jobs_a_step_ = 0;
  bool many_jobs_ = false;
  uint32_t counted_step_ = 0, counted_jobs_ = 0;
  Event computed_[kLayerBuffers], stored_[kLayerBuffers], loaded_[kLayerBuffers];
  std::vector<Event> layer_done_;

  std::unique_ptr<SlotTable> slots_;
  std::unique_ptr<kernels::Matmul> matmul_;
  std::unique_ptr<kernels::Sdpa> sdpa_;
  std::map<GraphKey, GraphExec> graphs_;
  size_t last_nodes_ = 0;

  PinnedBlock results_;        // [kResultRing][max_batch] StepResult
  PinnedBlock samples_;        // [kResultRing][max_batch][kMassLooks] MassSample
  PinnedBlock first_samples_;  // [num_layers][num_kv_heads] of the prompt that has just ended
  PinnedBlock difficulty_;     // [num_layers][num_kv_heads] misses of its last queries
  PinnedBlock words_;          // [0] step word, [1] fault word
  PinnedBlock row_staging_;    // [kRowRing][max_batch] row -> slot
  PinnedBlock host_logits_;    // [max_batch, vocab]
  PinnedBlock host_ids_;       // [chunk rows]
  // With an observer, of a layer's chunk: [kv heads][rows] full rows, then [rows, q width] queries.
  PinnedBlock observed_[kLayerBuffers];
  std::deque<Launched> launched_;
  std::vector<SequenceKv*> rows_;  // of the last launched step: what row_slot says
  uint32_t next_row_staging_ = 0;
  uint32_t step_ = 0;
  double step_seconds_ = 0;  // smoothed, so that a wait sleeps through most of a step
  std::map<const SequenceKv*, int64_t> decoded_rows_;  // since counters were last read
  // Dials that have turned: the context from which decisions follow. Always as many steps after the
  // samples, so that an answer does not depend on how far ahead the steps were launched.
  std::unordered_map<const SequenceKv*, int64_t> turned_;
};

}  // namespace clo
