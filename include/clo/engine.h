#pragma once
// Engine: load a model, submit requests, step, read answers. One thread owns an engine and calls
// everything on it; only the flag behind Request::keep_going may be touched from elsewhere.
//
//   auto engine = clo::Engine::load({.model_dir = "models/recall-7m"});
//   clo::Request request{.messages = {{"user", text}}, .max_new_tokens = 32};
//   auto answer = (*engine)->generate(std::move(request));
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "clo/policy.h"
#include "clo/report.h"
#include "clo/result.h"

namespace clo {

class AttentionObserver;

// The project's version, such as "0.1.0".
std::string_view version();

enum class WeightType : uint8_t { kAuto, kF32, kBF16, kF16 };
// How weight matrices lie in memory. int8 and q4: blocks of 32 inputs that share a scale.
enum class WeightStorage : uint8_t { kAuto, kF32, kBF16, kF16, kInt8, kQ4 };
// What K and V rows are in memory. int8, fp8: rows in the host store, in slots and of resident
// heads are compressed; sink and recent rows stay in the model's type. auto: that type everywhere.
enum class KvType : uint8_t { kAuto, kF32, kBF16, kF16, kInt8, kFp8 };
enum class Backend : uint8_t { kAuto, kCpu, kCuda };

struct EngineOptions {
  std::string model_dir;                 // a model directory, hub cache folder or GGUF file
  WeightType dtype = WeightType::kAuto;  // KV, products, plain weights; auto: what the files hold
  KvType kv_type = KvType::kAuto;        // auto: `dtype`
  // auto: on the CPU quantised files stay quantised, everything else is of `dtype`.
  WeightStorage weights = WeightStorage::kAuto;
  Backend backend = Backend::kAuto;
  int32_t threads = 0;              // CPU threads; 0: all cores
  int64_t device_memory_bytes = 0;  // 0: what the requests need
  int64_t host_memory_bytes = 0;    // 0: what the requests need, within what the system has
  int64_t max_context_tokens = 0;   // 0: the model's limit
  int32_t max_batch = 8;            // sequences that run at once; others wait
  int32_t prefill_chunk = 0;        // prompt tokens per prefill step; 0: the backend's choice
  int32_t code_bits = 128;          // per key; 0: none, so no hash selection
  bool keep_prefixes = true;        // full pages of finished prompts stay for later requests
  bool require_tokenizer = true;    // false: a model without one serves token ids only
  std::string profile;              // importance, difficulty and hash weights; empty: none
  PolicyOptions policy;             // of requests that name none
  // For tests and evaluation.
  bool guard_host_rows = false;           // host rows cannot be read while decode attention runs
  AttentionObserver* observer = nullptr;  // attention/attention_observer.h; outlives the engine
};

struct Message {
  std::string role;  // "system", "user" or "assistant"
  std::string content;
};

struct SamplingOptions {
  float temperature = 0;  // 0: the most likely token, the lowest id among equals
  int32_t top_k = 0;      // 0: all
  float top_p = 1;
  float min_p = 0;
  float repetition_penalty = 1;  // of tokens of the answer: a document must stay quotable
  uint64_t seed = 0;             // same seed, prompt and settings: same answer
};

struct Progress {
  int64_t prompt_tokens = 0;  // of this request
  int64_t done_tokens = 0;    // prefilled or restored so far
  double seconds = 0;         // since prefill began
};

struct Request {
  // Exactly one of the three says what the prompt is.
  std::vector<Message> messages;    // through the model's chat template
  std::string prompt;               // as it is (BOS as the tokenizer file says)
  std::vector<int32_t> prompt_ids;  // as they are
  // The answer goes on from this text, which stands at the prompt's end (after the assistant's
  // header, beside messages) and is not part of the answer. Not beside prompt_ids.
  std::string answer_prefix;

  int64_t max_new_tokens = 256;
  bool ignore_eos = false;
  std::vector<std::string> stop;            // text at which the answer ends; not part of it
  std::optional<SamplingOptions> sampling;  // absent: generation_config.json, else greedy
  std::optional<PolicyOptions> policy;      // absent: the engine's

