// How --weights, the files and the backend together decide how matrices lie in memory.
#include <gtest/gtest.h>

#include "model/weights.h"

namespace clo {
namespace {

ModelConfig config_of(int64_t inner) {
  ModelConfig config;
  config.hidden_size = 64;
  config.intermediate_size = inner;
  config.num_layers = 1;
  config.num_q_heads = config.num_kv_heads = 2;
  config.head_dim = 32;
  config.vocab_size = 100;
  return config;
}

using Blocks = std::vector<WeightBlocks>;
constexpr WeightBlocks kNone = WeightBlocks::kNone, kInt8 = WeightBlocks::kInt8,
                       kQ4 = WeightBlocks::kQ4;

TEST(WeightPlan, AGpuRefusesOtherPlainTypesByName) {
  const ModelConfig config = config_of(96);
  for (const auto& [storage, name] :
       {std::pair{WeightStorage::kF32, "--weights f32"}, {WeightStorage::kF16, "--weights f16"}}) {
    const auto plan = plan_weights(config, storage, DType::kBF16, true);
    ASSERT_FALSE(plan) << name;
    EXPECT_EQ(plan.error().code, ErrorCode::kUnsupported);
    EXPECT_NE(plan.error().to_string().find(name), std::string::npos);
    EXPECT_NE(plan.error().to_string().find("type, bf16"), std::string::npos);
  }
  for (const WeightStorage storage : {WeightStorage::kAuto, WeightStorage::kBF16}) {
    const auto plan = plan_weights(config, storage, DType::kBF16, true);
    ASSERT_TRUE(plan);
    EXPECT_EQ(*plan, (WeightPlan{DType::kBF16, {}}));
  }
}

TEST(WeightPlan, AutoTakesTheFilesBlocksWhereTheyCanBeComputedWith) {
  ModelConfig config = config_of(96);
  config.file_blocks = {kInt8, kInt8, kQ4, kNone, kQ4, kInt8};
  EXPECT_EQ(plan_weights(config, WeightStorage::kAuto, DType::kBF16, false)->blocks,
            config.file_blocks);
  const auto on_gpu = plan_weights(config, WeightStorage::kAuto, DType::kBF16, true);
  EXPECT_EQ(on_gpu->blocks, config.file_blocks);
  EXPECT_TRUE(on_gpu->tiled);
  EXPECT_EQ(plan_weights(config, WeightStorage::kF32, DType::kBF16, false)->type, DType::kF32);
  EXPECT_EQ(plan_weights(config, WeightStorage::kF32, DType::kBF16, false)->blocks, Blocks{});
  // Up would begin inside a tile of sixteen rows, or inside a group of eight.
  config.intermediate_size = 104;
  EXPECT_EQ(plan_weights(config, WeightStorage::kAuto, DType::kBF16, false)->blocks,
            config.file_blocks);
  EXPECT_EQ(plan_weights(config, WeightStorage::kAuto, DType::kBF16, true)->blocks, Blocks{});
  config.intermediate_size = 100;
  EXPECT_EQ(plan_weights(config, WeightStorage::kAuto, DType::kBF16, false)->blocks, Blocks{});
}

TEST(WeightPlan, BlocksForEveryMatrix) {
  ModelConfig config = config_of(96);
  EXPECT_EQ(plan_weights(config, WeightStorage::kQ4, DType::kBF16, false)->blocks,
            (Blocks{kInt8, kInt8, kQ4, kQ4, kQ4, kQ4}));
  config.tie_word_embeddings = true;
  EXPECT_EQ(plan_weights(config, WeightStorage::kInt8, DType::kBF16, false)->blocks,
            Blocks(5, kInt8));
  const auto refused = plan_weights(config_of(100), WeightStorage::kQ4, DType::kBF16, false);
  ASSERT_FALSE(refused);
  EXPECT_NE(refused.error().message.find("rows of 100"), std::string::npos);
}

}  // namespace
}  // namespace clo
