#include "eval/profile_run.h"

#include <gtest/gtest.h>

namespace clo {
namespace {

TEST(RecordingRoom, SaysWhatWindowsTakeAndWhatThereIs) {
  // 32 layers x 128 x 4 bytes x (8 KV heads x 2,047 tokens + 32 query heads x 511 steps)
  const KvShape shape{32, 32, 8, 128, DType::kBF16};
  const ProfileRun run{2048, 512, 12};
  const int64_t each = int64_t{32} * 128 * 4 * (8 * 2047 + 32 * 511);
  ASSERT_EQ(WindowTrace::bytes(shape, 2047, 511), each);
  EXPECT_TRUE(check_recording_room(shape, 12, run, 12 * each));
  const Status refused = check_recording_room(shape, 12, run, 12 * each - 1);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kHostMemory);
  for (const char* part : {"12 windows", "5.99 GiB", "--windows"}) {
    EXPECT_NE(refused.error().to_string().find(part), std::string::npos)
        << refused.error().to_string();
  }
}

TEST(WindowStarts, SpreadOverTheText) {
  EXPECT_EQ(*window_starts(1000, {100, 30, 4}), (std::vector<int64_t>{0, 300, 600, 900}));
  EXPECT_EQ(*window_starts(250, {100, 30, 4}), (std::vector<int64_t>{0, 150}));
  EXPECT_EQ(*window_starts(100, {100, 30, 4}), (std::vector<int64_t>{0}));
  EXPECT_FALSE(window_starts(99, {100, 30, 4}));
}

}  // namespace
}  // namespace clo
