#pragma once
// Inside the engine: what it owns and what it knows of each sequence. One step is three beats:
// admit what fits, prefill one chunk of the oldest prompt, decode one token of everything that
// runs. Engine thread only.
//
// States of a sequence: kQueued -> kPrefill (admitted: everything it needs is reserved) ->
// kDecode (first token sampled) -> finished (a Response waits for take()). cancel() and faults
// lead to finished from any state; SequenceKv's destructor then frees every page and slot.
#include <atomic>
#include <chrono>
#include <deque>
#include <map>
#include <memory>
#include <vector>

#include "attention/attention.h"
#include "base/thread_pool.h"
#include "clo/engine.h"
#include "cuda/backend.h"
#include "engine/sampler.h"
#include "io/generation_config.h"
#include "io/model_config.h"
#include "io/model_files.h"
#include "kv/memory_plan.h"
#include "model/transformer.h"
#include "reference/cpu_ops.h"
#include "text/chat_template.h"
#include "text/stop_matcher.h"
#include "text/stream_decoder.h"
#include "text/tokenizer.h"

namespace clo {

using Clock = std::chrono::steady_clock;
inline double seconds_since(Clock::time_point start, Clock::time_point now = Clock::now()) {
  return std::chrono::duration<double>(now - start).count();
}

struct Sequence {
  enum class State : uint8_t { kQueued, kPrefill, kDecode };

  Sequence(Request request_in, const SamplingOptions& sampling)
      : request(std::move(request_in)), sampler(sampling), stops(request.stop) {}

  RequestId id = 0;
  Request request;
  PolicyOptions policy;
  std::vector<int32_t> tokens;  // prompt, then answer
  int64_t prompt_tokens = 0;
  int64_t limit_tokens = 0;  // prompt and answer
  Sampler sampler;
  std::optional<StreamDecoder> decoder;  // absent when the model has no tokenizer
  StopMatcher stops;
  State state = State::kQueued;
  std::unique_ptr<SequenceKv> kv;
  Response response;
  Clock::time_point submitted, admitted, prefilled, first_token;
  int64_t decode_steps = 0;

  std::span<const int32_t> prompt() const {
    return std::span(tokens).first(static_cast<size_t>(prompt_tokens));
  }
  std::span<const int32_t> answer() const {
    return std::span(tokens).subspan(static_cast<size_t>(prompt_tokens));
  }
};

struct Engine::Impl {
  Impl(EngineOptions options_in, ModelConfig config_in)
      : options(std::move(options_in)), config(std::move(config_in)) {}

  // Everything below is built once, by Engine::load, in this order.
  EngineOptions options;
  ModelConfig config;
  std::optional<Tokenizer> tokenizer;
  std::optional<ChatTemplate> chat_template;
  ChatTemplate::Variables template_variables;
  GenerationConfig generation;
  KvShape shape;
  int64_t max_context = 0;
  std::string backend_note;          // why a device that is there is not used
  std::unique_ptr<ThreadPool> pool;  // of ops and memcpy_engine; null: the CUDA backend
  std::unique_ptr<CpuOps> ops;       // likewise
  std::unique_ptr<TransferEngine> memcpy_engine;
  std::optional<Arena> cpu_arena;
  Arena* device = nullptr;
  std::unique_ptr<HostStore> store;
  std::unique_ptr<CudaBackend> cuda;  // null: the CPU backend; it has pinned the store's memory
  std::unique_ptr<CodeCache> codes;
  std::unique_ptr<HashSigns> signs;
  std::unique_ptr<KvSystem> system;
  std::unique_ptr<Weights> weights;
  std::unique_ptr<Attention> attention;
  std::unique_ptr<Runner> runner;
  std::optional<Error> fault;  // set once the device has failed: nothing runs any more

  RequestId next_id = 1;
  std::deque<std::unique_ptr<Sequence>> queue;
  std::vector<std::unique_ptr<Sequence>> running;
  std::map<RequestId, Response> finished;

  // load.cpp
  Status build(const ModelFiles& model);
  Status build_memory(const TensorFiles& files);
  Status take_device_memory();
  Status make_host_store();
  Status make_kv_system();
  Status make_runner(const TensorFiles& files);

  // admission.cpp
  PlanInput plan_input(const PolicyOptions& policy, int64_t capacity_tokens, int64_t batch) const;
  // `batch`: sequences that share what the budget has left for persistent heads.
  SequenceKv::Options kv_options(const Sequence& sequence, int64_t batch) const;
  // Whether the sequence finds and leaves stored prefixes. Rows behind a mask are those of their
  // tokens and of the mask, which no page's key knows.
  bool shares_pages(const Sequence& sequence) const {
    return options.keep_prefixes && sequence.request.masked_ranges.empty();
  }
  // Head caches of a sequence; persistent heads of the running ones give way to it.
  Result<std::unique_ptr<SequenceKv>> make_kv(const Sequence& sequence);
  bool give_way(int64_t missing_bytes);
  Status check_fits(const PolicyOptions& policy, int64_t capacity_tokens) const;
  Result<std::vector<int32_t>> encode(std::string_view text, EncodeOptions how) const;
  Result<std::vector<int32_t>> prompt_ids(const Request& request) const;
  Result<std::unique_ptr<Sequence>> make_sequence(Request request);
  // Whether another sequence is computing a prefix this one could share when it is done.
  bool should_wait(const Sequence& sequence) const;
  bool admit();

  // engine.cpp
  bool prefill_one();
  bool decode_all();
  void take_logits(Sequence& sequence, std::span<const float> logits);
  void emit(Sequence& sequence, int32_t token);
  void finish(Sequence& sequence, FinishReason reason, std::optional<Error> error = {});
  // The backend failed in a step: every request ends with `what`, and none is taken any more.
  void fail_all(const std::string& what);
  void fail_not_finite(Sequence& sequence);
  // Ends what the backend runs for the sequence and frees its memory.
  void release(Sequence& sequence);
  void remove_finished();
  bool wants_to_stop(Sequence& sequence);

  // report.cpp: the figures, from the counters and the clock.
  void fill_report(Sequence& sequence);
};

}  // namespace clo
