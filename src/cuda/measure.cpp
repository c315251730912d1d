#include "cuda/measure.h"

#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <numeric>

#include "base/check.h"
#include "base/try.h"
#include "base/units.h"
#include "cuda/runner.h"
#include "device/device_facts.h"
#include "kernels/attend/attend.h"
#include "kernels/measure/measure.h"
#include "kernels/norm/norm.h"
#include "kernels/refresh/refresh.h"
#include "kernels/rows/rows.h"
#include "select/hash_signs.h"
#include "select/set_rule.h"

namespace clo {

namespace {

using SteadyClock = std::chrono::steady_clock;

constexpr uint64_t kSeed = 0x434C4F6D65617375;
constexpr int64_t kProbeBytes = int64_t{4} << 30;
constexpr int64_t kLinkProbeBytes = int64_t{256} << 20;
constexpr int kProbeRepeats = 7;

double seconds_since(SteadyClock::time_point start) {
  return std::chrono::duration<double>(SteadyClock::now() - start).count();
}

double process_cpu_seconds() {
  rusage use{};
  getrusage(RUSAGE_SELF, &use);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_usec) * 1e-6;
  };
  return seconds(use.ru_utime) + seconds(use.ru_stime);
}

double percentile(std::vector<double> values, double share) {
  std::sort(values.begin(), values.end());
  return values[static_cast<size_t>(share * static_cast<double>(values.size() - 1))];
}

// Median seconds of `work` by device events.
double timed(const Stream& stream, int repeats, const std::function<void()>& work) {
  std::vector<double> seconds;
  work();
  for (int i = 0; i < repeats; ++i) {
    Event start(true), stop(true);
    start.record(stream);
    work();
    stop.record(stream);
    stop.synchronize();
    seconds.push_back(static_cast<double>(stop.elapsed_ms(start)) * 1e-3);
  }
  return percentile(seconds, 0.5);
}

class Measure final : public CudaMeasure {
 public:
  explicit Measure(const MeasureOptions& options) : options_(options) {}

  Status build();
  ~Measure() override { end_batch(); }

  std::string description() const override { return backend_->description(); }
  double pin_seconds() const override { return backend_->pin_seconds(); }
  Ceilings ceilings() override;
  Status fill(const PolicyOptions& policy, int32_t batch, int64_t context_tokens) override;
  StepFigures steps(const ForcedReuse& forced, int64_t warm_up, int64_t steps) override;
  std::vector<StageFigures> stages() override;
  FetchFigures fetch(double share) override;
  Result<PrefillFigures> prefill(int64_t tokens, bool with_timeline) override;

 private:
  void end_batch();
  void fill_rows(SequenceKv& sequence, int64_t tokens, uint64_t seed);
  // Seconds of one prefill of a fresh sequence. Fails: the memory codes.
  Result<double> time_prefill(std::span<const int32_t> ids, bool offload, Timeline* timeline);
  // Bytes a second at which a share of each head's rows can be read from the store.
  double gather_rate(double share);

  MeasureOptions options_;
  std::unique_ptr<CudaBackend> backend_;
  KvShape shape_;
  std::unique_ptr<HostStore> store_;
  std::unique_ptr<CodeCache> codes_;
  std::unique_ptr<HashSigns> signs_;
  std::unique_ptr<KvSystem> system_;
  std::unique_ptr<Weights> weights_;
  std::unique_ptr<Runner> owner_;
  CudaRunner* runner_ = nullptr;
  std::vector<std::unique_ptr<SequenceKv>> batch_;
};

