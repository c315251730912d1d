#include "io/tensor_files.h"

#include <gtest/gtest.h>

#include <utility>

#include "temp_files.h"

namespace clo {
namespace {

namespace fs = std::filesystem;
constexpr ErrorCode kBad = ErrorCode::kBadFile;
constexpr const char* kIndex = "model.safetensors.index.json";
const std::vector<int64_t> kFour = {4};

std::string index_of(const std::vector<std::pair<std::string, std::string>>& weight_map) {
  std::string text = "{\"metadata\":{\"total_size\":1},\"weight_map\":{";
  for (size_t i = 0; i < weight_map.size(); ++i) {
    text += (i ? "," : "") + ("\"" + weight_map[i].first + "\":\"" + weight_map[i].second + "\"");
  }
  return text + "}}";
}

TEST(TensorFiles, ReadsASingleFile) {
  const TempFolder folder;
  folder.write("model.safetensors", vectors_file({"a", "b"}));
  auto opened = TensorFiles::open(folder.path());
  ASSERT_TRUE(opened) << opened.error().to_string();
  const TensorFiles files = std::move(opened).value();  // views survive a move
  EXPECT_EQ(files.names(), (std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(files.total_bytes(), 32);
  EXPECT_EQ(files.files(), std::vector<fs::path>{folder.path() / "model.safetensors"});
  EXPECT_EQ(files.find("c"), nullptr);
  const auto b = files.require("b", kFour);
  ASSERT_TRUE(b) << b.error().to_string();
  float values[4];
  convert_to_f32(b->type, b->bytes, values, 4);
  EXPECT_EQ(values[3], 1);
}

TEST(TensorFiles, RequireNamesWhatIsWrong) {
  const TempFolder folder;
  folder.write("model.safetensors",
               safetensors_bytes("{" + header_entry("a", "F32", "[2,2]", 0, 16) + "," +
                                     header_entry("q", "I8", "[4]", 16, 20) + "}",
                                 std::string(20, '\0')));
  const auto files = TensorFiles::open(folder.path());
  ASSERT_TRUE(files) << files.error().to_string();
  expect_refused(files->require("z", kFour), kBad,
                 {folder.path().string(), "\"z\"", "[4]", "missing"});
  expect_refused(files->require("a", kFour), kBad, {"\"a\"", "[2, 2]", "[4]"});
  expect_refused(files->require("q", kFour), ErrorCode::kUnsupported, {"\"q\"", "I8", "F32"});
  EXPECT_EQ(files->find("q"), nullptr);
  EXPECT_TRUE(files->contains("q"));
  EXPECT_FALSE(files->contains("z"));
}

TEST(TensorFiles, ReadsShards) {
  const TempFolder folder;
  folder.write("s1.safetensors", vectors_file({"a", "b"}));
  folder.write("sub/s2.safetensors", vectors_file({"c"}));
  folder.write(
      kIndex,
      index_of({{"a", "s1.safetensors"}, {"b", "s1.safetensors"}, {"c", "sub/s2.safetensors"}}));
  const auto files = TensorFiles::open(folder.path());
  ASSERT_TRUE(files) << files.error().to_string();
  EXPECT_EQ(files->names().size(), 3u);
  EXPECT_EQ(files->files().size(), 2u);
  EXPECT_TRUE(files->require("c", kFour));
}

TEST(TensorFiles, SingleFileWinsOverAnIndex) {
  const TempFolder folder;
  folder.write("model.safetensors", vectors_file({"single"}));
  folder.write(kIndex, index_of({{"a", "absent.safetensors"}}));
  const auto files = TensorFiles::open(folder.path());
  ASSERT_TRUE(files) << files.error().to_string();
  EXPECT_EQ(files->names(), std::vector<std::string>{"single"});
}

TEST(TensorFiles, ListsAllMissingShards) {
  const TempFolder folder;
  folder.write("s1.safetensors", vectors_file({"a"}));
  folder.write(
      kIndex,
      index_of({{"a", "s1.safetensors"}, {"b", "s2.safetensors"}, {"c", "s3.safetensors"}}));
  expect_refused(TensorFiles::open(folder.path()), kBad,
                 {kIndex, "2 of 3", "s2.safetensors", "s3.safetensors", "download"});
}

TEST(TensorFiles, NamesAStaleIndex) {
  const TempFolder folder;
  folder.write("s1.safetensors", vectors_file({"a"}));
  folder.write("s2.safetensors", vectors_file({"b"}));
  folder.write(kIndex, index_of({{"a", "s1.safetensors"}, {"gone", "s2.safetensors"}}));
  expect_refused(TensorFiles::open(folder.path()), kBad,
                 {kIndex, "stale", "\"gone\"", "s2.safetensors"});
  folder.write(kIndex, index_of({{"a", "s2.safetensors"}, {"b", "s1.safetensors"}}));
  expect_refused(TensorFiles::open(folder.path()), kBad, {kIndex, "stale", "\"a\""});
  folder.write("s2.safetensors", vectors_file({"a", "b"}));
  folder.write(kIndex, index_of({{"a", "s1.safetensors"}, {"b", "s2.safetensors"}}));
  expect_refused(TensorFiles::open(folder.path()), kBad,
                 {"\"a\"", "s1.safetensors", "s2.safetensors"});
}

TEST(TensorFiles, RefusesAMalformedIndex) {
  const TempFolder folder;
  const auto with_index = [&](const std::string& text) {
    folder.write(kIndex, text);
    return TensorFiles::open(folder.path());
  };
  expect_refused(with_index(""), kBad, {kIndex, "empty"});
  expect_refused(with_index("[]"), kBad, {kIndex, "object"});
  expect_refused(with_index("{"), kBad, {kIndex, "not valid JSON"});
  expect_refused(with_index("{}"), kBad, {kIndex, "weight_map"});
  expect_refused(with_index("{\"weight_map\":{}}"), kBad, {kIndex, "no tensors"});
  expect_refused(with_index("{\"weight_map\":{\"a\":1}}"), kBad, {kIndex, "weight_map.a", "text"});
  expect_refused(with_index("{\"weight_map\":{\"a\":null}}"), kBad, {kIndex, "\"a\""});
  expect_refused(with_index("{\"weight_map\":{\"a\":\"x\",\"a\":\"y\"}}"), kBad,
                 {kIndex, "\"a\" twice"});
  expect_refused(with_index("version https://git-lfs.github.com/spec/v1\n"), kBad, {kIndex, "LFS"});
}

TEST(TensorFiles, KeepsShardsInsideTheDirectory) {
  const TempFolder folder;
  folder.write("outside.safetensors", vectors_file({"a"}));
  folder.write("model/inside.safetensors", vectors_file({"a"}));
  const std::string absolute = (folder.path() / "outside.safetensors").string();
  for (const std::string& shard :
       {std::string("../outside.safetensors"), std::string("x/../../outside.safetensors"), absolute,
        std::string(""), std::string("sub/"), std::string("inside.safetensors\\u0000")}) {
    folder.write(std::string("model/") + kIndex, index_of({{"a", shard}}));
    expect_refused(TensorFiles::open(folder.path() / "model"), kBad,
                   {kIndex, "\"a\"", "inside the model directory"});
  }
}

TEST(TensorFiles, AdvisesOnOtherFormats) {
  const auto open_with = [](const std::vector<std::string>& names) {
    const TempFolder folder;
    for (const std::string& name : names) folder.write(name, "x");
    return TensorFiles::open(folder.path());
  };
  expect_refused(open_with({"config.json"}), kBad, {"holds no weights", "model.safetensors"});
  expect_refused(open_with({"pytorch_model.bin"}), kBad,
                 {"pytorch_model.bin", "pickle", "save_pretrained"});
  expect_refused(open_with({"m.gguf"}), kBad, {"m.gguf", "GGUF"});
  expect_refused(
      open_with({"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}), kBad,
      {"model-00001-of-00002.safetensors", "index"});
  expect_refused(open_with({"consolidated.safetensors"}), kBad,
                 {"consolidated.safetensors", "rename"});
  expect_refused(TensorFiles::open("/nonexistent/model"), kBad, {"/nonexistent/model"});
}

TEST(TensorFiles, ReportsATruncatedShard) {
  const TempFolder folder;
  const std::string whole = vectors_file({"a", "b"});
  folder.write("s1.safetensors", whole.substr(0, whole.size() - 5));
  folder.write(kIndex, index_of({{"a", "s1.safetensors"}, {"b", "s1.safetensors"}}));
  expect_refused(TensorFiles::open(folder.path()), kBad, {"s1.safetensors", "truncated"});
}

}  // namespace
}  // namespace clo
