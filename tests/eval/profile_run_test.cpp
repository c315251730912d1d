#include "eval/profile_run.h"

#include <gtest/gtest.h>

namespace clo {
namespace {

TEST(RecordingRoom, SaysWhatWindowsTakeAndWhatThereIs) {
  // 32 layers x 128 x 4 bytes x (8 KV heads x 2,047 tokens + 32 query heads x 511 steps)
  const KvShape shape{32, 32, 8, 128, DType::kBF16};
  const std::vector<TextWindow> windows(12, {0, 2048});
  const int64_t each = int64_t{32} * 128 * 4 * (8 * 2047 + 32 * 511);
  ASSERT_EQ(WindowTrace::bytes(shape, 2047, 511), each);
  EXPECT_TRUE(check_recording_room(shape, windows, 512, 12 * each));
  const Status refused = check_recording_room(shape, windows, 512, 12 * each - 1);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kHostMemory);
  for (const char* part : {"12 windows", "5.99 GiB", "--windows"}) {
    EXPECT_NE(refused.error().to_string().find(part), std::string::npos)
        << refused.error().to_string();
  }
}

TEST(TextWindows, SpreadOverTheText) {
  using Windows = std::vector<TextWindow>;
  const auto of = [](int64_t tokens, int64_t windows) {
    return text_windows(tokens, {{100}, 30, windows});
  };
  EXPECT_EQ(*of(1000, 4), (Windows{{0, 100}, {300, 100}, {600, 100}, {900, 100}}));
  EXPECT_EQ(*of(250, 4), (Windows{{0, 100}, {150, 100}}));
  EXPECT_EQ(*of(100, 4), (Windows{{0, 100}}));
  const auto refused = of(99, 4);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kBadRequest);
}

TEST(TextWindows, OfSeveralLengths) {
  const ProfileRun run{{10, 50}, 5, 12};
  const auto windows = text_windows(10 * 8 + 50 * 4 + 110, run);
  ASSERT_TRUE(windows);
  ASSERT_EQ(windows->size(), 12u);
  int64_t end = 0;
  for (size_t w = 0; w < windows->size(); ++w) {
    EXPECT_EQ((*windows)[w].tokens, w / 4 == 1 ? 50 : 10);
    EXPECT_EQ((*windows)[w].first, end + (w == 0 ? 0 : 10));
    end = (*windows)[w].first + (*windows)[w].tokens;
  }
  EXPECT_EQ(end, 390);
  // Just four of each, and not even that.
  EXPECT_EQ(text_windows(4 * 60, run)->size(), 8u);
  const auto short_text = text_windows(4 * 60 - 1, run);
  ASSERT_FALSE(short_text);
  EXPECT_NE(short_text.error().to_string().find("240 tokens, four windows"), std::string::npos)
      << short_text.error().to_string();
  const auto few = text_windows(1000, {{10, 50}, 5, 7});
  ASSERT_FALSE(few);
  EXPECT_EQ(few.error().code, ErrorCode::kBadFlag);
  EXPECT_NE(few.error().to_string().find("at least 8"), std::string::npos);
}

}  // namespace
}  // namespace clo