Status Measure::build() {
  const ModelConfig& c = options_.config;
  shape_.num_layers = static_cast<int32_t>(c.num_layers);
  shape_.num_q_heads = static_cast<int32_t>(c.num_q_heads);
  shape_.num_kv_heads = static_cast<int32_t>(c.num_kv_heads);
  shape_.head_dim = static_cast<int32_t>(c.head_dim);
  shape_.type = c.dtype == DType::kF16 ? DType::kF16 : DType::kBF16;
  shape_.code_bits = options_.code_bits;
  shape_.stored = options_.stored_rows;
  CLO_TRY(CudaBackend::supports(shape_));
  CLO_ASSIGN(backend_, CudaBackend::create(options_.host_threads));
  const int64_t capacity = options_.context_tokens + options_.room_tokens;
  int64_t host_bytes = options_.host_memory_bytes;
  if (host_bytes == 0) {
    host_bytes =
        options_.batch * divide_up(capacity, kPageTokens) * HostLayout{shape_, 1}.page_bytes();
  }
  CLO_ASSIGN(HostStore store, HostStore::create(shape_, host_bytes));
  store_ = std::make_unique<HostStore>(std::move(store));
  CLO_TRY(backend_->pin(*store_));
  int64_t budget = options_.device_memory_bytes;
  if (budget == 0) budget = backend_->free_bytes() / 100 * 97 + backend_->overhead_bytes();
  CLO_TRY(backend_->take_arena(budget));
  TransferEngine& transfer = backend_->transfer();
  codes_ = std::make_unique<CodeCache>(
      *store_, backend_->arena(), [&transfer](void* target, const void* source, size_t num_bytes) {
        transfer.upload(static_cast<std::byte*>(target), source, static_cast<int64_t>(num_bytes));
      });
  system_ = std::make_unique<KvSystem>(KvSystem{shape_,
                                                nullptr,
                                                transfer,
                                                backend_->arena(),
                                                store_.get(),
                                                codes_.get(),
                                                {},
                                                {},
                                                {},
                                                false,
                                                false,
                                                true});
  if (shape_.code_bits > 0) {
    signs_ = std::make_unique<HashSigns>(shape_, kHashSeed);
    for (int32_t layer = 0; layer < shape_.num_layers; ++layer) {
      for (int32_t head = 0; head < shape_.num_kv_heads; ++head) {
        system_->hashes.push_back(signs_->params(layer, head));
      }
    }
  }
  uint64_t seed = kSeed;
  Weights::Fill fill;
  fill.matrix = [&](std::byte* target, const WeightView& m) {
    // Variance is kept through the layers.
    const float deviation = 1 / std::sqrt(static_cast<float>(m.num_cols));
    if (m.tiled) {
      kernels::fill_random_tiles(m.blocks, target, matrix_bytes(m), deviation, seed++, nullptr);
    } else {
      kernels::fill_random(m.type, target, m.num_rows * m.num_cols, deviation, seed++, nullptr);
    }
  };
  fill.vector = [](float* target, int64_t length) {
    kernels::fill_constant_f32(target, length, 1.0f, nullptr);
  };
  CLO_ASSIGN(const WeightPlan plan, plan_weights(c, options_.weights, shape_.type, true));
  CLO_ASSIGN(Weights weights, Weights::make(c, plan, backend_->arena(), fill));
  CLO_CUDA(cudaDeviceSynchronize());
  weights_ = std::make_unique<Weights>(std::move(weights));
  CudaLimits limits;
  limits.max_batch = options_.batch;
  limits.tiled_weights = plan.tiled;
  limits.chunk_rows = options_.chunk_rows;
  limits.queue_clusters = options_.queue_clusters;
  limits.fetch_warps = options_.fetch_warps;
  limits.score_nap_ns = options_.score_nap_ns;
  limits.max_context_tokens = capacity;
  // Decode measurements lay rows into the store piece by piece and need no whole layer.
  limits.layer_tokens = options_.chunk_rows < options_.context_tokens
                            ? std::min<int64_t>(capacity, int64_t{1} << 15)
                            : capacity;
  CLO_ASSIGN(owner_, backend_->make_runner(*weights_, *system_, limits));
  runner_ = static_cast<CudaRunner*>(owner_.get());
  return Ok{};
}

