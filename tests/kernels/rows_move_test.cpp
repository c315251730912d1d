// Where rows lie in layer buffer and host store, without a GPU, and plain lists of row copies.
#include <algorithm>
#include <numeric>
#include <set>

#include "kernels/gpu_test.h"
#include "kernels/rows/offsets.h"
#include "kernels/rows/rows.h"

namespace clo::kernels {
namespace {

TEST(RowsOffsets, HostRowsLieWhereTheStoreSaysAlsoPastThirtyTwoBits) {
  HostLayout layout;
  layout.shape = {80, 64, 8, 128, DType::kBF16, 128};
  layout.num_pages = int64_t{1} << 22;
  for (const int32_t layer : {0, 1, 79}) {
    for (const int64_t page : {int64_t{0}, int64_t{1}, layout.num_pages - 1}) {
      for (const int32_t head : {0, 7}) {
        for (const int32_t token : {0, 1, 255}) {
          const int64_t index = host_row_index(layout.num_pages, 8, layer, page, head, token);
          EXPECT_EQ(index * layout.shape.row_bytes(), layout.row_offset(layer, page, head, token));
          EXPECT_EQ(index * layout.shape.code_bytes(),
                    layout.code_offset(layer, page, head, token));
        }
      }
    }
  }
}

TEST(RowsOffsets, PageRunsCoverARangeOnce) {
  constexpr int64_t kCapacity = int64_t{1} << 33;  // rows of one head: past 32 bits with few heads
  for (const int32_t heads : {1, 3, 8}) {
    for (const int64_t first : {0, 1, 255, 256, 257, 300}) {
      for (const int64_t count : {0, 1, 2, 255, 256, 257, 1000}) {
        std::set<int64_t> rows;
        int64_t total = 0;
        const int32_t runs = num_page_runs(first, first + count, heads);
        for (int32_t i = 0; i < runs; ++i) {
          const PageRun run = page_run(i, first, first + count, heads, kCapacity);
          ASSERT_GT(run.num_tokens, 0);
          ASSERT_LE(run.first_slot + run.num_tokens, kPageTokens);
          ASSERT_EQ(run.buffer_row,
                    run.kv_head * kCapacity + run.page * kPageTokens + run.first_slot);
          for (int32_t t = 0; t < run.num_tokens; ++t) rows.insert(run.buffer_row + t);
          total += run.num_tokens;
        }
        ASSERT_EQ(total, count * heads);
        ASSERT_EQ(std::ssize(rows), total);
        if (count > 0) {
          ASSERT_EQ(*rows.begin(), first);
          ASSERT_EQ(*rows.rbegin(), (heads - 1) * kCapacity + first + count - 1);
        }
      }
    }
  }
}

class RowsMoveTest : public GpuTest {};

TEST_F(RowsMoveTest, CopiesListsOfRows) {
  for (const int64_t row_bytes : {16, 256, 512, 528, 2048}) {
    for (const int64_t count : {0, 1, 31, 32, 33, 1000}) {
      const std::vector<float> content =
          random_floats(std::max<int64_t>(count, 1) * row_bytes / 4, 41);
      const DeviceArray<float> source(content);
      const DeviceArray<float> target(std::ssize(content));
      std::vector<int64_t> order(static_cast<size_t>(count));
      std::iota(order.begin(), order.end(), 0);
      std::mt19937_64 generator(1);
      std::shuffle(order.begin(), order.end(), generator);
      std::vector<RowCopy> copies;
      std::vector<float> want = target.download();
      for (int64_t i = 0; i < count; ++i) {
        const int64_t to = order[static_cast<size_t>(i)];
        copies.push_back({reinterpret_cast<const std::byte*>(source.data()) + i * row_bytes,
                          reinterpret_cast<std::byte*>(target.data()) + to * row_bytes});
        std::copy_n(content.begin() + i * row_bytes / 4, row_bytes / 4,
                    want.begin() + to * row_bytes / 4);
      }
      const DeviceArray<RowCopy> list(copies);
      copy_rows(list.data(), count, row_bytes, 2, nullptr);
      CLO_CUDA(cudaDeviceSynchronize());
      const std::vector<float> got = target.download();
      ASSERT_EQ(std::memcmp(got.data(), want.data(), want.size() * sizeof(float)), 0)
          << row_bytes << " x " << count;
    }
  }
}

}  // namespace
}  // namespace clo::kernels
