#include "clo/engine.h"

#include <malloc.h>

#include <algorithm>
#include <stdexcept>

#include "base/check.h"
#include "base/try.h"
#include "engine/impl.h"

namespace clo {

std::string_view version() { return CLO_VERSION; }

std::string_view finish_reason_name(FinishReason reason) {
  switch (reason) {
    case FinishReason::kStop:
      return "stop";
    case FinishReason::kLength:
      return "length";
    case FinishReason::kCancelled:
      return "cancelled";
    case FinishReason::kError:
      return "error";
  }
  return "unknown";
}

Engine::Engine(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Engine::~Engine() {
  // Sequences give pages and blocks back to stores that the engine owns: they go first, and before
  // them what the backend still runs for them.
  for (auto& sequence : impl_->running) impl_->release(*sequence);
  impl_->running.clear();
  impl_->queue.clear();
}

Result<RequestId> Engine::submit(Request request) {
  if (impl_->fault) return *impl_->fault;
  CLO_ASSIGN(std::unique_ptr<Sequence> sequence, impl_->make_sequence(std::move(request)));
  sequence->id = impl_->next_id++;
  const RequestId id = sequence->id;
  impl_->queue.push_back(std::move(sequence));
  return id;
}

bool Engine::step() {
  if (impl_->fault && !(impl_->running.empty() && impl_->queue.empty())) {
    impl_->fail_all(impl_->fault->message);
    impl_->remove_finished();
    return true;
  }
  bool any = false;
  try {
    any = impl_->admit();
    any = impl_->prefill_one() || any;
    any = impl_->decode_all() || any;
  } catch (const std::exception& error) {
    impl_->fail_all(error.what());
    any = true;
  }
  impl_->remove_finished();
  return any;
}

bool Engine::can_mask() const { return impl_->cuda == nullptr; }
bool Engine::healthy() const { return !impl_->fault.has_value(); }

void Engine::Impl::fail_all(const std::string& what) {
  if (!fault) fault = Error{ErrorCode::kDeviceFault, "a step failed: " + what, ""};
  for (auto& sequence : running) {
    if (sequence->kv) finish(*sequence, FinishReason::kError, fault);
  }
  for (auto& sequence : queue) finish(*sequence, FinishReason::kError, fault);
  queue.clear();
  try {
    runner->pause();
  } catch (const std::runtime_error&) {  // nothing runs on this device any more
  }
}

void Engine::Impl::release(Sequence& sequence) {
  if (!sequence.kv) return;
  try {
    if (!fault) runner->end(*sequence.kv);
  } catch (const std::runtime_error& error) {
    // The memory is given back all the same: nothing runs on this device any more.
    if (!fault) fault = Error{ErrorCode::kDeviceFault, error.what(), ""};
  }
  sequence.kv.reset();
}

void Engine::cancel(RequestId id) {
  for (auto& sequence : impl_->running) {
    if (sequence->id == id && sequence->kv) {
      try {
        impl_->finish(*sequence, FinishReason::kCancelled);
      } catch (const std::exception& error) {
        impl_->fail_all(error.what());
      }
      impl_->remove_finished();
      return;
    }
  }
  auto& queue = impl_->queue;
  const auto found = std::find_if(queue.begin(), queue.end(),
                                  [&](const auto& sequence) { return sequence->id == id; });
  if (found == queue.end()) return;
  impl_->finish(**found, FinishReason::kCancelled);
  queue.erase(found);
}

std::optional<Response> Engine::take(RequestId id) {
  const auto found = impl_->finished.find(id);
  if (found == impl_->finished.end()) return std::nullopt;
  Response response = std::move(found->second);
  impl_->finished.erase(found);
  return response;
}

Result<Response> Engine::generate(Request request) {
  CLO_ASSIGN(const RequestId id, submit(std::move(request)));
  while (true) {
    if (auto response = take(id)) {
      if (!impl_->fault) impl_->runner->pause();  // who knows when the next step comes
      return std::move(*response);
    }
    CLO_CHECK(step(), id);
  }
}

Result<std::vector<int32_t>> Engine::tokenize(const Request& request) const {
  return impl_->prompt_ids(request);
}

Result<std::vector<int32_t>> Engine::encode(std::string_view text) const {
  return impl_->encode(text, {});
}

std::string Engine::token_bytes(int32_t id) const {
  return impl_->tokenizer ? impl_->tokenizer->decode_bytes(id) : std::string();
}

bool Engine::has_chat_template() const { return impl_->chat_template.has_value(); }
int64_t Engine::max_context_tokens() const { return impl_->max_context; }
int64_t Engine::vocab_size() const { return impl_->config.vocab_size; }

Engine::MemoryUse Engine::memory() const {
  MemoryUse use;
  use.device_used_bytes = impl_->device->used_bytes();
  use.device_peak_bytes = impl_->device->peak_bytes();
  use.device_budget_bytes = impl_->device->budget_bytes();
  use.host_used_bytes = impl_->store->used_pages() * impl_->store->layout().page_bytes();
  use.host_budget_bytes = impl_->store->arena().budget_bytes();
  use.pages_in_use = impl_->store->used_pages() - impl_->store->unreferenced_pages();
  return use;
}

void Engine::reset_peak() { impl_->device->reset_peak(); }
void Engine::drop_prefixes() { impl_->store->drop_unused(); }

bool Engine::Impl::wants_to_stop(Sequence& sequence) {
  if (!sequence.request.keep_going || sequence.request.keep_going()) return false;
  finish(sequence, FinishReason::kCancelled);
  return true;
}

// The GEMM library takes and frees large buffers in every call of a prefill, and the C library
// keeps some 30 MiB of them. A decode step needs none, so they go back to the system once a prompt
// is read: the memory plan counts on it.
static void release_free_memory() {
#if defined(__GLIBC__)
  malloc_trim(0);
#endif
}

// Between two reports of progress inside a prefill chunk.
static constexpr double kProgressSeconds = 0.2;

bool Engine::Impl::prefill_one() {
  const auto found = std::find_if(running.begin(), running.end(), [](const auto& sequence) {
    return sequence->kv && sequence->state == Sequence::State::kPrefill;
  });
  if (found == running.end()) return false;
  Sequence& sequence = **found;
  const int64_t done = sequence.kv->num_tokens();
  const int64_t count = std::min<int64_t>(options.prefill_chunk, sequence.prompt_tokens - done);
  const bool last = done + count == sequence.prompt_tokens;
  bool abandoned = false;
  const auto tell = [&](int64_t tokens) {
    if (!sequence.request.on_progress) return;
    sequence.request.on_progress(
        {sequence.prompt_tokens, tokens, seconds_since(sequence.admitted)});
  };
  // A chunk may be a whole prompt: inside it progress counts the layers that are done.
  Clock::time_point told = Clock::now();
  const auto proceed = [&](int32_t layers_done) {
    if (seconds_since(told) >= kProgressSeconds) {
      tell(done + count * layers_done / shape.num_layers);
      told = Clock::now();
    }
    return !sequence.request.keep_going || sequence.request.keep_going();
  };
  const std::span<const float> logits = runner->prefill(
      std::span(sequence.tokens).subspan(static_cast<size_t>(done), static_cast<size_t>(count)),
      *sequence.kv, last, proceed, &abandoned);
  if (abandoned) {
    finish(sequence, FinishReason::kCancelled);
    return true;
  }
  tell(done + count);
  if (!last) return true;
  release_free_memory();
  sequence.state = Sequence::State::kDecode;
  sequence.prefilled = sequence.first_token = Clock::now();
  if (all_finite(logits) && shares_pages(sequence)) sequence.kv->publish(sequence.tokens);
  take_logits(sequence, logits);
  return true;
}

// Whether the engine must see this sequence's logits: to show them or to force a token.
static bool needs_logits(const Sequence& sequence) {
  return sequence.request.on_logits || !sequence.request.forced_tokens.empty();
}

bool Engine::Impl::decode_all() {
  std::vector<Sequence*> batch;
  std::vector<DecodeRow> rows;
  bool any_stopped = false;
  for (auto& sequence : running) {
    // A token sampled by this step's prefill is fed from the next step on.
    if (!sequence->kv || sequence->state != Sequence::State::kDecode) continue;
    if (wants_to_stop(*sequence)) {
      any_stopped = true;
      continue;
    }
    batch.push_back(sequence.get());
    rows.push_back({sequence->kv.get(), sequence->tokens.back(), needs_logits(*sequence)});
  }
  if (batch.empty()) return any_stopped;
  system->measure_mass = std::any_of(batch.begin(), batch.end(), [](const Sequence* sequence) {
    return sequence->request.measure_mass;
  });
  std::vector<DecodeOutcome> outcomes(rows.size());
  runner->decode(rows, outcomes);
  for (size_t i = 0; i < batch.size(); ++i) {
    const DecodeOutcome& outcome = outcomes[i];
    if (outcome.kind == DecodeOutcome::Kind::kNotYet) continue;
    ++batch[i]->decode_steps;
    if (outcome.kind == DecodeOutcome::Kind::kLogits) {
      take_logits(*batch[i], outcome.logits);
    } else if (!outcome.finite) {
      fail_not_finite(*batch[i]);
    } else {
      emit(*batch[i], outcome.token);
    }
  }
  return true;
}

void Engine::Impl::fail_not_finite(Sequence& sequence) {
  finish(sequence, FinishReason::kError,
         Error{ErrorCode::kModelFault,
               "the model gave logits that are not finite at position " +
                   std::to_string(sequence.tokens.size() - 1) +
                   "; the weights may be damaged, or need the range of --dtype bf16 or f32",
               ""});
}

void Engine::Impl::take_logits(Sequence& sequence, std::span<const float> logits) {
  if (!all_finite(logits)) {
    fail_not_finite(sequence);
    return;
  }
  if (sequence.request.on_logits) sequence.request.on_logits(logits);
  const auto& forced = sequence.request.forced_tokens;
  const auto step = sequence.answer().size();
  const int32_t token =
      step < forced.size() ? forced[step] : sequence.sampler.sample(logits, sequence.answer());
  if (step == 0) sequence.first_token = Clock::now();
  emit(sequence, token);
}

void Engine::Impl::emit(Sequence& sequence, int32_t token) {
  const auto& eos = generation.eos_ids;
  const bool is_eos = !sequence.request.ignore_eos && sequence.request.forced_tokens.empty() &&
                      std::find(eos.begin(), eos.end(), token) != eos.end();
  sequence.tokens.push_back(token);
  if (is_eos) {
    finish(sequence, FinishReason::kStop);
    return;
  }
  sequence.response.tokens.push_back(token);
  const StopMatcher::Step step =
      sequence.stops.push(sequence.decoder ? sequence.decoder->push(token) : std::string());
  if (!step.text.empty()) {
    sequence.response.text += step.text;
    if (sequence.request.on_text) sequence.request.on_text(step.text);
  }
  if (step.stopped) {
    finish(sequence, FinishReason::kStop);
  } else if (std::ssize(sequence.tokens) >= sequence.limit_tokens) {
    finish(sequence, FinishReason::kLength);
  }
}

void Engine::Impl::finish(Sequence& sequence, FinishReason reason, std::optional<Error> error) {
  sequence.response.finish = reason;
  sequence.response.error = std::move(error);
  // What was held back, half a character or a possible stop string, is the end of the text
  // unless a stop string matched.
  StopMatcher::Step rest =
      sequence.stops.push(sequence.decoder ? sequence.decoder->flush() : std::string());
  if (!rest.stopped) rest.text += sequence.stops.flush();
  if (!rest.text.empty()) {
    sequence.response.text += rest.text;
    if (sequence.request.on_text) sequence.request.on_text(rest.text);
  }
  fill_report(sequence);
  if (sequence.kv && reason != FinishReason::kError && shares_pages(sequence) &&
      sequence.state == Sequence::State::kDecode) {
    sequence.kv->publish(sequence.tokens);
  }
  release(sequence);
  finished[sequence.id] = std::move(sequence.response);
}

void Engine::Impl::remove_finished() {
  std::erase_if(running, [](const auto& sequence) { return sequence->kv == nullptr; });
}

}  // namespace clo