Ceilings Measure::ceilings() {
  Ceilings ceilings;
  // The weights are memory that is there anyway: read as much of them as the probe wants.
  const std::byte* const source = weights_->layers().front().qkv.data;
  const int64_t num_bytes = std::min(kProbeBytes, weights_->bytes() / 2) / 16 * 16;
  auto* const sink = reinterpret_cast<uint32_t*>(runner_->buffers().parts);
  ceilings.hbm_read_bytes_per_s =
      static_cast<double>(num_bytes) / timed(runner_->stream(), kProbeRepeats, [&] {
        kernels::read_once(source, num_bytes, sink, runner_->stream().get());
      });
  const int64_t link_bytes =
      std::min({kLinkProbeBytes, store_->layout().rows_bytes(),
                shape_.num_kv_heads * runner_->limits().layer_tokens * shape_.row_bytes()});
  ceilings.link_copy_bytes_per_s =
      static_cast<double>(link_bytes) / timed(runner_->stream(), kProbeRepeats, [&] {
        CLO_CUDA(cudaMemcpyAsync(runner_->buffers().layer_rows[0], store_->rows(0, 0),
                                 static_cast<size_t>(link_bytes), cudaMemcpyHostToDevice,
                                 runner_->stream().get()));
      });
  return ceilings;
}

double Measure::gather_rate(double share) {
  runner_->synchronize();
  const SequenceKv& sequence = *batch_.front();
  kernels::GatherOnce gather;
  gather.layout = store_->layout();
  gather.host_rows = store_->rows(0, 0);
  gather.pages = runner_->slots().device_pages(sequence);
  gather.context_tokens = sequence.num_tokens();
  gather.share = share;
  gather.sink = reinterpret_cast<uint32_t*>(runner_->buffers().parts);
  int64_t num_bytes = 0;
  const double seconds = timed(runner_->stream(), kProbeRepeats, [&] {
    num_bytes = kernels::gather_once(gather, runner_->stream().get());
  });
  return static_cast<double>(num_bytes) / seconds;
}

void Measure::end_batch() {
  for (auto& sequence : batch_) {
    if (sequence) runner_->end(*sequence);
  }
  batch_.clear();
}

void Measure::fill_rows(SequenceKv& sequence, int64_t tokens, uint64_t seed) {
  // As prefill does it, with random rows: layer buffer -> resident rows, sink, ring -> host pages.
  const StepBuffers& buffers = runner_->buffers();
  cudaStream_t stream = runner_->stream().get();
  const int64_t piece_tokens = runner_->limits().layer_tokens;
  kernels::fill_random(shape_.type, buffers.layer_rows[0],
                       shape_.num_kv_heads * piece_tokens * shape_.row_bytes() / 2, 1.0f, seed,
                       stream);
  uint64_t* const* const code_blocks = sequence.device_code_table().data();
  if (!sequence.device_code_table().empty()) {
    const int64_t words = kPageTokens * shape_.token_code_bytes() / 8;
    for (int64_t page = 0; page < divide_up(tokens, kPageTokens); ++page) {
      kernels::fill_random_words(code_blocks[page], words,
                                 seed ^ (static_cast<uint64_t>(page) << 32), stream);
    }
  }
  for (int32_t layer = 0; layer < shape_.num_layers; ++layer) {
    for (int64_t first = 0; first < tokens; first += piece_tokens) {
      const int64_t end = std::min(first + piece_tokens, tokens);
      // Row t of a head lies at t in a layer buffer; a piece of it starts at `first`.
      std::byte* const layer_rows = buffers.layer_rows[0] - first * shape_.row_bytes();
      kernels::StoreChunk store;
      store.shape = shape_;
      store.heads = runner_->slots().device_heads(sequence, layer);
      store.layer_rows = layer_rows;
      store.layer_capacity = piece_tokens;
      store.first_token = first;
      store.rows = end - first;
      store.end_token = tokens;
      kernels::store_chunk(store, stream);
      if (sequence.pages().empty()) continue;
      kernels::MovePages move;
      move.layout = store_->layout();
      move.host_rows = store_->rows(0, 0);
      if (shape_.code_bits > 0) move.host_codes = store_->codes(0, 0);
      move.pages = runner_->slots().device_pages(sequence);
      move.code_blocks = runner_->slots().device_code_blocks(sequence);
      move.layer_rows = layer_rows;
      move.layer_capacity = piece_tokens;
      move.first_token = first;
      move.end_token = end;
      move.layer = layer;
      kernels::move_pages(move, stream);
    }
  }
  runner_->stream().synchronize();
}

