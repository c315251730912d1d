#pragma once
// What can be wrong with options before anything is loaded: alone, and beside a model. Engine::load
// and `clo inspect` ask the same questions, so that what one accepts the other does not refuse.
#include <filesystem>

#include "clo/engine.h"
#include "io/model_config.h"
#include "ops/kv_layout.h"
#include "text/tokenizer.h"

namespace clo {

// The options alone. Fails: kBadFlag.
Status check_options(const EngineOptions& options);
// Fails: kBadFlag when more context is asked for than the model has, kUnsupported when it would
// pass the model's sliding window.
Status check_context(const EngineOptions& options, const ModelConfig& config);
// Fails: kBadFlag when the policy names heads, layers or codes that the model does not have.
Status check_policy(const PolicyOptions& policy, const KvShape& shape);
// Fails: kUnsupported when the request asks for what the backend does not mask.
Status check_backend_has(const Request& request, Backend backend);
// Fails: kBadFile when the tokenizer has ids that the model has not.
Status check_vocabulary(const Tokenizer& tokenizer, const ModelConfig& config,
                        const std::filesystem::path& model_dir);

}  // namespace clo