  std::function<void(std::string_view)> on_text;     // pieces of the answer, whole characters
  std::function<void(const Progress&)> on_progress;  // during prefill, now and then
  std::function<bool()> keep_going;                  // false: cancel; asked between layers

  // For evaluation: the answer is forced to these tokens, and each step's logits are shown.
  std::vector<int32_t> forced_tokens;
  std::function<void(std::span<const float>)> on_logits;  // [vocab_size], before sampling
  // At each step compare attended rows with all rows, and queries with the last ones (slow). On a
  // GPU with rows drawn of those left out (ops/mass_draw.h), and without the queries.
  bool measure_mass = false;
  // Prompt tokens whose rows are counted at each step, and how many of them are attended:
  // ascending, disjoint, within the prompt. On a GPU the mass of every head is measured then
  // (slow).
  std::vector<TokenRange> watched_ranges;
  // Prompt tokens that no other token attends to, in prefill and decode: they keep their positions,
  // are never chosen into a set and count for nothing. Each attends to itself and to the visible
  // tokens before it. Ascending, disjoint, without the prompt's last token and apart from
  // watched_ranges. Such a prompt neither finds nor leaves a stored prefix. By the CPU backend
  // alone.
  std::vector<TokenRange> masked_ranges;
};

enum class FinishReason : uint8_t { kStop, kLength, kCancelled, kError };
std::string_view finish_reason_name(FinishReason reason);

struct Response {
  std::string text;
  std::vector<int32_t> tokens;  // of the answer, an end-of-sequence token left out
  FinishReason finish = FinishReason::kStop;
  std::optional<Error> error;  // set when finish is kError; text holds what came before
  Report report;
};

using RequestId = int64_t;

class Engine {
 public:
  // Fails: kBadFile, kUnsupported, kBadFlag, kDeviceMemory, kHostMemory, kDeviceFault.
  static Result<std::unique_ptr<Engine>> load(const EngineOptions& options);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Queues a request. Fails: kBadRequest, kTooLong, kUnsupported, kBadFlag, or the memory codes
  // when it could never run; kDeviceFault once the device has failed. Nothing is queued then.
  Result<RequestId> submit(Request request);
  // Runs one step: admits what fits, prefills one chunk, decodes one token of every running
  // sequence. False when there was nothing to do.
  // On a GPU a kernel stays on the device while requests run, until the next step, cancel, end of a
  // request or the engine's own end: calls that wait for the whole device (cudaDeviceSynchronize,
  // cudaFree) do not return in between, nor inside a callback.
  bool step();
  // Not from inside a request's own callbacks: there keep_going is the way.
  void cancel(RequestId id);
  // Whether Request::masked_ranges are served: by the CPU backend alone.
  bool can_mask() const;
  // False once the device has failed in a step: load a new engine.
  bool healthy() const;
  // The answer of a finished request, once.
  std::optional<Response> take(RequestId id);
  // submit, step until it has finished, take. Other requests go on meanwhile.
  Result<Response> generate(Request request);

  // The token ids a request's prompt becomes. Fails as submit does.
  Result<std::vector<int32_t>> tokenize(const Request& request) const;
  Result<std::vector<int32_t>> encode(std::string_view text) const;
  // The bytes a token stands for, possibly a part of a character; empty for an unknown id and for a
  // model without a tokenizer.
  std::string token_bytes(int32_t id) const;
  bool has_chat_template() const;
  int64_t max_context_tokens() const;
  int64_t vocab_size() const;

  struct MemoryUse {
    int64_t device_used_bytes = 0, device_peak_bytes = 0, device_budget_bytes = 0;
    int64_t host_used_bytes = 0, host_budget_bytes = 0;
    int64_t pages_in_use = 0;  // referred to by a sequence; kept prefixes are not
  };
  MemoryUse memory() const;
  // Starts a new peak from what is in use now.
  void reset_peak();
  // Forgets every stored prefix that no request refers to.
  void drop_prefixes();

 private:
  struct Impl;
  explicit Engine(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace clo
