// Logits and greedy tokens against the Hugging Face library's, for every family, at positions 0
// and 1, round a page's end and past the original rotary length; through prefill and through
// decode. Made by tests/golden/make_models.py.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <functional>

#include "clo/engine.h"
#include "io/safetensors.h"

namespace clo {
namespace {

const std::filesystem::path kGolden = CLO_SOURCE_DIR "/tests/golden/models";

struct Golden {
  std::vector<int32_t> ids, positions, greedy;
  std::vector<float> logits, logits_bf16;
};

std::vector<float> values(const SafetensorsFile& file, const std::string& name) {
  const TensorView& view = file.tensors().at(name);
  std::vector<float> out(static_cast<size_t>(view.num_elements()));
  convert_to_f32(view.type, view.bytes, out.data(), view.num_elements());
  return out;
}

std::vector<int32_t> integers(const SafetensorsFile& file, const std::string& name) {
  const std::vector<float> floats = values(file, name);
  return {floats.begin(), floats.end()};
}

Golden load_golden(const std::string& name) {
  auto file = SafetensorsFile::open(kGolden / name / "golden.safetensors");
  if (!file) {
    ADD_FAILURE() << file.error().to_string();
    return {};
  }
  return {integers(*file, "ids"), integers(*file, "positions"), integers(*file, "greedy"),
          values(*file, "logits"), values(*file, "logits_bf16")};
}

std::filesystem::path model_dir(const std::string& name) {
  return name == "recall-7m" ? std::filesystem::path(CLO_SOURCE_DIR "/models/recall-7m")
                             : kGolden / name;
}

// 1 - cosine of two rows.
double cosine_difference(std::span<const float> a, std::span<const float> b) {
  double dot = 0, aa = 0, bb = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    dot += double{a[i]} * b[i];
    aa += double{a[i]} * a[i];
    bb += double{b[i]} * b[i];
  }
  return 1 - dot / std::sqrt(aa * bb);
}

double max_difference(std::span<const float> a, std::span<const float> b) {
  double worst = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    worst = std::max(worst, std::abs(double{a[i]} - double{b[i]}));
    if (std::isnan(a[i]) != std::isnan(b[i])) return INFINITY;
  }
  return worst;
}

class GoldenLogits : public testing::TestWithParam<const char*> {
 protected:
  std::unique_ptr<Engine> load(WeightType type, int32_t chunk = 512) {
    EngineOptions options;
    options.model_dir = model_dir(GetParam()).string();
    options.dtype = type;
    options.prefill_chunk = chunk;
    options.max_batch = 1;
    options.keep_prefixes = false;
    options.require_tokenizer = false;
    options.policy = *preset("dense");
    auto engine = Engine::load(options);
    EXPECT_TRUE(engine) << engine.error().to_string();
    return engine ? std::move(*engine) : nullptr;
  }

  // Logits after ids[0..positions[i]] for each i, the first token by prefill and each further one
  // by decode (prefill_tokens = 1), or the other way round.
  std::vector<std::vector<float>> rows(Engine& engine, const Golden& golden, bool by_decode) {
    std::vector<std::vector<float>> out;
    if (by_decode) {
      Request request;
      request.prompt_ids = {golden.ids[0]};
      request.forced_tokens.assign(golden.ids.begin() + 1, golden.ids.end());
      request.forced_tokens.push_back(golden.ids[0]);
      request.max_new_tokens = std::ssize(golden.ids);
      int32_t position = 0;
      request.on_logits = [&](std::span<const float> logits) {
        if (std::find(golden.positions.begin(), golden.positions.end(), position++) !=
            golden.positions.end()) {
          out.emplace_back(logits.begin(), logits.end());
        }
      };
      EXPECT_TRUE(engine.generate(std::move(request)));
      return out;
    }
    for (const int32_t position : golden.positions) {
      Request request;
      request.prompt_ids.assign(golden.ids.begin(), golden.ids.begin() + position + 1);
      request.max_new_tokens = 1;
      request.on_logits = [&](std::span<const float> logits) {
        out.emplace_back(logits.begin(), logits.end());
      };
      EXPECT_TRUE(engine.generate(std::move(request)));
    }
    return out;
  }

  // Calls check(found, the library's f32 logits, its bf16 ones) for every position, by prefill and
  // by decode.
  using Row = std::span<const float>;
  void each_row(WeightType type, const std::function<void(Row, Row, Row)>& check) {
    const Golden golden = load_golden(GetParam());
    const auto engine = load(type);
    ASSERT_NE(engine, nullptr);
    const auto vocab = static_cast<size_t>(engine->vocab_size());
    for (const bool by_decode : {false, true}) {
      const auto found = rows(*engine, golden, by_decode);
      ASSERT_EQ(found.size(), golden.positions.size());
      for (size_t i = 0; i < found.size(); ++i) {
        SCOPED_TRACE("position " + std::to_string(golden.positions[i]) +
                     (by_decode ? " by decode" : " by prefill"));
        check(found[i], Row(golden.logits).subspan(i * vocab, vocab),
              Row(golden.logits_bf16).subspan(i * vocab, vocab));
      }
    }
  }
};

TEST_P(GoldenLogits, AgreeInF32) {
  each_row(WeightType::kF32,
           [](Row found, Row expected, Row) { EXPECT_LT(max_difference(found, expected), 1e-4); });
}

TEST_P(GoldenLogits, AgreeInBf16) {
  // The engine keeps activations in f32, the library rounds them: so the bound is on the direction,
  // and it must hold against the library's f32 logits too.
  each_row(WeightType::kBF16, [](Row found, Row expected, Row expected_bf16) {
    EXPECT_LT(cosine_difference(found, expected_bf16), 1e-3);
    EXPECT_LT(cosine_difference(found, expected), 1e-3);
  });
}

// f16 keeps three bits more than bf16, so errors are 8 times and 1 - cosine 64 times smaller.
TEST_P(GoldenLogits, AgreeInF16) {
  each_row(WeightType::kF16, [](Row found, Row expected, Row) {
    EXPECT_LT(cosine_difference(found, expected), 1e-3 / 64);
  });
}

TEST_P(GoldenLogits, GreedyTokensAgree) {
  const Golden golden = load_golden(GetParam());
  // A chunk that divides neither the prompt nor a page.
  const auto engine = load(WeightType::kF32, 100);
  ASSERT_NE(engine, nullptr);
  Request request;
  request.prompt_ids = golden.ids;
  request.max_new_tokens = std::ssize(golden.greedy);
  request.ignore_eos = true;
  const auto answer = engine->generate(std::move(request));
  ASSERT_TRUE(answer);
  EXPECT_EQ(answer->tokens, golden.greedy);
}

INSTANTIATE_TEST_SUITE_P(Families, GoldenLogits,
                         testing::Values("llama3", "llama31", "llama_linear", "llama_tied", "qwen2",
                                         "qwen2_yarn", "qwen3", "qwen3_group3", "sharded",
                                         "recall-7m"),
                         [](const auto& instance) {
                           std::string name = instance.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

}  // namespace
}  // namespace clo
