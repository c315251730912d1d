// From a request to a sequence, and from the queue into the batch.
#include <algorithm>
#include <ctime>

#include "base/try.h"
#include "base/units.h"
#include "engine/backend.h"
#include "engine/checks.h"
#include "engine/impl.h"
#include "engine/memory.h"
#include "select/set_rule.h"

namespace clo {

PlanInput Engine::Impl::plan_input(const PolicyOptions& policy, int64_t capacity_tokens,
                                   int64_t batch) const {
  PlanInput input = clo::plan_input(config, options, shape, policy, capacity_tokens, batch);
  if (cuda) input.device_overhead_bytes = cuda->overhead_bytes();
  if (store) input.host_budget_bytes = store->arena().budget_bytes();
  return input;
}

SequenceKv::Options Engine::Impl::kv_options(const Sequence& sequence, int64_t batch) const {
  SequenceKv::Options kv;
  kv.policy = sequence.policy;
  kv.capacity_tokens = sequence.limit_tokens;
  kv.host_copy = shares_pages(sequence);
  kv.masked = sequence.request.masked_ranges;
  kv.prompt = sequence.prompt();
  kv.random_seed = static_cast<uint64_t>(sequence.id) * 0x9E3779B97F4A7C15u;
  const PlanInput input = plan_input(sequence.policy, sequence.limit_tokens, batch);
  if (input.fill_budget) kv.num_budget_heads = sketch_memory(input).num_persistent_heads;
  kv.may_demote = input.fill_budget && options.max_batch > 1;
  return kv;
}

bool Engine::Impl::give_way(int64_t missing_bytes) {
  const auto most =
      std::max_element(running.begin(), running.end(), [](const auto& a, const auto& b) {
        return a->kv->num_budget_heads() < b->kv->num_budget_heads();
      });
  if (most == running.end() || (*most)->kv->num_budget_heads() == 0) return false;
  SequenceKv& kv = *(*most)->kv;
  const int64_t each = std::max<int64_t>(kv.bytes_of_demotion(), 1);
  const int64_t written = runner->settle(kv);
  kv.demote(std::clamp<int64_t>(divide_up(missing_bytes, each), 1, kv.num_budget_heads()), written);
  runner->heads_changed(kv);
  return true;
}

Result<std::unique_ptr<SequenceKv>> Engine::Impl::make_kv(const Sequence& sequence) {
  // Those that wait will be here soon: what they would take back is not given.
  const int64_t batch =
      std::min<int64_t>(std::ssize(running) + std::ssize(queue), options.max_batch);
  SequenceKv::Options kv = kv_options(sequence, batch);
  for (;;) {
    auto made = SequenceKv::create(*system, kv);
    if (made) return made;
    if (made.error().code == ErrorCode::kHostMemory && kv.may_demote) {
      kv.may_demote = false;  // a copy in the store was for the case alone
      continue;
    }
    if (made.error().code != ErrorCode::kDeviceMemory) return made;
    const int64_t missing =
        SequenceKv::device_bytes(*system, kv) - (device->budget_bytes() - device->used_bytes());
    // Compressed heads shrink where they lie, so more of them do not mend an arena in pieces.
    const bool helps = missing > 0 || !shape.compressed();
    if (helps && give_way(missing)) continue;
    if (kv.num_budget_heads == 0) return made;
    kv.num_budget_heads = 0;  // the others keep what they need; this one does without
  }
}

Status Engine::Impl::check_fits(const PolicyOptions& policy, int64_t capacity_tokens) const {
  PlanInput input = plan_input(policy, capacity_tokens, 1);
  auto plan = plan_memory(input);
  if (!plan) return std::move(plan).error();
  return Ok{};
}

Result<std::vector<int32_t>> Engine::Impl::encode(std::string_view text, EncodeOptions how) const {
  if (tokenizer) return tokenizer->encode(text, how);
  return Error{ErrorCode::kUnsupported,
               "the model has no tokenizer.json, so it takes token ids only", options.model_dir};
}

Result<std::vector<int32_t>> Engine::Impl::prompt_ids(const Request& request) const {
  const int given =
      !request.messages.empty() + !request.prompt.empty() + !request.prompt_ids.empty();
  if (given > 1) {
    return Error{ErrorCode::kBadRequest,
                 "a request has one of messages, prompt and prompt_ids, not several", ""};
  }
  if (!request.prompt_ids.empty()) {
    if (!request.answer_prefix.empty()) {
      return Error{ErrorCode::kBadRequest,
                   "is text, so it cannot follow prompt_ids; append its ids to them",
                   "answer_prefix"};
    }
    for (const int32_t id : request.prompt_ids) {
      if (id < 0 || id >= config.vocab_size) {
        return Error{ErrorCode::kBadRequest,
                     "token id " + std::to_string(id) + " is outside the vocabulary of " +
                         std::to_string(config.vocab_size),
                     "prompt_ids"};
      }
    }
    return request.prompt_ids;
  }
  std::vector<int32_t> ids;
  if (!request.messages.empty()) {
    if (!chat_template) {
      return Error{ErrorCode::kUnsupported,
                   "the model has no chat template; give a raw prompt (--raw)", "messages"};
    }
    std::vector<ChatMessage> messages;
    for (const Message& message : request.messages) {
      messages.push_back({message.role, message.content});
    }
    CLO_ASSIGN(const std::string text, chat_template->render(messages, template_variables));
    // The template writes its own BOS, so the tokenizer must not add another.
    CLO_ASSIGN(ids, encode(text + request.answer_prefix, {.add_special_tokens = false}));
  } else {
    CLO_ASSIGN(ids, encode(request.prompt + request.answer_prefix, {.add_special_tokens = true}));
  }
  if (ids.empty()) {
    return Error{ErrorCode::kBadRequest, "the prompt is empty: there is nothing to continue", ""};
  }
  return ids;
}

namespace {

// Fails: kBadRequest for ranges that are empty, overlap, or leave the prompt.
Status check_ranges(std::span<const TokenRange> ranges, int64_t prompt_tokens, const char* field) {
  int64_t end = 0;
  for (const TokenRange& range : ranges) {
    if (range.first < end || range.end <= range.first || range.end > prompt_tokens) {
      return Error{ErrorCode::kBadRequest,
                   "expected ascending, disjoint ranges of the prompt's " +
                       std::to_string(prompt_tokens) + " tokens, found [" +
                       std::to_string(range.first) + ", " + std::to_string(range.end) + ")",
                   field};
    }
    end = range.end;
  }
  return Ok{};
}

// Fails: kBadRequest for ranges that are no ranges, or that hide what must be seen.
Status check_masked(const Request& request, int64_t prompt_tokens) {
  const std::vector<TokenRange>& ranges = request.masked_ranges;
  CLO_TRY(check_ranges(ranges, prompt_tokens, "masked_ranges"));
  if (ranges.empty()) return Ok{};
  if (ranges.back().end == prompt_tokens) {
    return Error{ErrorCode::kBadRequest,
                 "expected a last prompt token that is not masked, as the answer goes on from it; "
                 "found [" +
                     std::to_string(ranges.back().first) + ", " + std::to_string(prompt_tokens) +
                     ") of " + std::to_string(prompt_tokens) + " tokens",
                 "masked_ranges"};
  }
  const TokenMask mask(ranges);
  for (const TokenRange& watched : request.watched_ranges) {
    if (mask.num_visible(watched.first, watched.end) == watched.end - watched.first) continue;
    return Error{ErrorCode::kBadRequest,
                 "expected ranges apart from watched_ranges, as masked rows are never attended; "
                 "found masked tokens in the watched [" +
                     std::to_string(watched.first) + ", " + std::to_string(watched.end) + ")",
                 "masked_ranges"};
  }
  return Ok{};
}

}  // namespace

Result<std::unique_ptr<Sequence>> Engine::Impl::make_sequence(Request request) {
  CLO_ASSIGN(std::vector<int32_t> ids, prompt_ids(request));
  const int64_t prompt_tokens = std::ssize(ids);
  if (request.max_new_tokens < 1) {
    return Error{ErrorCode::kBadRequest,
                 "expected at least 1 new token, found " + std::to_string(request.max_new_tokens),
                 "max_new_tokens"};
  }
  if (prompt_tokens >= max_context) {
    const int64_t limit = config.sliding_window > 0 ? config.sliding_window : config.max_positions;
    const bool by_option = max_context < limit;
    return Error{ErrorCode::kTooLong,
                 "the prompt has " + std::to_string(prompt_tokens) + " tokens, " +
                     (by_option ? "--context allows " : "the model's limit is ") +
                     std::to_string(max_context) + " with at least one for the answer; shorten it" +
                     (by_option ? " or raise --context" : ""),
                 ""};
  }
  for (const int32_t id : request.forced_tokens) {
    if (id < 0 || id >= config.vocab_size) {
      return Error{ErrorCode::kBadRequest,
                   "forced token " + std::to_string(id) + " is outside the vocabulary",
                   "forced_tokens"};
    }
  }
  SamplingOptions sampling;
  if (request.sampling) {
    sampling = *request.sampling;
  } else if (generation.do_sample.value_or(false)) {
    sampling.temperature = generation.temperature.value_or(1.0f);
    sampling.top_k = generation.top_k.value_or(0);
    sampling.top_p = generation.top_p.value_or(1.0f);
    sampling.min_p = generation.min_p.value_or(0.0f);
    sampling.repetition_penalty = generation.repetition_penalty.value_or(1.0f);
  }
  CLO_TRY(validate(sampling));
  CLO_TRY(check_backend_has(request, options.backend));
  CLO_TRY(check_ranges(request.watched_ranges, prompt_tokens, "watched_ranges"));
  CLO_TRY(check_masked(request, prompt_tokens));
  const PolicyOptions policy =
      for_backend(request.policy.value_or(options.policy), options.backend);
  CLO_TRY(check_policy(policy, shape));

  auto sequence = std::make_unique<Sequence>(std::move(request), sampling);
  if (tokenizer) sequence->decoder.emplace(*tokenizer);
  sequence->policy = policy;
  sequence->prompt_tokens = prompt_tokens;
  // max_new_tokens may be as large as its type allows: the sum is not formed.
  sequence->limit_tokens =
      prompt_tokens + std::min(sequence->request.max_new_tokens, max_context - prompt_tokens);
  sequence->tokens = std::move(ids);
  sequence->submitted = Clock::now();
  CLO_TRY(check_fits(policy, sequence->limit_tokens));
  return sequence;
}

bool Engine::Impl::should_wait(const Sequence& sequence) const {
  if (!shares_pages(sequence)) return false;
  const auto mine = sequence.prompt();
  return std::any_of(running.begin(), running.end(), [&](const auto& other) {
    if (other->state != Sequence::State::kPrefill || !shares_pages(*other)) return false;
    const auto theirs = other->prompt();
    const auto [a, b] = std::mismatch(mine.begin(), mine.end(), theirs.begin(), theirs.end());
    // Worth waiting for only when a whole page more than what is stored already would be shared.
    const auto common = a - mine.begin();
    return common >= kPageTokens && common / kPageTokens * kPageTokens < std::ssize(mine) &&
           common / kPageTokens * kPageTokens > other->kv->reused_tokens();
  });
}

bool Engine::Impl::admit() {
  bool any = false;
  for (auto at = queue.begin(); at != queue.end() && std::ssize(running) < options.max_batch;) {
    Sequence& sequence = **at;
    if (should_wait(sequence)) {
      ++at;
      continue;
    }
    auto kv = make_kv(sequence);
    if (!kv) {
      // Running sequences will give memory back; with none running it will never fit.
      if (!running.empty()) return any;
      finish(sequence, FinishReason::kError, std::move(kv).error());
      at = queue.erase(at);
      any = true;
      continue;
    }
    sequence.kv = std::move(kv).value();
    sequence.kv->watched = sequence.request.watched_ranges;
    sequence.kv->measures_mass = sequence.request.measure_mass;
    runner->begin(*sequence.kv, sequence.sampler.options());
    sequence.state = Sequence::State::kPrefill;
    sequence.admitted = Clock::now();
    running.push_back(std::move(*at));
    at = queue.erase(at);
    any = true;
  }
  return any;
}

}  // namespace clo
