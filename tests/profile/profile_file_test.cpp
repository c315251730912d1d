#include "profile/profile_file.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <fstream>

#include "io/safetensors.h"
#include "io/safetensors_writer.h"
#include "profile/gates.h"
#include "profile/plan.h"

namespace clo {
namespace {

ModelConfig small_config() {
  ModelConfig config;
  config.architecture = "LlamaForCausalLM";
  config.num_layers = 2;
  config.num_q_heads = 4;
  config.num_kv_heads = 2;
  config.head_dim = 16;
  config.hidden_size = 64;
  config.vocab_size = 100;
  return config;
}

KvShape small_shape() { return {2, 4, 2, 16, DType::kBF16, 64}; }

// Every tensor filled with numbers of its own, in [0, 1] and exact in bf16.
Profile full_profile() {
  Profile profile;
  float next = 0;
  const auto fill = [&](std::vector<float>& values, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      next = next >= 1 ? 0 : next + 1.0f / 128;
      values.push_back(next);
    }
  };
  fill(profile.heads.importance, 8);
  fill(profile.heads.difficulty, 4);
  fill(profile.heads.hash_weights, 4 * 17 * 64);
  profile.code_bits = 64;
  for (const ProfileField& field : statistics_fields(profile.statistics, small_shape())) {
    int64_t count = 1;
    for (const int64_t extent : field.shape) count *= extent;
    fill(*field.values, count);
  }
  profile.facts = {{"texts", "a \"quoted\" name"}, {"steps", "12"}};
  return profile;
}

class ProfileFile : public testing::Test {
 protected:
  std::string path_ = testing::TempDir() + "clo_profile_file_test";
  void write(const std::string& bytes) {
    std::ofstream(path_, std::ios::binary | std::ios::trunc) << bytes;
  }
  void TearDown() override { std::remove(path_.c_str()); }
};

// What a file has under a known name is read or refused: never passed over.
TEST_F(ProfileFile, ATensorOfAnotherTypeIsRefused) {
  std::string header = R"({"__metadata__":{"format":"clo-profile-2","model":")" +
                       model_fingerprint(small_config()) +
                       R"("},"importance":{"dtype":"I8","shape":[2,4],"data_offsets":[0,8]}})";
  std::string bytes(8, '\0');
  for (int i = 0; i < 8; ++i)
    bytes[static_cast<size_t>(i)] = static_cast<char>(header.size() >> (8 * i));
  write(bytes + header + std::string(8, '\1'));
  const auto loaded = load_whole_profile(path_, small_config());
  ASSERT_FALSE(loaded);
  EXPECT_EQ(loaded.error().where, path_);
  for (const char* part : {"importance", "I8", "F32, F16 or BF16"}) {
    EXPECT_NE(loaded.error().message.find(part), std::string::npos) << loaded.error().message;
  }
}

TEST_F(ProfileFile, ReadsBackWhatWasWritten) {
  Profile profile = full_profile();
  write(profile_bytes(profile, small_config()));
  auto loaded = load_whole_profile(path_, small_config());
  ASSERT_TRUE(loaded) << loaded.error().to_string();
  EXPECT_EQ(loaded->heads.importance, profile.heads.importance);
  EXPECT_EQ(loaded->heads.difficulty, profile.heads.difficulty);
  EXPECT_EQ(loaded->heads.hash_weights, profile.heads.hash_weights);
  EXPECT_EQ(loaded->code_bits, 64);
  EXPECT_EQ(loaded->facts.at("texts"), "a \"quoted\" name");
  EXPECT_EQ(loaded->facts.at("format"), "clo-profile-3");
  const auto written = statistics_fields(profile.statistics, small_shape());
  const auto read = statistics_fields(loaded->statistics, small_shape());
  for (size_t i = 0; i < written.size(); ++i) {
    EXPECT_EQ(*read[i].values, *written[i].values) << written[i].name;
  }
  auto used = load_profile(path_, small_config(), 64);
  ASSERT_TRUE(used);
  EXPECT_EQ(used->hash_weights, profile.heads.hash_weights);
}

