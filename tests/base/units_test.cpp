#include "base/units.h"

#include <gtest/gtest.h>

#include "base/utf8.h"

namespace clo {
namespace {

TEST(ParseSize, AcceptsBinaryAndDecimalUnits) {
  EXPECT_EQ(*parse_size("24GiB"), 24LL << 30);
  EXPECT_EQ(*parse_size("512 MiB"), 512LL << 20);
  EXPECT_EQ(*parse_size("1.5gb"), 1'500'000'000);
  EXPECT_EQ(*parse_size("4096"), 4096);
  EXPECT_EQ(*parse_size("2k"), 2048);
  EXPECT_EQ(*parse_size("0"), 0);
}

TEST(ParseSize, RefusesEverythingElseByName) {
  for (const char* text : {"", "GiB", "-1GiB", "12 parsecs", "1e400", "nan", "9e18TiB", "5 5"}) {
    const auto size = parse_size(text);
    ASSERT_FALSE(size) << text;
    EXPECT_EQ(size.error().code, ErrorCode::kBadFlag);
    EXPECT_NE(size.error().message.find(text), std::string::npos);
  }
}

TEST(FormatBytes, KeepsThreeDigits) {
  EXPECT_EQ(format_bytes(0), "0 B");
  EXPECT_EQ(format_bytes(1023), "1023 B");
  EXPECT_EQ(format_bytes(1536), "1.50 KiB");
  EXPECT_EQ(format_bytes(100LL << 20), "100 MiB");
  EXPECT_EQ(format_bytes(3LL << 40), "3.00 TiB");
}

TEST(CheckedArithmetic, RefusesWrapAround) {
  EXPECT_EQ(checked_mul(1LL << 31, 1LL << 31), 1LL << 62);
  EXPECT_FALSE(checked_mul(1LL << 32, 1LL << 31));
  EXPECT_FALSE(checked_mul(-1, 2));
  EXPECT_FALSE(checked_add(INT64_MAX, 1));
}

TEST(Utf8, RefusesOverlongSurrogateAndTruncated) {
  EXPECT_EQ(find_invalid_utf8("plain \xC3\xA9 \xE2\x82\xAC \xF0\x9F\x98\x80"), 17u);
  EXPECT_EQ(find_invalid_utf8("ab\xC0\x80"), 2u);
  EXPECT_EQ(find_invalid_utf8("ab\xED\xA0\x80"), 2u);
  EXPECT_EQ(find_invalid_utf8("ab\xF4\x90\x80\x80"), 2u);
  EXPECT_EQ(decode_utf8("\xE2\x82").kind, Utf8Step::Kind::kIncomplete);
  EXPECT_EQ(decode_utf8("\xE2\x28").kind, Utf8Step::Kind::kInvalid);
}

TEST(Utf8, RoundTripsEveryCodePoint) {
  for (char32_t c = 0; c < 0x110000; ++c) {
    if (c >= 0xD800 && c < 0xE000) continue;
    std::string bytes;
    append_utf8(c, bytes);
    const Utf8Step step = decode_utf8(bytes);
    ASSERT_EQ(step.kind, Utf8Step::Kind::kCodePoint);
    ASSERT_EQ(step.code_point, c);
    ASSERT_EQ(step.length, bytes.size());
  }
}

}  // namespace
}  // namespace clo
