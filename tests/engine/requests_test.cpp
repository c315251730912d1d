// Requests that join and leave: isolation, shared prefixes, cancel, limits, bad requests.
#include <cmath>
#include <filesystem>
#include <fstream>

#include "loaded_engine.h"

namespace clo {
namespace {

// Steps until all are done and takes the answers in order.
std::vector<Response> run_all(Engine& engine, const std::vector<RequestId>& ids) {
  while (engine.step()) {
  }
  std::vector<Response> responses;
  for (const RequestId id : ids) {
    auto response = engine.take(id);
    EXPECT_TRUE(response);
    responses.push_back(response ? std::move(*response) : Response{});
  }
  return responses;
}

TEST(Batch, EachSequenceAnswersAsIfAlone) {
  const auto engine = load_engine(tiny_options("qwen3"));
  ASSERT_NE(engine, nullptr);
  const std::vector<std::string> presets = {"default", "dense", "hata", "clo-paper", "default"};
  const std::vector<int64_t> lengths = {5, 300, 701, 512, 257};
  std::vector<std::vector<int32_t>> prompts, alone;
  for (size_t i = 0; i < lengths.size(); ++i) {
    prompts.push_back(random_ids(lengths[i], engine->vocab_size(), 100 + i));
    alone.push_back(answer_of(*engine, ids_request(prompts[i], 40 + 5 * static_cast<int64_t>(i),
                                                   *preset(presets[i])))
                        .tokens);
  }
  engine->drop_prefixes();
  // Submitted at different steps, so that they join and leave a running batch.
  std::vector<RequestId> ids;
  for (size_t i = 0; i < lengths.size(); ++i) {
    ids.push_back(*engine->submit(
        ids_request(prompts[i], 40 + 5 * static_cast<int64_t>(i), *preset(presets[i]))));
    for (int step = 0; step < 7; ++step) engine->step();
  }
  const auto responses = run_all(*engine, ids);
  for (size_t i = 0; i < ids.size(); ++i) EXPECT_EQ(responses[i].tokens, alone[i]) << i;
  EXPECT_EQ(engine->memory().pages_in_use, 0);
}

TEST(Prefix, SecondRequestReusesPagesAndAnswersTheSame) {
  const auto engine = load_engine(tiny_options("llama31"));
  ASSERT_NE(engine, nullptr);
  for (const char* name : {"dense", "hata", "clo-paper", "default"}) {
    engine->drop_prefixes();
    const auto prompt = random_ids(800, engine->vocab_size(), 11);
    const Response first = answer_of(*engine, ids_request(prompt, 30, *preset(name)));
    const Response second = answer_of(*engine, ids_request(prompt, 30, *preset(name)));
    EXPECT_EQ(first.report.reused_tokens, 0);
    EXPECT_EQ(second.report.reused_tokens, 768) << name;
    EXPECT_EQ(first.tokens, second.tokens) << name;
  }
}

TEST(Prefix, RequestsSubmittedTogetherShareOnePrefill) {
  const auto engine = load_engine(tiny_options("llama3"));
  ASSERT_NE(engine, nullptr);
  const auto document = random_ids(1000, engine->vocab_size(), 12);
  std::vector<RequestId> ids;
  for (int32_t i = 0; i < 4; ++i) {
    auto prompt = document;
    prompt.push_back(i);
    ids.push_back(*engine->submit(ids_request(prompt, 10, *preset("default"))));
  }
  const auto responses = run_all(*engine, ids);
  EXPECT_EQ(responses[0].report.reused_tokens, 0);
  for (size_t i = 1; i < 4; ++i) EXPECT_EQ(responses[i].report.reused_tokens, 768);
}

TEST(Prefix, ADifferentBeginningSharesNothing) {
  const auto engine = load_engine(tiny_options("llama3"));
  ASSERT_NE(engine, nullptr);
  auto prompt = random_ids(800, engine->vocab_size(), 13);
  answer_of(*engine, ids_request(prompt, 5, *preset("default")));
  prompt[3] = (prompt[3] + 1) % 100;
  const Response other = answer_of(*engine, ids_request(prompt, 5, *preset("default")));
  EXPECT_EQ(other.report.reused_tokens, 0);
}

TEST(Cancel, AtAnyStepFreesEverything) {
  const auto engine = load_engine(tiny_options("llama3"));
  ASSERT_NE(engine, nullptr);
  const int64_t idle_bytes = engine->memory().device_used_bytes;
  for (int after = 0; after < 40; ++after) {
    const auto prompt = random_ids(640, engine->vocab_size(), 200 + static_cast<uint64_t>(after));
    const RequestId kept = *engine->submit(ids_request({1, 2, 3}, 50, *preset("default")));
    const RequestId id =
        *engine->submit(ids_request(prompt, 50, *preset(after % 2 ? "default" : "clo-paper")));
    for (int step = 0; step < after; ++step) engine->step();
    engine->cancel(id);
    const auto response = engine->take(id);
    ASSERT_TRUE(response) << after;
    EXPECT_EQ(response->finish, FinishReason::kCancelled);
    while (engine->step()) {
    }
    EXPECT_EQ(engine->take(kept)->tokens.size(), 50u) << "the other request goes on";
    EXPECT_EQ(engine->memory().pages_in_use, 0);
    EXPECT_EQ(engine->memory().device_used_bytes, idle_bytes);
  }
}

TEST(Cancel, BetweenLayersOfAPrefill) {
  const auto engine = load_engine(tiny_options("llama3"));
  ASSERT_NE(engine, nullptr);
  int asked = 0;
  Request request = ids_request(random_ids(640, engine->vocab_size(), 1), 50, *preset("default"));
  request.keep_going = [&] { return ++asked < 6; };
  const Response response = answer_of(*engine, std::move(request));
  EXPECT_EQ(response.finish, FinishReason::kCancelled);
  EXPECT_TRUE(response.tokens.empty());
  EXPECT_EQ(engine->memory().pages_in_use, 0);
}

TEST(Limits, TheAnswerEndsAtTheModelsLength) {
  const auto engine = load_engine(tiny_options("llama3"));  // 2,048 positions
  ASSERT_NE(engine, nullptr);
  const Response response = answer_of(
      *engine, ids_request(random_ids(2040, engine->vocab_size(), 2), 100, *preset("default")));
  EXPECT_EQ(response.finish, FinishReason::kLength);
  EXPECT_EQ(response.tokens.size(), 8u);
}

TEST(BadRequest, IsRefusedWithItsReason) {
  const auto engine = load_engine(tiny_options("llama3"));
  ASSERT_NE(engine, nullptr);
  const auto refusal = [&](Request request) {
    auto id = engine->submit(std::move(request));
    EXPECT_FALSE(id);
    return id ? Error{} : id.error();
  };
  const PolicyOptions policy = *preset("default");
  EXPECT_EQ(refusal(ids_request({}, 5, policy)).code, ErrorCode::kUnsupported);  // no tokenizer
  EXPECT_EQ(refusal(ids_request({5, 4000}, 5, policy)).code, ErrorCode::kBadRequest);
  EXPECT_EQ(refusal(ids_request({5, -1}, 5, policy)).code, ErrorCode::kBadRequest);
  EXPECT_EQ(refusal(ids_request({5}, 0, policy)).code, ErrorCode::kBadRequest);
  const Error too_long = refusal(ids_request(random_ids(2048, 100, 1), 5, policy));
  EXPECT_EQ(too_long.code, ErrorCode::kTooLong);
  EXPECT_NE(too_long.message.find("2048"), std::string::npos);
  Request both = ids_request({5}, 5, policy);
  both.prompt = "text";
  EXPECT_EQ(refusal(std::move(both)).code, ErrorCode::kBadRequest);
  Request hot = ids_request({5}, 5, policy);
  hot.sampling = SamplingOptions{.temperature = -1};
  EXPECT_EQ(refusal(std::move(hot)).code, ErrorCode::kBadFlag);
  for (const std::vector<TokenRange>& ranges :
       {std::vector<TokenRange>{{1, 1}}, {{2, 6}}, {{2, 4}, {3, 5}}, {{3, 4}, {1, 2}}, {{-1, 2}}}) {
    Request watched = ids_request({5, 6, 7, 8, 9}, 5, policy);
    watched.watched_ranges = ranges;
    EXPECT_EQ(refusal(std::move(watched)).where, "watched_ranges");
  }
  Request prefixed = ids_request({5}, 5, policy);
  prefixed.answer_prefix = "text";
  EXPECT_EQ(refusal(std::move(prefixed)).where, "answer_prefix");
  PolicyOptions missing_head = policy;
  missing_head.persistent = PolicyOptions::Persistent::kList;
  missing_head.persistent_heads = {{0, 9}};
  const Error head = refusal(ids_request({5}, 5, missing_head));
  EXPECT_EQ(head.code, ErrorCode::kBadFlag);
  EXPECT_NE(head.message.find("0:9"), std::string::npos);
}

// Every head and step counts the prompt's watched rows; a set that covers everything reads them
// all, a small one some, and dense heads are not counted.
TEST(Watched, RowsOfTheRangesAreCounted) {
  const auto engine = load_engine(tiny_options("llama31"));
  ASSERT_NE(engine, nullptr);
  const auto counted = [&](const PolicyOptions& policy) {
    Request request = ids_request(random_ids(800, engine->vocab_size(), 3), 20, policy);
    request.watched_ranges = {{100, 130}, {400, 410}};
    return answer_of(*engine, std::move(request)).report;
  };
  PolicyOptions policy = evictable("default");
  policy.set_tokens = 900;
  const Report all = counted(policy);
  EXPECT_EQ(all.total.watched_rows, 40 * all.num_heads * all.decode_steps);
  EXPECT_EQ(all.total.watched_rows_attended, all.total.watched_rows);
  policy.set_tokens = 100;
  const Report some = counted(policy);
  EXPECT_EQ(some.total.watched_rows, all.total.watched_rows);
  EXPECT_GT(some.total.watched_rows_attended, 0);
  EXPECT_LT(some.total.watched_rows_attended, some.total.watched_rows);
  EXPECT_EQ(counted(*preset("dense")).total.watched_rows, 0);
}

// The prompt ends with the prefix: token by token as if the model had begun its answer so.
TEST(AnswerPrefix, EndsThePrompt) {
  const auto engine = load_engine(tiny_options("recall-7m"));
  ASSERT_NE(engine, nullptr);
  Request plain;
  plain.messages = {{"user", "What is the secret word for blue-harbor?"}};
  Request prefixed = plain;
  prefixed.answer_prefix = "The secret word";
  std::vector<int32_t> ids = *engine->tokenize(plain);
  const std::vector<int32_t> more = *engine->encode(prefixed.answer_prefix);
  ids.insert(ids.end(), more.begin(), more.end());
  EXPECT_EQ(*engine->tokenize(prefixed), ids);
  Request raw;
  raw.prompt = "Once";
  raw.answer_prefix = " more";
  EXPECT_EQ(*engine->tokenize(raw), *engine->encode("Once more"));
  std::string bytes;
  const std::vector<int32_t> once = *engine->encode("Once more");
  for (const int32_t id : once) bytes += engine->token_bytes(id);
  EXPECT_EQ(bytes, "Once more");
}

TEST(Budget, TooSmallNamesTheSmallestThatWorks) {
  EngineOptions options = tiny_options("llama3");
  options.max_batch = 1;
  options.device_memory_bytes = 400'000;
  auto engine = Engine::load(options);
  std::string message;
  if (engine) {
    auto id = (*engine)->submit(ids_request(random_ids(1500, 100, 1), 5, *preset("default")));
    ASSERT_FALSE(id);
    EXPECT_EQ(id.error().code, ErrorCode::kDeviceMemory);
    message = id.error().message;
  } else {
    EXPECT_EQ(engine.error().code, ErrorCode::kDeviceMemory);
    message = engine.error().message;
  }
  const size_t at = message.find("need at least ");
  const size_t alone = message.find("alone need ");
  ASSERT_TRUE(at != std::string::npos || alone != std::string::npos) << message;
  // Follow the advice until it works: at most weights first, then the sequence.
  for (int tries = 0; tries < 3; ++tries) {
    const size_t number = message.find("need at least ") != std::string::npos
                              ? message.find("need at least ") + 14
                              : message.find("alone need ") + 11;
    options.device_memory_bytes = std::stoll(message.substr(number)) + 64 * 16;
    engine = Engine::load(options);
    if (!engine) {
      message = engine.error().message;
      continue;
    }
    auto id = (*engine)->submit(ids_request(random_ids(1500, 100, 1), 5, *preset("default")));
    if (!id) {
      message = id.error().message;
      continue;
    }
    while ((*engine)->step()) {
    }
    const auto response = (*engine)->take(*id);
    ASSERT_TRUE(response);
    EXPECT_FALSE(response->error) << response->error->to_string();
    return;
  }
  FAIL() << "the advice did not lead to a budget that works: " << message;
}

TEST(Budget, HostTooSmallForThePrompt) {
  EngineOptions options = tiny_options("llama3");
  options.host_memory_bytes = 700'000;
  const auto engine = load_engine(options);
  ASSERT_NE(engine, nullptr);
  auto id = engine->submit(ids_request(random_ids(1500, 100, 1), 5, *preset("default")));
  ASSERT_FALSE(id);
  EXPECT_EQ(id.error().code, ErrorCode::kHostMemory);
}

TEST(Budget, WhatIsLeftKeepsHeadsPersistent) {
  EngineOptions options = tiny_options("llama3");
  options.max_batch = 1;
  const auto prompt = random_ids(1500, 100, 1);
  std::vector<int32_t> reference;
  int32_t last = -1;
  for (const int64_t budget : {3 << 20, 4 << 20, 6 << 20, 64 << 20}) {
    options.device_memory_bytes = budget;
    const auto engine = load_engine(options);
    ASSERT_NE(engine, nullptr);
    const Response response = answer_of(*engine, ids_request(prompt, 40, *preset("default")));
    EXPECT_GE(response.report.num_resident_heads, last);
    last = response.report.num_resident_heads;
    EXPECT_LE(engine->memory().device_peak_bytes, budget);
    if (reference.empty()) reference = response.tokens;
    EXPECT_EQ(response.tokens, reference);
    if (budget == 64 << 20) {
      EXPECT_EQ(response.report.num_resident_heads, response.report.num_heads);
      EXPECT_EQ(response.report.total.rows_fetched, 0);
    }
  }
}

// One request fills the budget with persistent heads; those that join later, in the middle of its
// prefill or of its answer, take heads from it, and nobody's answer changes.
TEST(Budget, PersistentHeadsGiveWayToOtherRequests) {
  PolicyOptions policy = *preset("default");
  policy.threshold = 2;  // every step chooses anew, so that a lost label changes nothing
  for (const auto& [select, kv_type] :
       {std::pair{Select::kHash, KvType::kAuto}, std::pair{Select::kExact, KvType::kAuto},
        std::pair{Select::kHash, KvType::kInt8}, std::pair{Select::kExact, KvType::kFp8}}) {
    policy.select = select;
    for (const int steps_between : {3, 12, 40}) {
      EngineOptions options = tiny_options("llama3");
      options.kv_type = kv_type;
      options.max_batch = 3;
      const std::vector<int64_t> lengths = {900, 700, 1100};
      std::vector<std::vector<int32_t>> prompts, alone;
      int64_t resident_bytes = 0;  // of the first, with all its heads
      {
        const auto engine = load_engine(options);
        for (size_t i = 0; i < lengths.size(); ++i) {
          prompts.push_back(random_ids(lengths[i], 100, 30 + i));
          alone.push_back(answer_of(*engine, ids_request(prompts[i], 60, policy)).tokens);
        }
        PolicyOptions all = policy;
        all.persistent = PolicyOptions::Persistent::kAll;
        engine->drop_prefixes();
        const int64_t idle_bytes = engine->memory().device_used_bytes;
        resident_bytes =
            answer_of(*engine, ids_request(prompts[0], 60, all)).report.device_kv_bytes;
        options.device_memory_bytes = idle_bytes + resident_bytes * 8 / 5;
      }
      const auto engine = load_engine(options);
      ASSERT_NE(engine, nullptr);
      const int64_t idle_bytes = engine->memory().device_used_bytes;
      std::vector<RequestId> ids;
      for (const auto& prompt : prompts) {
        ids.push_back(*engine->submit(ids_request(prompt, 60, policy)));
        for (int step = 0; step < steps_between; ++step) engine->step();
      }
      const auto responses = run_all(*engine, ids);
      for (size_t i = 0; i < ids.size(); ++i) {
        EXPECT_EQ(responses[i].tokens, alone[i]) << i << " after " << steps_between;
      }
      EXPECT_GT(responses[0].report.num_demoted_heads, 0);
      EXPECT_LT(responses[0].report.num_resident_heads, responses[0].report.num_heads);
      EXPECT_GT(responses[0].report.total.rows_fetched, 0);
      EXPECT_LE(engine->memory().device_peak_bytes, options.device_memory_bytes);
      EXPECT_EQ(engine->memory().pages_in_use, 0);
      engine->drop_prefixes();
      EXPECT_EQ(engine->memory().device_used_bytes, idle_bytes);
    }
  }
}

TEST(ModelFault, NanFailsItsRequestAndNoOther) {
  // A copy of a tiny model whose embedding of token 7 is NaN.
  const std::filesystem::path source = CLO_SOURCE_DIR "/tests/golden/models/llama3";
  const auto folder = std::filesystem::temp_directory_path() / "clo_nan_model";
  std::filesystem::remove_all(folder);
  std::filesystem::copy(source, folder);
  {
    std::fstream file(folder / "model.safetensors",
                      std::ios::in | std::ios::out | std::ios::binary);
    uint64_t header = 0;
    file.read(reinterpret_cast<char*>(&header), 8);
    std::string json(header, '\0');
    file.read(json.data(), static_cast<std::streamsize>(header));
    const size_t at = json.find("data_offsets", json.find("model.embed_tokens.weight"));
    const auto begin = std::stoull(json.substr(json.find('[', at) + 1));
    const float nan = std::nanf("");
    file.seekp(static_cast<std::streamoff>(8 + header + begin + 7 * 64 * 4));
    file.write(reinterpret_cast<const char*>(&nan), 4);
  }
  EngineOptions options = tiny_options("llama3");
  options.model_dir = folder.string();
  const auto engine = load_engine(options);
  ASSERT_NE(engine, nullptr);
  const RequestId good = *engine->submit(ids_request({1, 2, 3}, 20, *preset("default")));
  const RequestId bad = *engine->submit(ids_request({4, 7, 5}, 20, *preset("default")));
  while (engine->step()) {
  }
  const auto failed = engine->take(bad);
  ASSERT_TRUE(failed && failed->error);
  EXPECT_EQ(failed->error->code, ErrorCode::kModelFault);
  EXPECT_EQ(failed->finish, FinishReason::kError);
  EXPECT_EQ(engine->take(good)->tokens.size(), 20u);
  EXPECT_EQ(engine->memory().pages_in_use, 0);
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace clo
