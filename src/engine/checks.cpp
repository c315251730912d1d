#include "engine/checks.h"

#include "base/try.h"
#include "engine/memory.h"
#include "ops/params.h"
#include "reuse/persistent_heads.h"

namespace clo {

Status check_options(const EngineOptions& o) {
  const auto bad = [](const char* flag, const char* expected, int64_t found) {
    return Error{ErrorCode::kBadFlag,
                 std::string("expected ") + expected + ", found " + std::to_string(found), flag};
  };
  if (o.threads < 0 || o.threads > 1024)
    return bad("--threads", "0 (all cores) to 1024", o.threads);
  if (o.device_memory_bytes < 0) return bad("--device-memory", "a size", o.device_memory_bytes);
  if (o.host_memory_bytes < 0) return bad("--host-memory", "a size", o.host_memory_bytes);
  if (o.max_context_tokens < 0) return bad("--context", "a number of tokens", o.max_context_tokens);
  if (o.max_batch < 1 || o.max_batch > 512) return bad("--batch", "1 to 512", o.max_batch);
  if (o.prefill_chunk != 0 && (o.prefill_chunk < 16 || o.prefill_chunk > (1 << 20))) {
    return bad("--prefill-chunk", "16 to 1048576 tokens", o.prefill_chunk);
  }
  if (o.code_bits < 0 || o.code_bits > kMaxCodeBits || o.code_bits % 64 != 0) {
    return bad("--bits", "0 or a multiple of 64 up to 512", o.code_bits);
  }
  return validate(o.policy);
}

Status check_context(const EngineOptions& options, const ModelConfig& config) {
  if (options.max_context_tokens > config.max_positions) {
    return Error{ErrorCode::kBadFlag,
                 "expected at most " + std::to_string(config.max_positions) +
                     ", the model's limit, found " + std::to_string(options.max_context_tokens),
                 "--context"};
  }
  const int64_t context = max_context_tokens(config, options);
  if (config.sliding_window == 0 || context <= config.sliding_window) return Ok{};
  const std::string window = std::to_string(config.sliding_window);
  return Error{ErrorCode::kUnsupported,
               "the model attends to the last " + window + " tokens only (sliding_window is " +
                   window + "), which is not computed; a context of up to " + window +
                   " tokens is the same as full attention: expected --context " + window +
                   " or less, found " +
                   (options.max_context_tokens == 0 ? "none given, which means " : "") +
                   std::to_string(context),
               "--context"};
}

Status check_policy(const PolicyOptions& policy, const KvShape& shape) {
  CLO_TRY(validate(policy));
  if (selects_by_code(policy.select) && shape.code_bits == 0) {
    return Error{ErrorCode::kBadFlag, "contradict each other: hash selection needs codes",
                 policy.select == Select::kHash ? "--select hash and --bits 0"
                                                : "--select graded-hash and --bits 0"};
  }
  if (policy.dense_layers > shape.num_layers) {
    return Error{ErrorCode::kBadFlag,
                 "expected at most " + std::to_string(shape.num_layers) +
                     ", the model's layers, or all; found " + std::to_string(policy.dense_layers),
                 "--dense-layers"};
  }
  CLO_TRY(choose_resident_heads(policy, shape, {}, 0));
  return Ok{};
}

Status check_backend_has(const Request& request, Backend backend) {
  if (backend != Backend::kCuda) return Ok{};
  const auto missing = [](const char* what, const char* field) {
    return Error{ErrorCode::kUnsupported,
                 std::string(what) + " on the CPU backend only; use --backend cpu", field};
  };
  if (!request.masked_ranges.empty()) return missing("tokens are masked", "masked_ranges");
  return Ok{};
}

Status check_vocabulary(const Tokenizer& tokenizer, const ModelConfig& config,
                        const std::filesystem::path& model_dir) {
  if (tokenizer.vocab_size() <= config.vocab_size) return Ok{};
  return Error{ErrorCode::kBadFile,
               "the tokenizer has ids up to " + std::to_string(tokenizer.vocab_size() - 1) +
                   ", the model's vocabulary ends at " + std::to_string(config.vocab_size - 1) +
                   "; tokenizer.json and config.json are of different models",
               model_dir.string()};
}

}  // namespace clo