TEST_F(ProfileFile, NamesOtherBitsOtherModelsAndOtherVersions) {
  write(profile_bytes(full_profile(), small_config()));
  const auto bits = load_profile(path_, small_config(), 128);
  ASSERT_FALSE(bits);
  for (const char* part : {"128 bits", "64 bits", "--bits 64"}) {
    EXPECT_NE(bits.error().message.find(part), std::string::npos) << bits.error().message;
  }
  ModelConfig other = small_config();
  other.rope.theta = 1;
  const auto model = load_profile(path_, other, 64);
  ASSERT_FALSE(model);
  EXPECT_NE(model.error().message.find(model_fingerprint(small_config())), std::string::npos);
  EXPECT_NE(model.error().message.find(model_fingerprint(other)), std::string::npos);

  const std::vector<float> importance(8, 0.25f);
  const NewTensor tensor = {"importance", {2, 4}, importance};
  const std::string id = model_fingerprint(small_config());
  write(safetensors_bytes({&tensor, 1}, {{"format", "clo-profile-1"}, {"model", id}}));
  auto first = load_whole_profile(path_, small_config());
  ASSERT_TRUE(first) << first.error().to_string();
  EXPECT_EQ(first->heads.importance, importance);
  EXPECT_FALSE(first->statistics.measured());
  write(safetensors_bytes({&tensor, 1}, {{"format", "clo-profile-4"}, {"model", id}}));
  EXPECT_FALSE(load_whole_profile(path_, small_config()));
}

// Older files know no bias of keys.
TEST_F(ProfileFile, OlderHashWeightsHaveABiasOfZero) {
  std::vector<float> weights(4 * 16 * 64);
  for (size_t i = 0; i < weights.size(); ++i) weights[i] = static_cast<float>(i % 31 + 1);
  const NewTensor tensor = {"hash_weights", {2, 2, 16, 64}, weights, DType::kBF16};
  const std::string id = model_fingerprint(small_config());
  for (const char* format : {"clo-profile-1", "clo-profile-2"}) {
    write(safetensors_bytes({&tensor, 1}, {{"format", format}, {"model", id}, {"context", "64"}}));
    const auto loaded = load_profile(path_, small_config(), 64);
    ASSERT_TRUE(loaded) << loaded.error().to_string();
    ASSERT_EQ(loaded->hash_weights.size(), 4u * 17 * 64);
    for (size_t h = 0; h < 4; ++h) {
      for (size_t i = 0; i < 17 * 64; ++i) {
        ASSERT_EQ(loaded->hash_weights[h * 17 * 64 + i],
                  i < 16 * 64 ? weights[h * 16 * 64 + i] : 0.0f);
      }
    }
  }
  // A newer file of that shape, or an older one of the newer, is not what it says.
  write(safetensors_bytes({&tensor, 1}, {{"format", "clo-profile-3"}, {"model", id}}));
  const auto short_of = load_profile(path_, small_config(), 64);
  ASSERT_FALSE(short_of);
  EXPECT_NE(short_of.error().message.find("17"), std::string::npos) << short_of.error().message;
}

TEST_F(ProfileFile, KnowsTheLongestContextOfItsHashWeights) {
  Profile profile = full_profile();
  const auto tokens_of = [&](const char* context) -> Result<int64_t> {
    profile.facts["context"] = context;
    write(profile_bytes(profile, small_config()));
    auto loaded = load_profile(path_, small_config(), profile.code_bits);
    if (!loaded) return std::move(loaded).error();
    return loaded->hash_tokens;
  };
  EXPECT_EQ(*tokens_of("2048"), 2048);
  EXPECT_EQ(*tokens_of("2048,32768,8192"), 32768);
  for (const char* bad : {"many", "2048,x", "-5", "2048 8192", ",", "99999999999999999999"}) {
    const auto refused = tokens_of(bad);
    ASSERT_FALSE(refused) << bad;
    EXPECT_NE(refused.error().message.find(bad), std::string::npos);
  }
  profile.heads.hash_weights.clear();
  profile.code_bits = 0;
  profile.statistics = {};
  EXPECT_EQ(*tokens_of("2048"), 0);  // nothing was trained
}