Status Measure::fill(const PolicyOptions& policy, int32_t batch, int64_t context_tokens) {
  end_batch();
  CLO_CHECK(batch <= options_.batch, batch);
  const int64_t capacity = context_tokens + options_.room_tokens;
  for (int32_t i = 0; i < batch; ++i) {
    SequenceKv::Options kv;
    kv.policy = policy;
    kv.capacity_tokens = capacity;
    kv.random_seed = kSeed + static_cast<uint64_t>(i);
    kv.host_copy = false;  // evictable heads bring one anyway
    if (policy.persistent == PolicyOptions::Persistent::kFillBudget &&
        policy.select != Select::kNone) {
      // What is left of the arena, shared by those still to come.
      const Arena& arena = backend_->arena();
      const int64_t left = (arena.budget_bytes() - arena.used_bytes()) / (batch - i);
      const int64_t none = SequenceKv::device_bytes(*system_, kv);
      kv.num_budget_heads = 1;
      const int64_t each = SequenceKv::device_bytes(*system_, kv) - none;
      const int64_t heads = int64_t{shape_.num_layers} * shape_.num_kv_heads;
      kv.num_budget_heads = each <= 0 ? heads : std::clamp<int64_t>((left - none) / each, 0, heads);
    }
    CLO_ASSIGN(auto sequence, SequenceKv::create(*system_, kv));
    runner_->begin(*sequence, {});
    fill_rows(*sequence, context_tokens, kSeed * static_cast<uint64_t>(i + 1));
    sequence->advance(context_tokens);
    sequence->has_last_query = true;
    batch_.push_back(std::move(sequence));
  }
  return Ok{};
}

