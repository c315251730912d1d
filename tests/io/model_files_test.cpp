// From what a user types to a model: directories, GGUF files, folders of the hub's cache.
#include "io/model_files.h"

#include <gtest/gtest.h>

#include "io/tensor_files.h"
#include "temp_files.h"

namespace clo {
namespace {

namespace fs = std::filesystem;
constexpr ErrorCode kBad = ErrorCode::kBadFile;

// The hub's cache: snapshots/<revision>/<file> is a link into blobs/.
class HubCache : public testing::Test {
 protected:
  fs::path cache() const { return folder_.path() / "models--org--name"; }
  void add_snapshot(const std::string& revision) const {
    const std::string base = "models--org--name/";
    folder_.write(base + "blobs/weights", vectors_file({"a"}));
    folder_.write(base + "blobs/config", "{}");
    const fs::path snapshot = cache() / "snapshots" / revision;
    fs::create_directories(snapshot);
    fs::create_symlink("../../blobs/weights", snapshot / "model.safetensors");
    fs::create_symlink("../../blobs/config", snapshot / "config.json");
  }
  TempFolder folder_;
};

TEST_F(HubCache, TakesTheSnapshotOfMain) {
  add_snapshot("aaa");
  add_snapshot("bbb");
  folder_.write("models--org--name/refs/main", "bbb\n");
  const auto files = ModelFiles::find(cache());
  ASSERT_TRUE(files) << files.error().to_string();
  EXPECT_EQ(files->path(), cache() / "snapshots" / "bbb");
  EXPECT_EQ(files->gguf(), nullptr);
  const auto tensors = TensorFiles::open(*files);
  ASSERT_TRUE(tensors) << tensors.error().to_string();
  EXPECT_EQ(tensors->names(), std::vector<std::string>{"a"});
  EXPECT_EQ(ModelFiles::find(files->path())->path(), files->path());
}

TEST_F(HubCache, TakesTheOnlySnapshot) {
  add_snapshot("aaa");
  const auto files = ModelFiles::find(cache());
  ASSERT_TRUE(files) << files.error().to_string();
  EXPECT_EQ(files->path(), cache() / "snapshots" / "aaa");
}

TEST_F(HubCache, RefusesToGuess) {
  fs::create_directories(cache() / "snapshots");
  expect_refused(ModelFiles::find(cache()), kBad, {"no snapshot"});
  add_snapshot("aaa");
  add_snapshot("bbb");
  expect_refused(ModelFiles::find(cache()), kBad, {"2 snapshots", "aaa", "bbb"});
  folder_.write("models--org--name/refs/main", "ccc");
  expect_refused(ModelFiles::find(cache()), kBad, {"refs/main", "ccc", "not there"});
  for (const char* reference : {"", "..", "../../etc", "a b"}) {
    folder_.write("models--org--name/refs/main", reference);
    expect_refused(ModelFiles::find(cache()), kBad, {"refs/main", "names no revision"});
  }
}

TEST_F(HubCache, NamesAnIncompleteDownload) {
  add_snapshot("aaa");
  fs::remove(cache() / "blobs" / "weights");
  expect_refused(TensorFiles::open(cache() / "snapshots" / "aaa"), kBad,
                 {"model.safetensors", "target does not exist", "download"});
}

TEST(ModelFiles, RefusesOtherFilesWithAdvice) {
  const TempFolder folder;
  // A GGUF file is a model by itself.
  const auto gguf = folder.write("m.gguf", "x");
  expect_refused(ModelFiles::find(gguf), kBad, {"m.gguf", "not a GGUF file"});
  const std::filesystem::path types = CLO_SOURCE_DIR "/tests/golden/gguf/types.gguf";
  const auto found = ModelFiles::find(types);
  ASSERT_TRUE(found) << found.error().to_string();
  EXPECT_EQ(found->path(), types);
  ASSERT_NE(found->gguf(), nullptr);
  EXPECT_EQ(found->gguf()->tensors().size(), 15u);
  expect_refused(ModelFiles::find(folder.write("pytorch_model.bin", "x")), kBad,
                 {"pytorch_model.bin", "pickle"});
  expect_refused(ModelFiles::find(folder.write("model.safetensors", "x")), kBad,
                 {"model.safetensors", "directory", folder.path().string()});
  expect_refused(ModelFiles::find(folder.write("notes.txt", "x")), kBad,
                 {"notes.txt", "is a file"});
  expect_refused(ModelFiles::find(folder.path() / "absent"), kBad, {"absent", "does not exist"});
  const TempFolder empty;
  expect_refused(ModelFiles::find(empty.path()), kBad, {"no config.json"});
  expect_refused(ModelFiles::find("/dev/null"), kBad, {"/dev/null", "model directory"});
}

}  // namespace
}  // namespace clo