TEST_F(ProfileFile, LeavesOutWhatWasNotMeasured) {
  Profile profile = full_profile();
  profile.heads.hash_weights.clear();
  profile.heads.importance.clear();
  profile.code_bits = 0;
  write(profile_bytes(profile, small_config()));
  auto loaded = load_profile(path_, small_config(), 256);
  ASSERT_TRUE(loaded) << loaded.error().to_string();
  EXPECT_TRUE(loaded->hash_weights.empty());
  EXPECT_TRUE(loaded->importance.empty());
}

TEST_F(ProfileFile, RefusesStatisticsWithHoles) {
  for (const bool of_hash : {false, true}) {
    Profile profile = full_profile();
    (of_hash ? profile.statistics.weight_trained : profile.statistics.entropy).clear();
    write(profile_bytes(profile, small_config()));
    const auto loaded = load_whole_profile(path_, small_config());
    ASSERT_FALSE(loaded);
    EXPECT_NE(loaded.error().message.find(of_hash ? "weight_trained" : "entropy"),
              std::string::npos);
  }
  Profile profile = full_profile();  // without hashes none of their figures is there
  for (const ProfileField& field : statistics_fields(profile.statistics, small_shape())) {
    if (is_of_hash(field)) field.values->clear();
  }
  write(profile_bytes(profile, small_config()));
  EXPECT_TRUE(load_whole_profile(path_, small_config()));
}

TEST(Writer, RoundsToTheTypeAndTilesTheFile) {
  const std::vector<float> a = {1, 2.0078125f, -3}, b = {0.5f};
  const NewTensor tensors[] = {{"a", {3}, a, DType::kBF16}, {"b", {1, 1}, b, DType::kF32}};
  const std::string bytes = safetensors_bytes(tensors, {});
  auto file = SafetensorsFile::parse(std::as_bytes(std::span(bytes)), "memory");
  ASSERT_TRUE(file) << file.error().to_string();
  EXPECT_EQ(file->data_bytes(), 3 * 2 + 4);
  std::vector<float> read(3);
  convert_to_f32(DType::kBF16, file->tensors().at("a").bytes, read.data(), 3);
  EXPECT_EQ(read, (std::vector<float>{1, 2, -3}));
}

TEST(Gates, FromLinesAndFromJson) {
  const std::vector<float> expected = {0, 0.25f, 1, 0.5f};
  for (const char* text :
       {"0\t0.25\n1\t0.5\n", " 0 2.5e-1 \r\n\n1.0 0.5", "[[0, 0.25], [1, 0.5]]"}) {
    auto gates = parse_gates(text, 2, 2, "gates");
    ASSERT_TRUE(gates) << gates.error().to_string();
    EXPECT_EQ(*gates, expected) << text;
  }
}

TEST(Gates, RefusesOtherShapesAndValues) {
  const std::pair<const char*, const char*> cases[] = {{"", "found 0 layers"},
                                                       {"0 0\n", "found 1 layers"},
                                                       {"0 0\n0 0\n0 0\n", "found 3"},
                                                       {"0 0\n0\n", "1 values for layer 1"},
                                                       {"0 0\n0 1.5\n", "KV head 1"},
                                                       {"0 -1\n0 0\n", "layer 0, KV head 1"},
                                                       {"0 nan\n0 0\n", "[0, 1]"},
                                                       {"0 x\n0 0\n", "line 1"},
                                                       {"0 0\n0 0,5\n", "line 2"},
                                                       {"[[0, 0], 1]", "array of arrays"},
                                                       {"[[0, 0], [0, \"1\"]]", "array of arrays"},
                                                       {"[[0, 0], [0", "array of arrays"}};
  for (const auto& [text, part] : cases) {
    const auto gates = parse_gates(text, 2, 2, "gates");
    ASSERT_FALSE(gates) << text;
    EXPECT_NE(gates.error().message.find(part), std::string::npos) << gates.error().message;
    EXPECT_EQ(gates.error().where, "gates");
  }
}

