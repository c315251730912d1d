#include "cuda/runner.h"

#include <sys/prctl.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <stdexcept>

#include "base/check.h"
#include "base/try.h"
#include "base/units.h"
#include "kernels/refresh/spread.h"
#include "ops/mass_draw.h"
#include "select/hash_signs.h"

namespace clo {

namespace {

using SteadyClock = std::chrono::steady_clock;

constexpr int kLowPriority = 0;
constexpr uint32_t kRowRing = 8;

int high_priority() {
  int least = 0, greatest = 0;
  CLO_CUDA(cudaDeviceGetStreamPriorityRange(&least, &greatest));
  return greatest;
}

void sleep_us(double us) {
  timespec time{};
  time.tv_sec = static_cast<time_t>(us / 1e6);
  time.tv_nsec = static_cast<long>((us - static_cast<double>(time.tv_sec) * 1e6) * 1e3);
  nanosleep(&time, nullptr);
}

uint32_t load_word(const uint32_t* word) {
  return std::atomic_ref<const uint32_t>(*word).load(std::memory_order_acquire);
}

}  // namespace

Result<std::unique_ptr<CudaRunner>> CudaRunner::create(const Weights& weights, KvSystem& system,
                                                       Arena& arena, const CudaLimits& limits,
                                                       std::string description) {
  std::unique_ptr<CudaRunner> runner(
      new CudaRunner(weights, system, limits, std::move(description)));
  CLO_TRY(runner->build(arena));
  return runner;
}

CudaRunner::CudaRunner(const Weights& weights, KvSystem& system, const CudaLimits& limits,
                       std::string description)
    : weights_(weights),
      system_(system),
      limits_(limits),
      description_(std::move(description)),
      device_(device_numbers()),
      main_(kLowPriority),
      refresh_(high_priority()),
      copy_out_(kLowPriority),
      copy_in_(kLowPriority) {
  limits_.layer_tokens = layer_tokens(limits);
  // Sleeps of a few microseconds are meant as such.
  prctl(PR_SET_TIMERSLACK, 1000UL, 0UL, 0UL, 0UL);
}

Status CudaRunner::build(Arena& arena) {
  const KvShape& shape = system_.shape;
  const ModelConfig& config = weights_.config();
  const BufferSizes sizes{config, shape, limits_, device_, !system_.profile.hash_weights.empty()};
  CLO_TRY(take_buffers(sizes, buffers_, [&](void** target, int64_t num_bytes) -> Status {
    CLO_ASSIGN(std::byte* const block, arena.allocate(num_bytes));
    *target = block;
    return Ok{};
  }));
  CLO_ASSIGN(results_, PinnedBlock::create(kernels::kResultRing * int64_t{limits_.max_batch} *
                                           int64_t{sizeof(kernels::StepResult)}));
  CLO_ASSIGN(samples_, PinnedBlock::create(kernels::kResultRing * int64_t{limits_.max_batch} *
                                           kMassLooks * int64_t{sizeof(kernels::MassSample)}));
  CLO_ASSIGN(first_samples_, PinnedBlock::create(int64_t{shape.num_layers} * shape.num_kv_heads *
                                                 int64_t{sizeof(kernels::MassSample)}));
  CLO_ASSIGN(difficulty_, PinnedBlock::create(int64_t{shape.num_layers} * shape.num_kv_heads * 4));
  CLO_ASSIGN(words_, PinnedBlock::create(64));
  std::fill_n(words_.as<uint32_t>(), 3, 0u);
  CLO_ASSIGN(row_staging_, PinnedBlock::create(kRowRing * int64_t{limits_.max_batch} * 4));
  CLO_ASSIGN(host_logits_, PinnedBlock::create(limits_.max_batch * config.vocab_size * 4));
  CLO_ASSIGN(host_ids_, PinnedBlock::create(limits_.chunk_rows * 4));
  if (system_.observer != nullptr) {
    const int64_t row_bytes =
        shape.num_kv_heads * shape.row_bytes() + int64_t{shape.num_q_heads} * shape.head_dim * 2;
    for (PinnedBlock& block : observed_) {
      CLO_ASSIGN(block, PinnedBlock::create(limits_.chunk_rows * row_bytes));
    }
  }
  matmul_ = std::make_unique<kernels::Matmul>(buffers_.matmul_workspace, kMatmulWorkspace);
  auto sdpa = kernels::Sdpa::create();
  if (sdpa) {
    sdpa_ = std::move(sdpa).value();
    attention_kernel_ = sdpa_->version();
  } else {
    attention_kernel_ = "own kernel (" + sdpa.error().message + ")";
  }

  tables_.shape = shape;
  tables_.max_batch = limits_.max_batch;
  tables_.scale = 1.0f / std::sqrt(static_cast<float>(shape.head_dim));
  tables_.slots = buffers_.slots;
  tables_.row_slot = buffers_.row_slot;
  tables_.heads = buffers_.heads;
  tables_.rules = buffers_.rules;
  tables_.pending = buffers_.pending;
  tables_.counters = buffers_.counters;
  tables_.decided = buffers_.decided;
  tables_.entropies = buffers_.entropies;
  tables_.kept_queries = buffers_.kept_queries;
  tables_.hashes = system_.hashes.empty() ? nullptr : buffers_.hashes;
  tables_.queue = buffers_.queue;
  tables_.jobs = buffers_.jobs;
  tables_.queue_capacity = buffers_.queue_capacity;
  if (system_.store != nullptr) {
    tables_.host = system_.store->layout();
    tables_.host_rows = system_.store->rows(0, 0);
    if (shape.code_bits > 0) tables_.host_codes = system_.store->codes(0, 0);
  }
  upload_constants();
  slots_ = std::make_unique<SlotTable>(system_, buffers_, limits_, main_);
  for (int32_t layer = 0; layer < shape.num_layers; ++layer) layer_done_.emplace_back();
  main_.synchronize();
  return Ok{};
}

void CudaRunner::upload_constants() {
  const KvShape& shape = system_.shape;
  const auto upload = [&](void* target, const void* source, size_t num_bytes) {
    CLO_CUDA(cudaMemcpy(target, source, num_bytes, cudaMemcpyHostToDevice));
  };
  const std::vector<float> frequencies =
      rope_inverse_frequencies(weights_.config().rope, weights_.config().head_dim);
  upload(buffers_.inverse_frequencies, frequencies.data(), frequencies.size() * sizeof(float));
  CLO_CUDA(cudaMemset(buffers_.arrivals, 0,
                      static_cast<size_t>(limits_.max_batch) * shape.num_kv_heads * 4));
  CLO_CUDA(cudaMemset(buffers_.sample_scratch, 0,
                      static_cast<size_t>(kernels::sample_scratch_bytes(
                          limits_.max_batch, weights_.config().vocab_size))));
  std::vector<int32_t> no_rows(static_cast<size_t>(limits_.max_batch), -1);
  upload(buffers_.row_slot, no_rows.data(), no_rows.size() * 4);
  // The library adds a bias of the result's type.
  const auto bias = [&](void* target, const float* source, int64_t layer, int64_t count) {
    if (target == nullptr) return;
    std::vector<float> values(static_cast<size_t>(count));
    std::vector<uint16_t> rounded(values.size());
    CLO_CUDA(cudaMemcpy(values.data(), source, values.size() * 4, cudaMemcpyDeviceToHost));
    convert_from_f32(shape.type, values.data(), rounded.data(), count);
    upload(static_cast<uint16_t*>(target) + layer * count, rounded.data(), rounded.size() * 2);
  };
  for (int64_t layer = 0; layer < shape.num_layers; ++layer) {
    const LayerWeights& w = weights_.layers()[static_cast<size_t>(layer)];
    bias(buffers_.qkv_bias, w.qkv_bias, layer, w.qkv.num_rows);
    bias(buffers_.gate_up_bias, w.gate_up_bias, layer, w.gate_up.num_rows);
  }
  if (system_.hashes.empty()) return;

  // The same projections with addresses that the device can follow.
  const int64_t words = divide_up(shape.code_bits, hash_width(shape.head_dim)) * 2 *
                        (hash_width(shape.head_dim) / 32);
  std::vector<HashParams> hashes = system_.hashes;
  for (size_t i = 0; i < hashes.size(); ++i) {
    uint32_t* const signs = buffers_.signs + static_cast<int64_t>(i) * words;
    upload(signs, hashes[i].signs, static_cast<size_t>(words) * 4);
    hashes[i].signs = signs;
    if (hashes[i].weights != nullptr) {
      const int64_t count = hash_weight_count(shape.head_dim, shape.code_bits);
      float* const trained = buffers_.hash_weights + static_cast<int64_t>(i) * count;
      upload(trained, hashes[i].weights, static_cast<size_t>(count) * 4);
      hashes[i].weights = trained;
    }
  }
  upload(buffers_.hashes, hashes.data(), hashes.size() * sizeof(HashParams));
}

CudaRunner::~CudaRunner() {
  try {
    stop_refreshes();
  } catch (const std::exception&) {  // after an error of the device nothing runs any more
  }
  for (const Stream* stream : {&main_, &refresh_, &copy_out_, &copy_in_}) {
    (void)cudaStreamSynchronize(stream->get());
  }
}

void CudaRunner::begin(SequenceKv& sequence, const SamplingOptions& sampling) {
  CLO_CHECK(sequence.capacity_tokens() <= limits_.max_context_tokens, sequence.capacity_tokens(),
            limits_.max_context_tokens);
  slots_->assign(sequence, sampling, forced_);
  decoded_rows_[&sequence] = 0;
}

void CudaRunner::find_key_spread(const SequenceKv& sequence, int64_t context_tokens) {
  if (sequence.policy().hit_test != HitTest::kDrift) return;
  kernels::KeySpread spread;
  spread.tables = tables_;
  spread.rules = buffers_.rules;
  spread.slot = slots_->slot_of(sequence);
  spread.context_tokens = context_tokens;
  kernels::key_spread(spread, main_.get());
}

bool CudaRunner::in_flight(const SequenceKv& sequence) const {
  return std::any_of(launched_.begin(), launched_.end(), [&](const Launched& step) {
    return std::find(step.rows.begin(), step.rows.end(), &sequence) != step.rows.end();
  });
}

void CudaRunner::synchronize() {
  for (const Launched& step : launched_) wait(step.step);
  stop_refreshes();
  main_.synchronize();
}

void CudaRunner::start_refreshes() {
  const kernels::RefreshQueueParams params = refresh_params(false);
  if (refreshing_ && params.num_clusters == running_clusters_) return;
  stop_refreshes();  // there are more jobs than there were, or fewer
  refreshing_ = true;
  running_clusters_ = params.num_clusters;
  refresh_after_.record(main_);  // priming uses the same scratch
  refresh_after_.make_wait(refresh_);
  CLO_CUDA(cudaMemsetAsync(&buffers_.queue->leave, 0, sizeof(uint32_t), refresh_.get()));
  kernels::refresh_queue(params, refresh_.get());
  refresh_ended_.record(refresh_);
}

void CudaRunner::stop_refreshes() {
  if (!refreshing_) return;
  refreshing_ = false;
  // Behind the steps launched so far, which may still wait for jobs.
  CLO_CUDA(cudaMemsetAsync(&buffers_.queue->leave, 0xFF, sizeof(uint32_t), main_.get()));
  refresh_ended_.make_wait(main_);
}

kernels::RefreshQueueParams CudaRunner::refresh_params(bool drain) const {
  kernels::RefreshQueueParams params;
  params.tables = tables_;
  params.scratch = {buffers_.refresh_scratch, buffers_.scratch_bytes};
  params.num_clusters = refresh_clusters(limits_, many_jobs_, device_.num_multiprocessors);
  params.fetch_warps = std::clamp(limits_.fetch_warps, 1, 8);
  params.score_nap_ns = limits_.score_nap_ns;
  params.drain = drain;
  return params;
}

void CudaRunner::drain_queue() {
  stop_refreshes();
  kernels::refresh_queue(refresh_params(true), main_.get());
}

int64_t CudaRunner::settle(const SequenceKv& sequence) {
  synchronize();
  drain_queue();  // jobs of heads that no step has waited for
  main_.synchronize();
  int64_t written = sequence.num_tokens();
  for (const Launched& step : launched_) {
    written += std::count(step.rows.begin(), step.rows.end(), &sequence);
  }
  return std::min(written, sequence.capacity_tokens());
}

void CudaRunner::end(SequenceKv& sequence) {
  // Steps that serve it have passed when the stream is empty; their tokens for others stay in the
  // ring until they are asked for.
  if (in_flight(sequence)) synchronize();
  // A job for its heads may still wait in the queue.
  drain_queue();
  slots_->release(sequence);
  std::replace(rows_.begin(), rows_.end(), &sequence, static_cast<SequenceKv*>(nullptr));
  for (Launched& step : launched_) {
    std::replace(step.rows.begin(), step.rows.end(), &sequence, static_cast<SequenceKv*>(nullptr));
  }
  decoded_rows_.erase(&sequence);
  turned_.erase(&sequence);
}

int64_t CudaRunner::next_context(const SequenceKv& sequence) const {
  int64_t context = sequence.num_tokens() + 1;
  for (const Launched& step : launched_) {
    context += std::count(step.rows.begin(), step.rows.end(), &sequence);
  }
  return context;
}

void CudaRunner::follow_dial(SequenceKv& sequence, uint32_t step, std::ptrdiff_t row) {
  Dial* const dial = sequence.dial();
  if (dial == nullptr || !looks_at_some(sequence.num_tokens())) return;
  const DialSetting before = dial->setting();
  const auto* samples =
      samples_.as<kernels::MassSample>() +
      (int64_t{step % kernels::kResultRing} * limits_.max_batch + row) * kMassLooks;
  for (int32_t look = 0; look < kMassLooks; ++look) {
    if (samples[look].head >= 0) dial->add(samples[look].kept, samples[look].fresh != 0);
  }
  const DialSetting& now = dial->setting();
  if (now.set_scale == before.set_scale && now.angle == before.angle) return;
  // The step after this one may be under way; the one after that is launched next.
  turned_[&sequence] = sequence.num_tokens() + 2;
}

void CudaRunner::turn_dial(SequenceKv& sequence) {
  const auto turned = turned_.find(&sequence);
  if (turned == turned_.end() || next_context(sequence) < turned->second) return;
  sequence.follow_dial();
  // A true query of the step to come chooses for the one after it.
  slots_->turn_dial(sequence, turned->second + 1);
  turned_.erase(turned);
}

void CudaRunner::read_counters(SequenceKv& sequence) {
  stop_refreshes();
  slots_->read_counters(sequence);
  const int64_t rows = std::exchange(decoded_rows_[&sequence], 0);
  if (sequence.pages().empty()) return;
  for (int32_t layer = 0; layer < system_.shape.num_layers; ++layer) {
    sequence.counters(layer).rows_offloaded += rows * system_.shape.num_kv_heads;
  }
}

void CudaRunner::launch(std::span<SequenceKv* const> rows, bool logits_wanted) {
  for (SequenceKv* sequence : rows) {
    if (sequence == nullptr) continue;
    CLO_CHECK(slots_->is_active(*sequence));
    turn_dial(*sequence);
  }
  const GraphExec& exec = graph(key_of(rows));
  if (!std::equal(rows.begin(), rows.end(), rows_.begin(), rows_.end())) {
    int32_t* const staged =
        row_staging_.as<int32_t>() + int64_t{next_row_staging_++ % kRowRing} * limits_.max_batch;
    for (int32_t r = 0; r < limits_.max_batch; ++r) {
      const auto at = static_cast<size_t>(r);
      const bool served = at < rows.size() && rows[at] != nullptr;
      staged[r] = served ? slots_->slot_of(*rows[at]) : -1;
    }
    CLO_CUDA(cudaMemcpyAsync(buffers_.row_slot, staged, static_cast<size_t>(limits_.max_batch) * 4,
                             cudaMemcpyHostToDevice, main_.get()));
    rows_.assign(rows.begin(), rows.end());
  }
  if (std::any_of(rows.begin(), rows.end(), [&](const SequenceKv* sequence) {
        return sequence != nullptr && !sequence->is_dense_layer(system_.shape.num_layers - 1);
      })) {
    start_refreshes();
  }
  exec.launch(main_);
  last_nodes_ = exec.num_nodes();
  launched_.push_back({++step_, rows_, logits_wanted});
}

void CudaRunner::check_fault() {
  const uint32_t fault = load_word(words_.as<uint32_t>() + 1);
  if (fault == 0) return;
  const char* what = "a set is longer than its context allows";
  if (fault == static_cast<uint32_t>(kernels::FaultCode::kAttentionWait)) {
    what = "attention waited 10 s for rows from the host store";
  } else if (fault == static_cast<uint32_t>(kernels::FaultCode::kRefreshStuck)) {
    what = "a decision waited 10 s for the refresh before it";
  }
  throw std::runtime_error(what);
}

void CudaRunner::wait(uint32_t step) {
  const uint32_t* word = words_.as<uint32_t>();
  const auto passed = [&] { return static_cast<int32_t>(load_word(word) - step) >= 0; };
  const auto start = SteadyClock::now();
  double waited = 0;
  // Most of a step is slept through in one piece; what is left is met in short naps, so that the
  // thread costs little and the token is seen soon.
  if (!passed() && step_seconds_ > 200e-6) sleep_us(step_seconds_ * 0.85 * 1e6);
  for (int64_t naps = 0; !passed(); ++naps) {
    sleep_us(std::min(200.0, 20.0 + step_seconds_ * 1e6 / 100));
    waited = std::chrono::duration<double>(SteadyClock::now() - start).count();
    if (naps % 64 == 63) {
      // A fault of the device never sets the word: the stream tells.
      const cudaError_t state = cudaStreamQuery(main_.get());
      if (state != cudaErrorNotReady) check_cuda(state, "cudaStreamQuery after a step");
      if (state == cudaSuccess && !passed()) {
        throw std::runtime_error("a decode step ended without its result");
      }
      check_fault();
    }
  }
  check_fault();
  waited = std::chrono::duration<double>(SteadyClock::now() - start).count();
  step_seconds_ = step_seconds_ == 0 ? waited : 0.8 * step_seconds_ + 0.2 * waited;
}

void CudaRunner::count_jobs() {
  const uint32_t step = load_word(words_.as<uint32_t>()),
                 jobs = load_word(words_.as<uint32_t>() + 2);
  const uint32_t steps = step - counted_step_;
  if (steps == 0) return;
  const double each = static_cast<double>(jobs - counted_jobs_) / steps;
  counted_step_ = step;
  counted_jobs_ = jobs;
  constexpr double kSmooth = 1.0 / 8, kUp = 400, kDown = 250;
  jobs_a_step_ += kSmooth * (each - jobs_a_step_);
  many_jobs_ = jobs_a_step_ > (many_jobs_ ? kDown : kUp);
}

void CudaRunner::decode(std::span<const DecodeRow> rows, std::span<DecodeOutcome> outcomes) {
  CLO_CHECK(!rows.empty() && std::ssize(rows) <= limits_.max_batch, rows.size());
  for (DecodeOutcome& outcome : outcomes) outcome = {};
  std::vector<SequenceKv*> wanted;
  bool need_logits = false;
  for (const DecodeRow& row : rows) {
    wanted.push_back(row.sequence);
    need_logits = need_logits || row.need_logits;
  }
  // Steps whose sequences have all ended answer nobody.
  while (!launched_.empty() &&
         std::none_of(launched_.front().rows.begin(), launched_.front().rows.end(),
                      [](const SequenceKv* sequence) { return sequence != nullptr; })) {
    wait(launched_.front().step);
    launched_.pop_front();
  }
  const auto launch_wanted = [&] {
    for (const DecodeRow& row : rows) {
      if (!slots_->is_active(*row.sequence)) {
        slots_->activate(*row.sequence, row.token);
      } else if (need_logits) {
        slots_->set_token(*row.sequence, row.token);
      }
    }
    launch(wanted, need_logits);
  };
  if (launched_.empty()) launch_wanted();
  // One step ahead: its tokens come from this one, on the device.
  if (!need_logits && launched_.size() < kMaxLaunched) launch_wanted();

  const Launched step = launched_.front();
  wait(step.step);
  launched_.pop_front();
  count_jobs();
  const auto* results = results_.as<kernels::StepResult>() +
                        int64_t{step.step % kernels::kResultRing} * limits_.max_batch;
  // A step launched ahead for others has sampled for itself, and a prefill may have used the
  // logits' memory since.
  if (step.logits_wanted) {
    CLO_CUDA(
        cudaMemcpyAsync(host_logits_.as<float>(), buffers_.logits,
                        step.rows.size() * static_cast<size_t>(weights_.config().vocab_size) * 4,
                        cudaMemcpyDeviceToHost, main_.get()));
    main_.synchronize();
  }
  for (size_t i = 0; i < rows.size(); ++i) {
    const auto found = std::find(step.rows.begin(), step.rows.end(), rows[i].sequence);
    if (found == step.rows.end()) continue;
    const auto r = found - step.rows.begin();
    rows[i].sequence->advance(1);
    follow_dial(*rows[i].sequence, step.step, r);
    ++decoded_rows_[rows[i].sequence];
    DecodeOutcome& outcome = outcomes[i];
    if (step.logits_wanted) {
      outcome.kind = DecodeOutcome::Kind::kLogits;
      outcome.logits = {host_logits_.as<float>() + r * weights_.config().vocab_size,
                        static_cast<size_t>(weights_.config().vocab_size)};
    } else {
      outcome.kind = DecodeOutcome::Kind::kToken;
      outcome.token = results[r].token;
      outcome.finite = results[r].finite != 0;
    }
  }
}

}  // namespace clo