StepFigures Measure::steps(const ForcedReuse& forced, int64_t warm_up, int64_t steps) {
  // Rules are part of a slot: a sequence is given another with the new ones.
  for (auto& sequence : batch_) runner_->end(*sequence);
  runner_->force_reuse(forced);
  for (auto& sequence : batch_) runner_->begin(*sequence, {});
  std::vector<DecodeRow> rows;
  for (auto& sequence : batch_) rows.push_back({sequence.get(), 1, false});
  std::vector<DecodeOutcome> outcomes(rows.size());
  const auto step = [&] {
    runner_->decode(rows, outcomes);
    for (size_t i = 0; i < rows.size(); ++i) {
      if (outcomes[i].kind == DecodeOutcome::Kind::kToken) rows[i].token = outcomes[i].token;
    }
  };
  for (int64_t i = 0; i < warm_up; ++i) step();
  runner_->synchronize();
  for (auto& sequence : batch_) {
    runner_->read_counters(*sequence);
    for (int32_t l = 0; l < shape_.num_layers; ++l) sequence->counters(l) = {};
  }
  std::vector<double> seconds;
  const int64_t tenth = std::max<int64_t>(steps / 10, 1);
  const double cpu_before = process_cpu_seconds();
  double cpu_first = 0, cpu_last = 0;
  for (int64_t i = 0; i < steps; ++i) {
    if (i == tenth) cpu_first = process_cpu_seconds() - cpu_before;
    if (i == steps - tenth) cpu_last = process_cpu_seconds();
    const auto start = SteadyClock::now();
    step();
    seconds.push_back(seconds_since(start));
  }
  const double cpu = process_cpu_seconds() - cpu_before;
  cpu_last = process_cpu_seconds() - cpu_last;
  StepFigures figures;
  SlotTable::Times times;
  KvCounters total;
  for (auto& sequence : batch_) {
    runner_->read_counters(*sequence);
    times.wait_ns += runner_->times().wait_ns;
    times.fetch_ns += runner_->times().fetch_ns;
    for (const KvCounters& layer : sequence->layer_counters()) total += layer;
  }
  // Each timed call launches the step after it; without a step before them the first launches two.
  const auto counted_steps = static_cast<double>(steps + (warm_up == 0 ? 1 : 0));
  const auto share = [](int64_t part, int64_t whole) {
    return whole == 0 ? 0.0 : static_cast<double>(part) / static_cast<double>(whole);
  };
  figures.steps = steps;
  figures.median_s = percentile(seconds, 0.5);
  figures.mean_s =
      std::accumulate(seconds.begin(), seconds.end(), 0.0) / static_cast<double>(seconds.size());
  figures.p10_s = percentile(seconds, 0.1);
  figures.p90_s = percentile(seconds, 0.9);
  figures.cpu_s_per_step = cpu / static_cast<double>(steps);
  figures.cpu_s_first = cpu_first / static_cast<double>(tenth);
  figures.cpu_s_last = cpu_last / static_cast<double>(tenth);
  figures.hit_rate = total.hit_rate();
  figures.new_share = share(total.rows_fetched, total.rows_requested);
  figures.weight_bytes = static_cast<double>(
      weights_->bytes() -
      (weights_->config().tie_word_embeddings ? 0 : matrix_bytes(weights_->embedding())));
  const double selections = static_cast<double>(total.decisions() - total.hits + total.corrections +
                                                total.resident_selections) /
                            counted_steps;
  const double context = static_cast<double>(batch_.front()->num_tokens());
  const bool hashed = selects_by_code(batch_.front()->policy().select);
  figures.code_bytes = hashed ? selections * context * static_cast<double>(shape_.code_bytes()) : 0;
  figures.attended_bytes =
      static_cast<double>(total.bytes_attended(shape_.stored_row_bytes(), shape_.row_bytes())) /
      counted_steps;
  figures.link_bytes =
      static_cast<double>(total.rows_fetched * shape_.stored_row_bytes()) / counted_steps;
  if (total.rows_fetched > 0) {
    const double set_tokens =
        static_cast<double>(set_size(batch_.front()->policy(), batch_.front()->num_tokens()));
    const double density = figures.new_share * set_tokens / context;
    if (density > 1e-4) figures.gather_bytes_per_s = gather_rate(std::min(density, 1.0));
  }
  figures.corrections = static_cast<double>(total.corrections) / counted_steps;
  const auto heads = static_cast<double>(shape_.num_layers) * shape_.num_kv_heads;
  figures.wait_s = static_cast<double>(times.wait_ns) * 1e-9 / counted_steps / heads /
                   static_cast<double>(batch_.size()) * shape_.num_layers;
  figures.fetch_s = static_cast<double>(times.fetch_ns) * 1e-9 / counted_steps;
  figures.graph_nodes = static_cast<int64_t>(runner_->graph_nodes());
  figures.heads = shape_.num_layers * shape_.num_kv_heads;
  figures.resident_heads = batch_.front()->num_resident_heads();
  if (const int64_t used = driver_used_bytes(); used >= 0) {
    figures.device_used_bytes = used - driver_used_at_start();
  }
  return figures;
}

std::vector<StageFigures> Measure::stages() {
  // Nothing serves the queue while a stage runs alone: no head may miss.
  (void)steps({1.0f, 0.0f}, 4, 4);
  runner_->synchronize();
  std::vector<StageFigures> figures;
  for (const CudaRunner::StageWork& work :
       runner_->stage_work(static_cast<int32_t>(batch_.size()))) {
    const GraphExec exec(runner_->stream(), work.record);
    const double seconds = timed(runner_->stream(), 20, [&] { exec.launch(runner_->stream()); });
    figures.push_back({work.name, seconds, work.bytes});
  }
  return figures;
}

