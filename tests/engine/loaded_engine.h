#pragma once
// Engines and prompts that the engine's tests share.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "clo/engine.h"
#include "eval/random.h"

namespace clo {

inline EngineOptions tiny_options(const std::string& model) {
  EngineOptions options;
  options.model_dir = model == "recall-7m" ? std::string(CLO_SOURCE_DIR "/models/recall-7m")
                                           : CLO_SOURCE_DIR "/tests/golden/models/" + model;
  options.require_tokenizer = model == "recall-7m";
  options.guard_host_rows = true;
  options.prefill_chunk = 100;
  return options;
}

inline std::unique_ptr<Engine> load_engine(const EngineOptions& options) {
  auto engine = Engine::load(options);
  EXPECT_TRUE(engine) << engine.error().to_string();
  return engine ? std::move(*engine) : nullptr;
}

inline std::vector<int32_t> random_ids(int64_t count, int64_t vocab, uint64_t seed) {
  ItemRandom random(seed);
  std::vector<int32_t> ids;
  for (int64_t i = 0; i < count; ++i) {
    ids.push_back(static_cast<int32_t>(random.below(static_cast<uint64_t>(vocab))));
  }
  return ids;
}

inline Request ids_request(std::vector<int32_t> ids, int64_t new_tokens,
                           const PolicyOptions& policy) {
  Request request;
  request.prompt_ids = std::move(ids);
  request.max_new_tokens = new_tokens;
  request.ignore_eos = true;
  request.sampling = SamplingOptions{};
  request.policy = policy;
  return request;
}

inline Response answer_of(Engine& engine, Request request) {
  auto response = engine.generate(std::move(request));
  EXPECT_TRUE(response) << response.error().to_string();
  if (!response) return {};
  EXPECT_FALSE(response->error) << response->error->to_string();
  return std::move(*response);
}

// A preset with every head evictable.
inline PolicyOptions evictable(const std::string& name) {
  PolicyOptions policy = *preset(name);
  policy.persistent = PolicyOptions::Persistent::kPerLayer;
  policy.persistent_per_layer = 0;
  return policy;
}

}  // namespace clo