// Heads whose hits, losses and fetches are the same for every threshold but one.
Profile planned_profile() {
  Profile profile = full_profile();
  HeadStatistics& s = profile.statistics;
  s.mass_outside.assign(8, 0.5f);
  for (int64_t head = 0; head < 4; ++head) {
    for (int64_t trial = 0; trial < kNumTrials; ++trial) {
      const int64_t at = head * kNumTrials + trial;
      const bool good = trial == 7;
      s.trial_hit_rate[at] = good ? 0.8f : 0.9f;
      s.trial_set_loss[at] = good ? 0.04f : 0.2f;
      s.trial_fetched[at] = good ? 0.1f * static_cast<float>(head) : 0.01f;
    }
  }
  return profile;
}

TEST(Plan, KeepsTheHeadsThatFetchMostAndSaysWhatBinds) {
  const Profile profile = planned_profile();
  PlanRequest request;
  request.shape = small_shape();
  request.context_tokens = 8192;
  request.budget_bytes = int64_t{1} << 40;
  request.link_bytes_per_second = 1e9;
  request.step_seconds = 1;
  auto all = plan_residence(profile, request);
  ASSERT_TRUE(all) << all.error().to_string();
  EXPECT_EQ(all->points.size(), static_cast<size_t>(kNumTrials));
  EXPECT_EQ(all->chosen, 7u);  // the only one within the loss, though others hit more
  EXPECT_TRUE(all->within_loss);
  EXPECT_NEAR(all->points[7].weighted_loss, 0.04, 1e-6);
  EXPECT_EQ(all->persistent.size(), 4u);
  EXPECT_EQ(all->bytes_per_step, 0);
  EXPECT_EQ(all->device_bytes, all->most_bytes);
  EXPECT_EQ(all->binding, Binding::kNothing);

  const int64_t each = (all->most_bytes - all->least_bytes) / 4;
  request.budget_bytes = all->least_bytes + 2 * each + each / 2;
  auto two = plan_residence(profile, request);
  ASSERT_TRUE(two);
  ASSERT_EQ(two->persistent.size(), 2u);
  EXPECT_EQ(two->persistent[0].layer, 1);  // head 3, then head 2
  EXPECT_EQ(two->persistent[0].kv_head, 1);
  EXPECT_EQ(two->persistent[1].kv_head, 0);
  // k is 832 rows of 64 bytes; head 1 fetches a tenth of them.
  EXPECT_NEAR(two->bytes_per_step, 0.1 * 832 * 64, 1);
  EXPECT_NEAR(two->persistent[0].bytes_saved, 0.3 * 832 * 64, 1);
  EXPECT_NEAR(two->hit_rate, 0.8, 1e-6);
  EXPECT_NEAR(two->fetch_seconds, two->bytes_per_step / 1e9, 1e-12);
  EXPECT_LE(two->device_bytes, request.budget_bytes);
  EXPECT_EQ(two->binding, Binding::kDeviceMemory);
  request.step_seconds = 1e-9;
  EXPECT_EQ(plan_residence(profile, request)->binding, Binding::kLink);

  request.budget_bytes = all->least_bytes - 1;
  const auto small = plan_residence(profile, request);
  ASSERT_FALSE(small);
  EXPECT_EQ(small.error().code, ErrorCode::kDeviceMemory);
  EXPECT_NE(small.error().message.find(std::to_string(all->least_bytes)), std::string::npos);
}

TEST(Plan, TakesTheLeastLossWhereNoneIsSmallEnough) {
  PlanRequest request;
  request.shape = small_shape();
  request.context_tokens = 8192;
  request.budget_bytes = int64_t{1} << 40;
  request.largest_loss = 0.01;
  auto plan = plan_residence(planned_profile(), request);
  ASSERT_TRUE(plan);
  EXPECT_EQ(plan->chosen, 7u);
  EXPECT_FALSE(plan->within_loss);
  Profile without = planned_profile();
  without.statistics.trial_fetched.clear();
  EXPECT_FALSE(plan_residence(without, request));
}

}  // namespace
}  // namespace clo
