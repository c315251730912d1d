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
  ProfileRun run;
  run.decode_tokens = 512;
  run.runs = 7;  // of 73 steps each
  EXPECT_TRUE(check_recording_room(shape, windows, run, 12 * each));
  const Status refused = check_recording_room(shape, windows, run, 12 * each - 1);
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
    return text_windows(tokens, {100, 100, 30, windows});
  };
  EXPECT_EQ(*of(1000, 4), (Windows{{0, 100}, {300, 100}, {600, 100}, {900, 100}}));
  EXPECT_EQ(*of(250, 4), (Windows{{0, 100}, {150, 100}}));
  EXPECT_EQ(*of(100, 4), (Windows{{0, 100}}));
  const auto refused = of(99, 4);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kBadRequest);
  EXPECT_NE(refused.error().to_string().find("at least 100 tokens"), std::string::npos);
}

TEST(TextWindows, LengthsAreSpreadOverTheirRange) {
  using Windows = std::vector<TextWindow>;
  const ProfileRun run{100, 1600, 30, 5};
  EXPECT_EQ(*text_windows(3100, run),
            (Windows{{0, 100}, {100, 200}, {300, 400}, {700, 800}, {1500, 1600}}));
  EXPECT_EQ(*text_windows(3500, run),
            (Windows{{0, 100}, {200, 200}, {500, 400}, {1000, 800}, {1900, 1600}}));
  // Fewer windows have the same range.
  EXPECT_EQ(*text_windows(2100, run), (Windows{{0, 100}, {100, 400}, {500, 1600}}));
  EXPECT_EQ(*text_windows(1600, run), (Windows{{0, 1600}}));
}

}  // namespace
}  // namespace clo
