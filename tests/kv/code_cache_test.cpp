#include "kv/code_cache.h"

#include <gtest/gtest.h>

#include <cstring>

namespace clo {
namespace {

class CodeCacheTest : public testing::Test {
 protected:
  const KvShape shape_{3, 2, 2, 16, DType::kF32, 128};
  HostStore store_ = HostStore::create(shape_, HostLayout{shape_, 1}.page_bytes() * 3).value();
  Arena device_ = Arena::create("device", 2 * block_bytes(), ErrorCode::kDeviceMemory).value();
  CodeCache cache_{store_, device_};

  int64_t block_bytes() const { return int64_t{kPageTokens} * 3 * 2 * 16; }

  // Each word of the host's codes says where it is.
  static uint64_t mark(PageId page, int32_t layer, int64_t word) {
    return (static_cast<uint64_t>(page) << 40) | (static_cast<uint64_t>(layer) << 32) |
           static_cast<uint64_t>(word);
  }
  int64_t words_per_layer() const { return int64_t{2} * kPageTokens * shape_.code_words(); }
  void write_host_codes() {
    for (PageId page = 0; page < 3; ++page) {
      for (int32_t layer = 0; layer < 3; ++layer) {
        for (int64_t w = 0; w < words_per_layer(); ++w) {
          store_.codes(layer, page)[w] = mark(page, layer, w);
        }
      }
    }
  }
};

TEST_F(CodeCacheTest, ABlockHoldsTheHostsCodesOfItsPage) {
  write_host_codes();
  ASSERT_EQ(cache_.block_bytes(), block_bytes());
  for (const PageId page : {2, 0}) {
    uint64_t* block = *cache_.acquire(page);
    EXPECT_TRUE(device_.contains(block));
    EXPECT_TRUE(device_.contains(reinterpret_cast<std::byte*>(block) + block_bytes() - 1));
    for (int32_t layer = 0; layer < 3; ++layer) {
      for (int64_t w = 0; w < words_per_layer(); ++w) {
        ASSERT_EQ(cache_.layer_codes(block, layer)[w], mark(page, layer, w)) << layer << " " << w;
      }
    }
  }
}

TEST_F(CodeCacheTest, SequencesThatShareAPageShareItsCodes) {
  uint64_t* first = *cache_.acquire(1);
  EXPECT_EQ(device_.used_bytes(), block_bytes());
  EXPECT_EQ(*cache_.acquire(1), first);
  EXPECT_EQ(*cache_.acquire(1), first);
  EXPECT_EQ(device_.used_bytes(), block_bytes());
  cache_.release(1);
  cache_.release(1);
  EXPECT_TRUE(cache_.is_resident(1));
  EXPECT_EQ(device_.used_bytes(), block_bytes());
  cache_.release(1);
  EXPECT_FALSE(cache_.is_resident(1));
  EXPECT_EQ(device_.used_bytes(), 0);
}

TEST_F(CodeCacheTest, APageThatComesBackIsFilledAnew) {
  write_host_codes();
  static_cast<void>(*cache_.acquire(0));
  cache_.release(0);
  store_.codes(1, 0)[5] = 77;
  EXPECT_EQ(cache_.layer_codes(*cache_.acquire(0), 1)[5], 77u);
}

TEST_F(CodeCacheTest, AFullArenaLeavesNothingBehind) {
  static_cast<void>(*cache_.acquire(0));
  static_cast<void>(*cache_.acquire(1));
  for (int i = 0; i < 2; ++i) {
    const auto refused = cache_.acquire(2);
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().code, ErrorCode::kDeviceMemory);
    EXPECT_FALSE(cache_.is_resident(2));
    EXPECT_EQ(device_.used_bytes(), 2 * block_bytes());
  }
  cache_.release(0);
  EXPECT_TRUE(cache_.acquire(2));
  cache_.release(2);
  cache_.release(1);
  EXPECT_EQ(device_.used_bytes(), 0);
}

TEST_F(CodeCacheTest, ReleasingAnAbsentPageIsAFaultOfTheProgram) {
  EXPECT_DEATH(cache_.release(0), "found != blocks_.end");
}

}  // namespace
}  // namespace clo
