// Files of the gguf package (tests/golden/make_gguf.py), and files that are wrong in one place.
#include "io/gguf.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <fstream>
#include <iterator>

#include "gguf_writer.h"
#include "io/gguf_model.h"
#include "temp_files.h"

namespace clo {
namespace {

const std::string kGolden = CLO_SOURCE_DIR "/tests/golden/gguf/";

std::string bytes_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

template <typename T>
const T* get(const GgufFile& file, const std::string& key) {
  const auto found = file.metadata().find(key);
  return found == file.metadata().end() ? nullptr : std::get_if<T>(&found->second);
}
template <typename T>
std::vector<T> list(const GgufFile& file, const std::string& key) {
  const GgufArray* array = get<GgufArray>(file, key);
  return array == nullptr ? std::vector<T>{} : std::get<std::vector<T>>(*array);
}

TEST(Gguf, NumbersOfEveryTypeAreTheReferencesBitForBit) {
  const auto file = GgufFile::open(kGolden + "types.gguf");
  ASSERT_TRUE(file) << file.error().to_string();
  const std::string expected = bytes_of(kGolden + "types.f32");
  ASSERT_EQ(file->tensors().size(), 15u);
  size_t at = 0;
  for (const auto& [name, tensor] : file->tensors()) {
    ASSERT_EQ(tensor.shape, (Shape{2, 256})) << name;
    ASSERT_NE(tensor.bytes, nullptr) << name;
    std::vector<float> values(static_cast<size_t>(tensor.num_elements()));
    dequantize(static_cast<GgmlType>(tensor.type), tensor.bytes, values.data(),
               tensor.num_elements());
    for (const float value : values) ASSERT_TRUE(std::isfinite(value)) << name;
    ASSERT_LE(at + values.size() * 4, expected.size());
    EXPECT_EQ(std::memcmp(values.data(), expected.data() + at, values.size() * 4), 0) << name;
    at += values.size() * 4;
  }
  EXPECT_EQ(at, expected.size());
}

// Types that are kept in blocks give the numbers that they stand for: exactly, or (Q4_K) with
// scales that are rounded to f16; what has no blocks is refused.
TEST(Gguf, RowsInBlocksAreTheSameNumbers) {
  const auto file = GgufFile::open(kGolden + "types.gguf");
  ASSERT_TRUE(file) << file.error().to_string();
  int taken = 0;
  for (const auto& [name, tensor] : file->tensors()) {
    const auto type = static_cast<GgmlType>(tensor.type);
    const GgmlTypeInfo* info = ggml_type_info(tensor.type);
    const WeightBlocks blocks = blocks_for(std::span(&type, 1));
    std::vector<BlockRow> rows(kGroupRows);
    for (BlockRow& row : rows) {
      row.resize(256);
      row.clear();
    }
    bool all = blocks != WeightBlocks::kNone;
    for (size_t r = 0; r < 2 && all; ++r) {
      const auto at = static_cast<int64_t>(r) * 256 / info->block_elements * info->block_bytes;
      all = take_block_row(type, blocks, tensor.bytes + at, 256, rows[r]);
    }
    const bool expected = type == GgmlType::kQ4_0 || type == GgmlType::kQ4_1 ||
                          type == GgmlType::kQ4_K || type == GgmlType::kQ8_0;
    EXPECT_EQ(all, expected) << name;
    if (!all) continue;
    ++taken;
    std::vector<float> numbers(512), found(512);
    dequantize(type, tensor.bytes, numbers.data(), 512);
    std::vector<std::byte> packed(
        static_cast<size_t>(weight_bytes(blocks, DType::kF32, kGroupRows, 256)));
    pack_rows(blocks, rows.data(), 256, packed.data());
    for (int64_t r = 0; r < 2; ++r) unpack_row(blocks, packed.data(), 256, r, &found[256 * r]);
    float largest = 0;
    for (const float number : numbers) largest = std::max(largest, std::abs(number));
    for (size_t i = 0; i < 512; ++i) {
      // A scale and a minimum, each off by at most 2^-11 of itself, of numbers up to twice the
      // largest; -8 d is exact, and rounds once when it is added.
      const float bound = type == GgmlType::kQ4_K ? 4 * largest * 0x1p-11f : 0x1p-22f * largest;
      ASSERT_NEAR(found[i], numbers[i], bound) << name << " " << i;
    }
  }
  EXPECT_EQ(taken, 4);
}

TEST(Gguf, BlocksOfAMatrixFitAllItsTensors) {
  using enum GgmlType;
  const auto of = [](std::vector<GgmlType> types) { return blocks_for(types); };
  EXPECT_EQ(of({kQ4_0, kQ4_1, kQ4_K}), WeightBlocks::kQ4);
  EXPECT_EQ(of({kQ4_K, kQ6_K}), WeightBlocks::kInt8);
  EXPECT_EQ(of({kQ8_0}), WeightBlocks::kInt8);
  EXPECT_EQ(of({kQ4_0, kF16}), WeightBlocks::kNone);
  EXPECT_EQ(of({kBF16}), WeightBlocks::kNone);
}

TEST(Gguf, ReadsMetadataOfEveryKind) {
  const auto file = GgufFile::open(kGolden + "types.gguf");
  ASSERT_TRUE(file) << file.error().to_string();
  EXPECT_EQ(file->version(), 3u);
  EXPECT_EQ(file->text("general.architecture").value(), "llama");
  const std::pair<const char*, int64_t> integers[] = {
      {"test.u8", 200},
      {"test.i8", -5},
      {"test.u16", 60000},
      {"test.i16", -30000},
      {"test.u32", 4000000000},
      {"test.i32", -2000000000},
      {"test.u64", int64_t{1} << 60},
      {"test.i64", -(int64_t{1} << 60)},
  };
  for (const auto& [key, value] : integers) EXPECT_EQ(file->integer(key).value(), value) << key;
  EXPECT_EQ(file->number("test.f32").value(), 0.5);
  EXPECT_EQ(file->number("test.f64").value(), 0.1);
  EXPECT_EQ(file->number("test.u8").value(), 200);
  EXPECT_EQ(*get<bool>(*file, "test.bool"), true);
  EXPECT_EQ(file->text("test.text").value(), "Grüße");
  EXPECT_EQ(list<std::string>(*file, "test.texts"), (std::vector<std::string>{"a", "", "über"}));
  EXPECT_EQ(list<int64_t>(*file, "test.integers"), (std::vector<int64_t>{1, -2, 3}));
  EXPECT_EQ(list<double>(*file, "test.floats"), (std::vector<double>{0.25, -1.5}));
  EXPECT_EQ(list<bool>(*file, "test.bools"), (std::vector<bool>{true, false}));

  const auto absent = file->integer("llama.block_count");
  ASSERT_FALSE(absent);
  EXPECT_NE(absent.error().message.find("missing"), std::string::npos);
  const auto other = file->integer("test.text");
  ASSERT_FALSE(other);
  EXPECT_NE(other.error().message.find("not an integer"), std::string::npos);
}

using Writer = GgufWriter;

Result<GgufFile> parse(const GgufWriter& writer) {
  return GgufFile::parse(as_bytes(writer.bytes), "test.gguf");
}

void expect_refused(const Writer& writer, const std::string& words,
                    ErrorCode code = ErrorCode::kBadFile) {
  const auto file = parse(writer);
  ASSERT_FALSE(file) << words;
  EXPECT_EQ(file.error().code, code) << file.error().to_string();
  EXPECT_EQ(file.error().where, "test.gguf");
  EXPECT_NE(file.error().message.find(words), std::string::npos) << file.error().message;
}

TEST(Gguf, ReadsVersion2AndShapesFastestFirst) {
  Writer writer;
  writer.head(2, 0, 2).tensor("b", {3, 2}, 0, 32).tensor("a", {4}, 1).data(32 + 24);
  const auto file = parse(writer);
  ASSERT_TRUE(file) << file.error().to_string();
  EXPECT_EQ(file->tensors().at("b").shape, (Shape{2, 3}));
  EXPECT_EQ(file->tensors().at("b").bytes - file->tensors().at("a").bytes, 32);
  EXPECT_EQ(file->data_bytes(), 24 + 8);
}

TEST(Gguf, TypesThatAreNotReadAreListedByName) {
  Writer writer;
  writer.head(2, 0).tensor("a", {256}, 17).tensor("b", {256}, 77).data(0);
  const auto file = parse(writer);
  ASSERT_TRUE(file) << file.error().to_string();
  EXPECT_EQ(file->tensors().at("a").bytes, nullptr);
  EXPECT_EQ(ggml_type_name(file->tensors().at("a").type), "IQ2_XS");
  EXPECT_EQ(ggml_type_name(file->tensors().at("b").type), "type 77");
  EXPECT_EQ(ggml_type_info(17), nullptr);
}

TEST(Gguf, RefusesWhatIsNoGgufFile) {
  Writer page;
  page.bytes = "<!DOCTYPE html>";
  expect_refused(page, "does not begin with \"GGUF\"");
  Writer empty;
  empty.bytes.clear();
  expect_refused(empty, "does not begin with \"GGUF\"");
  expect_refused(Writer().head(0, 0, 1), "version 1", ErrorCode::kUnsupported);
  expect_refused(Writer().head(0, 0, 4), "version 4", ErrorCode::kUnsupported);
  expect_refused(Writer().head(0, 0, 0x03000000), "big-endian", ErrorCode::kUnsupported);
}

TEST(Gguf, RefusesBrokenMetadata) {
  expect_refused(Writer().head(0, 1), "length of a metadata key");
  expect_refused(Writer().head(0, uint64_t{1} << 60).text("a").put(uint32_t{0}).put(uint8_t{1}),
                 "length of a metadata key");
  expect_refused(Writer().head(0, 1).put(~uint64_t{0}), "is said to be 18446744073709551615 bytes");
  expect_refused(Writer().head(0, 1).text("a").put(uint32_t{13}), "value type 13");
  expect_refused(Writer().head(0, 1).text("a").put(uint32_t{7}).put(uint8_t{2}),
                 "truth value of 2");
  expect_refused(Writer().head(0, 1).text("a").put(uint32_t{10}).put(~uint64_t{0}), "at most 2^63");
  expect_refused(
      Writer().head(0, 1).text("a").put(uint32_t{9}).put(uint32_t{8}).put(uint64_t{1} << 40),
      "1099511627776 elements");
  expect_refused(Writer()
                     .head(0, 1)
                     .text("a")
                     .put(uint32_t{9})
                     .put(uint32_t{9})
                     .put(uint64_t{1})
                     .put(uint64_t{0}),
                 "array of arrays", ErrorCode::kUnsupported);
  Writer twice;
  twice.head(0, 2);
  for (int i = 0; i < 2; ++i) twice.text("key").put(uint32_t{0}).put(uint8_t{1});
  expect_refused(twice, "\"key\" is there twice");
  for (const uint32_t alignment : {0u, 4u, 33u, 1u << 21}) {
    expect_refused(Writer().head(0, 1).text("general.alignment").put(uint32_t{4}).put(alignment),
                   "general.alignment is " + std::to_string(alignment));
  }
}

TEST(Gguf, RefusesBrokenTensors) {
  expect_refused(Writer().head(1, 0).tensor("a", {}, 0).data(0), "0 dimensions");
  expect_refused(Writer().head(1, 0).tensor("a", {1, 1, 1, 1, 1}, 0).data(4), "5 dimensions");
  expect_refused(Writer().head(1, 0).tensor("a", {4, 0}, 0).data(0), "a dimension of 0");
  expect_refused(Writer().head(1, 0).tensor("a", {uint64_t{1} << 40, uint64_t{1} << 40}, 0).data(0),
                 "a dimension of");
  expect_refused(Writer().head(1, 0).tensor("a", {~uint64_t{0}}, 0).data(0), "a dimension of");
  expect_refused(Writer().head(1, 0).tensor("a", {33, 2}, 8).data(68), "multiple of 32");
  expect_refused(Writer().head(1, 0).tensor("a", {128, 2}, 12).data(144), "multiple of 256");
  expect_refused(Writer().head(1, 0).tensor("a", {4}, 0, 8).data(64), "multiple of the alignment");
  expect_refused(Writer().head(1, 0).tensor("a", {4}, 0, ~uint64_t{0}).data(64), "past every file");
  expect_refused(Writer().head(1, 0).tensor("a", {4}, 0).data(15), "truncated");
  expect_refused(Writer().head(1, 0).tensor("a", {4}, 0, 1 << 20).data(64), "truncated");
  expect_refused(Writer().head(2, 0).tensor("a", {4}, 0).tensor("a", {4}, 0).data(16),
                 "tensor \"a\" is there twice");
}

// The metadata that a model cannot do without, and one number more.
Result<ModelConfig> config_with(const std::string& architecture, const std::string& key,
                                int64_t value) {
  Writer writer;
  writer.head(1, 8).words("general.architecture", architecture);
  const std::pair<const char*, uint32_t> integers[] = {{"embedding_length", 64},
                                                       {"feed_forward_length", 80},
                                                       {"block_count", 2},
                                                       {"attention.head_count", 4},
                                                       {"context_length", 2048}};
  for (const auto& [name, number] : integers) writer.integer(architecture + "." + name, number);
  writer.number(architecture + ".attention.layer_norm_rms_epsilon", 1e-5f);
  writer.text(architecture + "." + key).put(uint32_t{11}).put(value);  // an int64
  writer.tensor("token_embd.weight", {64, 4}, 0).data(64 * 4 * 4);
  const auto file = parse(writer);
  if (!file) return file.error();
  return gguf_model_config(*file);
}

TEST(GgufConfig, CarriesASlidingWindow) {
  const std::string key = "attention.sliding_window";
  for (const auto& [found, carried] :
       {std::pair{0, 0}, {64, 64}, {2047, 2047}, {2048, 0}, {4096, 0}}) {
    const auto config = config_with("llama", key, found);
    ASSERT_TRUE(config) << config.error().to_string();
    EXPECT_EQ(config->sliding_window, carried) << found;
  }
  const auto negative = config_with("llama", key, -1);
  ASSERT_FALSE(negative);
  EXPECT_EQ(negative.error().code, ErrorCode::kBadFile);
  EXPECT_NE(negative.error().message.find("\"llama.attention.sliding_window\" is -1"),
            std::string::npos);
}

TEST(GgufConfig, RefusesByName) {
  const auto refused = [](const Result<ModelConfig>& config, const std::string& words) {
    ASSERT_FALSE(config) << words;
    EXPECT_EQ(config.error().code, ErrorCode::kUnsupported);
    EXPECT_NE(config.error().message.find(words), std::string::npos) << config.error().message;
  };
  refused(config_with("mistral3", "expert_count", 0), "\"mistral3\"; supported are llama");
  refused(config_with("llama", "expert_count", 8),
          "\"llama.expert_count\" is 8: a mixture of experts");
}

// Wherever a download ends, it is refused and nothing outside the bytes is read.
TEST(Gguf, EveryPrefixOfAFileIsRefused) {
  const std::string whole = bytes_of(kGolden + "types.gguf");
  const auto file = GgufFile::parse(as_bytes(whole), "test.gguf");
  ASSERT_TRUE(file);
  // Without the padding behind the last tensor.
  size_t end = 0;
  for (const auto& [name, tensor] : file->tensors()) {
    const auto* bytes = reinterpret_cast<const char*>(tensor.bytes);
    end = std::max(end, static_cast<size_t>(bytes - whole.data() + tensor.num_bytes));
  }
  for (size_t length = 0; length < end; length += length < 3000 ? 1 : 97) {
    const std::string prefix = whole.substr(0, length);
    ASSERT_FALSE(GgufFile::parse(as_bytes(prefix), "test.gguf")) << length;
  }
}

}  // namespace
}  // namespace clo
