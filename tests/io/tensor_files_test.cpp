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

TEST(TensorFiles, NamesAnIndexThatLacksATensorOfItsShards) {
  const TempFolder folder;
  folder.write("s1.safetensors", vectors_file({"a", "new"}));
  folder.write(kIndex, index_of({{"a", "s1.safetensors"}}));
  expect_refused(TensorFiles::open(folder.path()), kBad,
                 {kIndex, "stale", "\"new\"", "s1.safetensors", "remove the index"});
  // Without it they are whole.
  fs::remove(folder.path() / kIndex);
  EXPECT_TRUE(TensorFiles::open(folder.path()));
}

TEST(TensorFiles, ReadsFilesWithoutAnIndex) {
  const TempFolder folder;
  folder.write("part-a.safetensors", vectors_file({"a", "b"}));
  folder.write("part-b.safetensors", vectors_file({"c"}));
  const auto files = TensorFiles::open(folder.path());
  ASSERT_TRUE(files) << files.error().to_string();
  EXPECT_EQ(files->names(), (std::vector<std::string>{"a", "b", "c"}));
  EXPECT_EQ(files->files().size(), 2u);
  EXPECT_EQ(files->total_bytes(), 48);
  EXPECT_TRUE(files->require("c", kFour));
  folder.write("part-c.safetensors", vectors_file({"b"}));
  expect_refused(TensorFiles::open(folder.path()), kBad,
                 {"part-c.safetensors", "\"b\"", "also in", "part-a.safetensors"});
}

TEST(TensorFiles, ListsMissingShardsWithoutAnIndexToo) {
  const TempFolder folder;
  folder.write("model-00002-of-00004.safetensors", vectors_file({"b"}));
  folder.write("model-00004-of-00004.safetensors", vectors_file({"d"}));
  expect_refused(TensorFiles::open(folder.path()), kBad,
                 {"2 shards", "model-00001-of-00004.safetensors",
                  "model-00003-of-00004.safetensors", "download them"});
}

TEST(TensorFiles, ListsWeightsThatAreNotRead) {
  const TempFolder folder;
  folder.write("model.safetensors", vectors_file({"a"}));
  for (const char* name : {"pytorch_model.bin", "consolidated.00.pth", "adapter.safetensors",
                           "config.json", "q4.gguf"}) {
    folder.write(name, "x");
  }
  const auto files = TensorFiles::open(folder.path());
  ASSERT_TRUE(files) << files.error().to_string();
  EXPECT_EQ(files->files_not_read(),
            (std::vector<std::string>{"adapter.safetensors", "consolidated.00.pth",
                                      "pytorch_model.bin", "q4.gguf"}));
}

TEST(TensorFiles, NamesTheWayOfQuantising) {
  // Tensors beside x.weight, or x.weight itself, all of one byte.
  const auto checked = [](const std::vector<std::pair<std::string, std::string>>& tensors) {
    const TempFolder folder;
    std::string header = "{";
    for (size_t i = 0; i < tensors.size(); ++i) {
      const auto at = static_cast<int64_t>(i);
      header +=
          (i ? "," : "") + header_entry(tensors[i].first, tensors[i].second, "[1]", at, at + 1);
    }
    folder.write("model.safetensors",
                 safetensors_bytes(header + "}", std::string(tensors.size(), '\0')));
    return TensorFiles::open(folder.path()).value().check("x.weight", kFour);
  };
  constexpr ErrorCode kNo = ErrorCode::kUnsupported;
  expect_refused(checked({{"x.qweight", "U8"}, {"x.g_idx", "U8"}}), kNo,
                 {"\"x.weight\"", "(GPTQ)", "unquantised", "GGUF"});
  expect_refused(checked({{"x.qweight", "U8"}, {"x.qzeros", "U8"}}), kNo, {"(AWQ or GPTQ)"});
  expect_refused(checked({{"x.weight", "U8"}, {"x.weight.absmax", "U8"}}), kNo, {"(bitsandbytes)"});
  expect_refused(checked({{"x.weight", "I8"}, {"x.SCB", "U8"}}), kNo, {"(bitsandbytes)"});
  expect_refused(checked({{"x.weight_packed", "U8"}}), kNo, {"(compressed-tensors)"});
  expect_refused(checked({{"x.weight", "F8_E4M3"}}), kNo, {"(fp8)"});
  expect_refused(checked({{"x.weight", "F8_E5M2"}}), kNo, {"(fp8)"});
  expect_refused(checked({{"x.weight", "I8"}}), kNo, {"type \"I8\""});
  expect_refused(checked({{"y.qweight", "U8"}}), kBad, {"\"x.weight\"", "missing"});
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
  expect_refused(open_with({"consolidated.00.pth"}), kBad,
                 {"consolidated.00.pth", "pickle", "save_pretrained"});
  expect_refused(open_with({"m.gguf"}), kBad, {"m.gguf", "GGUF", "give the GGUF file itself"});
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