FetchFigures Measure::fetch(double share) {
  FetchFigures figures;
  figures.share = share;
  const int64_t context = batch_.front()->num_tokens();
  // Every head misses and every row of its set is new; the set is the share that is asked for.
  PolicyOptions policy = batch_.front()->policy();
  policy.predict = Predict::kPreviousLayer;
  policy.correction = Correction::kNone;
  policy.fetch = Fetch::kWhole;
  policy.set_tokens =
      std::max<int64_t>(1, static_cast<int64_t>(share * static_cast<double>(context)));
  policy.persistent = PolicyOptions::Persistent::kPerLayer;
  policy.persistent_per_layer = 0;
  const auto batch = static_cast<int32_t>(batch_.size());
  for (auto& sequence : batch_) runner_->end(*sequence);
  runner_->force_reuse({0.0f, -1.0f});
  for (auto& sequence : batch_) {
    sequence->set_policy(policy);
    runner_->begin(*sequence, {});
  }
  runner_->activate_all(batch_);
  std::vector<double> beside, alone;
  for (int repeat = 0; repeat < 2 * kProbeRepeats; ++repeat) {
    const bool products = repeat % 2 == 0;
    const double seconds = runner_->time_fetch(batch, products);
    (products ? beside : alone).push_back(seconds);
  }
  KvCounters total;
  for (auto& sequence : batch_) {
    runner_->read_counters(*sequence);
    for (const KvCounters& layer : sequence->layer_counters()) total += layer;
    for (int32_t l = 0; l < shape_.num_layers; ++l) sequence->counters(l) = {};
  }
  figures.rows = total.rows_fetched / (2 * kProbeRepeats);
  figures.bytes = static_cast<double>(figures.rows * shape_.stored_row_bytes());
  figures.seconds = percentile(beside, 0.5);
  figures.idle_seconds = percentile(alone, 0.5);
  return figures;
}

Result<double> Measure::time_prefill(std::span<const int32_t> ids, bool offload,
                                     Timeline* timeline) {
  const auto tokens = std::ssize(ids);
  SequenceKv::Options kv;
  kv.policy = options_.policy;
  kv.capacity_tokens = tokens + options_.room_tokens;
  // All heads resident: the same work, and nothing that must leave.
  if (!offload) {
    kv.policy.persistent = PolicyOptions::Persistent::kAll;
    kv.host_copy = false;
  }
  CLO_ASSIGN(auto sequence, SequenceKv::create(*system_, kv));
  runner_->begin(*sequence, {});
  runner_->record_timeline(timeline);
  const auto start = SteadyClock::now();
  for (int64_t done = 0; done < tokens;) {
    const int64_t count = std::min(runner_->limits().chunk_rows, tokens - done);
    bool abandoned = false;
    (void)runner_->prefill(ids.subspan(static_cast<size_t>(done), static_cast<size_t>(count)),
                           *sequence, done + count == tokens, nullptr, &abandoned);
    done += count;
  }
  const double seconds = seconds_since(start);
  runner_->record_timeline(nullptr);
  runner_->end(*sequence);
  return seconds;
}

Result<PrefillFigures> Measure::prefill(int64_t tokens, bool with_timeline) {
  end_batch();
  std::vector<int32_t> ids(static_cast<size_t>(tokens));
  for (size_t i = 0; i < ids.size(); ++i) {
    ids[i] =
        static_cast<int32_t>((i * 2654435761u) % static_cast<size_t>(options_.config.vocab_size));
  }
  PrefillFigures figures;
  // The second run of each kind counts: the first builds plans and chooses algorithms.
  for (int run = 0; run < 2; ++run) {
    CLO_ASSIGN(figures.seconds, time_prefill(ids, true, nullptr));
    CLO_ASSIGN(figures.without_offload_seconds, time_prefill(ids, false, nullptr));
  }
  if (with_timeline) {
    Timeline timeline(runner_->stream());
    CLO_TRY(time_prefill(ids, true, &timeline));
    for (const TimelineSpan& span : timeline.spans()) {
      figures.spans.push_back({span.lane, span.work, span.layer, span.begin_s, span.end_s});
    }
  }
  figures.attention_kernel = runner_->attention_kernel();
  return figures;
}

}  // namespace

Result<std::unique_ptr<CudaMeasure>> CudaMeasure::create(const MeasureOptions& options) {
  auto measure = std::make_unique<Measure>(options);
  CLO_TRY(measure->build());
  return std::unique_ptr<CudaMeasure>(std::move(measure));
}

}  // namespace clo
