#include "io/safetensors.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstring>

#include "temp_files.h"

namespace clo {
namespace {

constexpr ErrorCode kBad = ErrorCode::kBadFile;

Result<SafetensorsFile> parse(const std::string& bytes) {
  return SafetensorsFile::parse(as_bytes(bytes), "test.safetensors");
}
Result<SafetensorsFile> parse(const std::string& header, const std::string& data) {
  // The views die with the text; only refusals are looked at.
  return parse(safetensors_bytes(header, data));
}
std::string zeros(size_t count) { return std::string(count, '\0'); }

TEST(Safetensors, ReadsTensorsTypesAndMetadata) {
  const std::string header = "{\"__metadata__\":{\"format\":\"pt\"}," +
                             header_entry("b", "BF16", "[2,1]", 4, 8) + "," +
                             header_entry("a", "F32", "[]", 0, 4) + "," +
                             header_entry("c", "F16", "[1,1,1]", 8, 10) + "}  ";
  const float one = 1;
  std::string data(reinterpret_cast<const char*>(&one), 4);
  data += std::string("\x80\x3F\x00\x40", 4);  // bf16 1 and 2
  data += zeros(2);
  const std::string bytes = safetensors_bytes(header, data);
  const auto file = parse(bytes);
  ASSERT_TRUE(file) << file.error().to_string();
  EXPECT_EQ(file->metadata().at("format"), "pt");
  EXPECT_EQ(file->data_bytes(), 10);
  ASSERT_EQ(file->tensors().size(), 3u);
  EXPECT_EQ(file->tensors().at("a").shape, Shape{});
  EXPECT_EQ(file->tensors().at("c").type, DType::kF16);
  const TensorView& b = file->tensors().at("b");
  EXPECT_EQ(b.shape, (Shape{2, 1}));
  float values[2];
  convert_to_f32(b.type, b.bytes, values, 2);
  EXPECT_EQ(values[0], 1);
  EXPECT_EQ(values[1], 2);
}

// The published demo model was written by Hugging Face's own library, not by our writer.
TEST(Safetensors, ReadsAFileOfTheReferenceImplementation) {
  const auto file = SafetensorsFile::open(CLO_SOURCE_DIR "/models/recall-7m/model.safetensors");
  ASSERT_TRUE(file) << file.error().to_string();
  EXPECT_EQ(file->tensors().size(), 74u);
  EXPECT_EQ(file->metadata().at("format"), "pt");
  const TensorView& down = file->tensors().at("model.layers.0.mlp.down_proj.weight");
  EXPECT_EQ(down.type, DType::kBF16);
  EXPECT_EQ(down.shape, (Shape{256, 704}));
  uint16_t bits[4];
  std::memcpy(bits, down.bytes, sizeof bits);
  const uint16_t expected[4] = {0xBDA3, 0xBDAE, 0xBD30, 0xBCEB};
  for (int i = 0; i < 4; ++i) EXPECT_EQ(bits[i], expected[i]);
}

TEST(Safetensors, KeepsUnsupportedTypesListed) {
  const std::string bytes = safetensors_bytes("{" + header_entry("q", "F8_E4M3", "[3]", 0, 3) +
                                                  "," + header_entry("i", "I8", "[5]", 3, 8) + "," +
                                                  header_entry("n", "NEW_TYPE", "[5]", 8, 9) + "}",
                                              zeros(9));
  const auto file = parse(bytes);
  ASSERT_TRUE(file) << file.error().to_string();
  EXPECT_TRUE(file->tensors().empty());
  EXPECT_EQ(file->unsupported_tensors().at("q"), "F8_E4M3");
  EXPECT_EQ(file->unsupported_tensors().at("n"), "NEW_TYPE");
}

TEST(Safetensors, RefusesHeadersThatDoNotFit) {
  expect_refused(parse(""), kBad, {"test.safetensors", "empty"});
  expect_refused(parse("\x05"), kBad, {"1 bytes"});
  const std::string whole = vectors_file({"a"});
  expect_refused(parse(whole.substr(0, 40)), kBad, {"header has", "truncated"});
  expect_refused(parse("\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF{}"), kBad,
                 {"18446744073709551615", "only 2 follow"});
  expect_refused(parse("\xF8\xFF\xFF\xFF\xFF\xFF\xFF\xFF{}"), kBad, {"18446744073709551608"});
  expect_refused(parse(zeros(64)), kBad, {"no JSON header"});
}

TEST(Safetensors, AcceptsAHeaderOver100MB) {
  std::string header = "{" + header_entry("a", "F32", "[1]", 0, 4) + "}";
  header.append((size_t{101} << 20) - header.size(), ' ');
  const std::string bytes = safetensors_bytes(header, zeros(4));
  const auto file = parse(bytes);
  ASSERT_TRUE(file) << file.error().to_string();
  EXPECT_EQ(file->tensors().count("a"), 1u);
}

TEST(Safetensors, SaysWhatStandsInPlaceOfWeights) {
  expect_refused(parse("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n"), kBad,
                 {"Git LFS pointer", "download again"});
  expect_refused(parse("\n<!DOCTYPE html>\n<html><body>404</body></html>"), kBad,
                 {"HTML page", "download again"});
  expect_refused(parse("<html><head></head></html>"), kBad, {"HTML page"});
  expect_refused(parse(std::string("PK\x03\x04\x00\x00\x08\x08", 8) + zeros(50)), kBad,
                 {"PyTorch pickle"});
  expect_refused(parse(std::string("\x80\x02}q\x00.", 6) + zeros(50)), kBad, {"PyTorch pickle"});
  expect_refused(parse("GGUF\x03" + zeros(60)), kBad, {"GGUF"});
  expect_refused(parse("{\"error\": \"Repository not found\"}"), kBad, {"JSON text"});
}

TEST(Safetensors, RefusesMalformedJson) {
  expect_refused(parse("{\"a\":", ""), kBad, {"not valid JSON at byte"});
  expect_refused(parse("{} x", ""), kBad, {"not valid JSON"});
  expect_refused(parse("{\"\xFF\":{}}", ""), kBad, {"not valid JSON"});
  expect_refused(parse("{\"a\":" + std::string(100000, '['), ""), kBad, {"\"a\"", "an object"});
  expect_refused(parse("{\"a\":3}", ""), kBad, {"\"a\"", "object", "3"});
  expect_refused(parse("{\"a\":{\"dtype\":\"F32\",\"shape\":[1]}}", ""), kBad,
                 {"\"a\"", "data_offsets"});
  expect_refused(parse("{\"a\":{\"dtype\":\"F32\",\"data_offsets\":[0,4]}}", zeros(4)), kBad,
                 {"\"a\"", "no \"shape\""});
  expect_refused(parse("{\"a\":{\"shape\":[1],\"data_offsets\":[0,4]}}", zeros(4)), kBad,
                 {"\"a\"", "no \"dtype\""});
  expect_refused(parse("{\"a\":{\"scale\":1}}", ""), kBad, {"\"a\"", "unknown key", "scale"});
  expect_refused(parse("{\"__metadata__\":{\"x\":1}}", ""), kBad, {"metadata", "\"x\""});
  expect_refused(parse("{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0]}}", zeros(4)),
                 kBad, {"\"a\"", "data_offsets"});
  expect_refused(
      parse("{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4,4]}}", zeros(4)), kBad,
      {"\"a\"", "third offset"});
  expect_refused(
      parse("{\"a\":{\"dtype\":\"F32\",\"shape\":[[1]],\"data_offsets\":[0,4]}}", zeros(4)), kBad,
      {"\"a\"", "shape", "a list"});
  expect_refused(parse("{\"a\":{\"dtype\":7,\"shape\":[1],\"data_offsets\":[0,4]}}", zeros(4)),
                 kBad, {"\"a\"", "dtype", "7"});
}

TEST(Safetensors, RefusesDuplicateKeys) {
  const std::string entry = header_entry("twin", "F32", "[1]", 0, 4);
  expect_refused(parse("{" + entry + "," + entry + "}", zeros(4)), kBad, {"\"twin\"", "twice"});
  expect_refused(
      parse("{\"a\":{\"dtype\":\"F32\",\"dtype\":\"F16\",\"shape\":[1],\"data_offsets\":[0,4]}}",
            zeros(4)),
      kBad, {"\"a\"", "\"dtype\"", "twice"});
  expect_refused(parse("{\"__metadata__\":{\"k\":\"1\",\"k\":\"2\"}}", ""), kBad,
                 {"\"k\"", "twice"});
  expect_refused(parse("{\"__metadata__\":{},\"__metadata__\":{}}", ""), kBad,
                 {"__metadata__", "twice"});
}

TEST(Safetensors, RefusesShapesThatCannotBe) {
  const auto shape = [](const std::string& text, int64_t end) {
    return parse("{" + header_entry("bad", "F32", text, 0, end) + "}", zeros(size_t(end)));
  };
  expect_refused(shape("[0]", 0), kBad, {"\"bad\"", "dimension of zero"});
  expect_refused(shape("[4,0,2]", 0), kBad, {"\"bad\"", "[4, 0, 2]", "dimension of zero"});
  expect_refused(shape("[-1]", 4), kBad, {"\"bad\"", "shape", "-1"});
  expect_refused(shape("[1.0]", 4), kBad, {"\"bad\"", "shape", "1.0"});
  expect_refused(shape("[\"1\"]", 4), kBad, {"\"bad\"", "shape"});
  expect_refused(shape("[9223372036854775808]", 4), kBad, {"\"bad\"", "9223372036854775808"});
  expect_refused(shape("[99999999999999999999999]", 4), kBad, {"\"bad\"", "shape"});
  expect_refused(shape("[4294967296,4294967296]", 4), kBad, {"\"bad\"", "overflows"});
  // 2^61 elements of 32 bits wrap to 2^66; 2^62 + 1 elements of 4 bytes wrap to 4 bytes.
  expect_refused(shape("[4611686018427387905]", 4), kBad, {"\"bad\"", "4611686018427387905"});
  expect_refused(shape("[2]", 4), kBad, {"\"bad\"", "expected 8 bytes", "[0, 4)"});
  expect_refused(shape("[1]", 8), kBad, {"\"bad\"", "expected 4 bytes"});
}

TEST(Safetensors, RefusesOffsetsThatDoNotTileTheData) {
  const auto two = [](int64_t begin_a, int64_t end_a, int64_t begin_b, int64_t end_b,
                      size_t data_bytes) {
    return parse("{" + header_entry("a", "F32", "[1]", begin_a, end_a) + "," +
                     header_entry("b", "F32", "[1]", begin_b, end_b) + "}",
                 zeros(data_bytes));
  };
  EXPECT_TRUE(two(4, 8, 0, 4, 8));
  expect_refused(two(0, 4, 4, 8, 7), kBad,
                 {"\"b\"", "ends at byte 8", "holds 7", "download again"});
  expect_refused(two(0, 4, 2, 6, 8), kBad, {"\"a\" and \"b\"", "overlap at byte 2"});
  expect_refused(two(0, 4, 0, 4, 8), kBad, {"overlap at byte 0"});
  expect_refused(two(0, 4, 6, 10, 10), kBad, {"2 bytes in front of tensor \"b\""});
  expect_refused(two(2, 6, 6, 10, 10), kBad, {"2 bytes in front of tensor \"a\""});
  expect_refused(two(0, 4, 4, 8, 11), kBad, {"3 bytes after the last tensor"});
  expect_refused(two(0, 4, 8, 4, 8), kBad, {"\"b\"", "[8, 4)"});
  const int64_t top = INT64_MAX;
  expect_refused(two(0, 4, top - 4, top, 8), kBad, {"\"b\"", "ends at byte 9223372036854775807"});
  expect_refused(parse("{" + header_entry("a", "F32", "[1]", 0, 4) +
                           ",\"w\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":"
                           "[18446744073709551612,0]}}",
                       zeros(4)),
                 kBad, {"\"w\"", "data_offsets", "18446744073709551612"});
  expect_refused(
      parse("{\"w\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[-4,0]}}", zeros(4)), kBad,
      {"\"w\"", "data_offsets", "-4"});
  expect_refused(parse("{}", zeros(1)), kBad, {"1 bytes after"});
  expect_refused(parse("{" + header_entry("h", "F4", "[3]", 0, 2) + "}", zeros(2)), kBad,
                 {"\"h\"", "whole number of bytes"});
}

TEST(Safetensors, NamesTheFileOfABadPath) {
  const TempFolder folder;
  expect_refused(SafetensorsFile::open(folder.path() / "absent.safetensors"), kBad,
                 {"absent.safetensors", "No such file"});
  expect_refused(SafetensorsFile::open(folder.path()), kBad, {"is a directory"});
  expect_refused(SafetensorsFile::open("/dev/null"), kBad, {"/dev/null", "not a regular file"});
  expect_refused(SafetensorsFile::open(folder.write("none.safetensors", "")), kBad,
                 {"none.safetensors", "empty"});
  std::filesystem::create_symlink(folder.path() / "gone", folder.path() / "link.safetensors");
  expect_refused(SafetensorsFile::open(folder.path() / "link.safetensors"), kBad,
                 {"link.safetensors", "target does not exist", "download"});
}

// Opening must not read the data: a sparse file of 64 GiB opens at once.
TEST(Safetensors, OpensInTimeOfTheHeader) {
  const TempFolder folder;
  const int64_t bytes = int64_t{64} << 30;
  const std::string header =
      "{" + header_entry("big", "BF16", "[" + std::to_string(bytes / 2) + "]", 0, bytes) + "}";
  const auto path = folder.write("big.safetensors", safetensors_bytes(header, ""));
  std::error_code fault;
  std::filesystem::resize_file(path, 8 + header.size() + static_cast<uintmax_t>(bytes), fault);
  if (fault) GTEST_SKIP() << "no sparse files here: " << fault.message();
  const auto started = std::chrono::steady_clock::now();
  const auto file = SafetensorsFile::open(path);
  ASSERT_TRUE(file) << file.error().to_string();
  EXPECT_LT(std::chrono::steady_clock::now() - started, std::chrono::seconds(2));
  const TensorView& big = file->tensors().at("big");
  EXPECT_EQ(big.num_bytes(), bytes);
  EXPECT_EQ(big.bytes[bytes - 1], std::byte{0});
}

}  // namespace
}  // namespace clo
