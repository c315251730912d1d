// Models that are split into several GGUF files: opened by the first part, or refused with what is
// missing or does not belong.
#include <gtest/gtest.h>

#include <filesystem>

#include "gguf_writer.h"
#include "io/gguf.h"
#include "io/model_files.h"
#include "io/part_name.h"
#include "temp_files.h"

namespace clo {
namespace {

namespace fs = std::filesystem;
constexpr ErrorCode kBad = ErrorCode::kBadFile;

// A part with one tensor [4] of f32 for each name. `index` counts from 0, as the metadata does.
std::string part(uint32_t index, uint32_t count, uint32_t num_tensors,
                 const std::vector<std::string>& tensors) {
  GgufWriter writer;
  writer.head(tensors.size(), index == 0 ? 4 : 3)
      .integer("split.no", index)
      .integer("split.count", count)
      .integer("split.tensors.count", num_tensors);
  if (index == 0) writer.words("general.architecture", "llama");
  for (size_t i = 0; i < tensors.size(); ++i) writer.tensor(tensors[i], {4}, 0, 32 * i);
  return writer.data(32 * tensors.size()).bytes;
}

class GgufParts : public testing::Test {
 protected:
  static std::string name(int number, int count = 3) {
    return PartName{"m", ".gguf", number, count}.of(number);
  }
  // A whole set: no tensor in the first part, as some converters have it.
  void write_set() const {
    folder_.write(name(1), part(0, 3, 3, {}));
    folder_.write(name(2), part(1, 3, 3, {"a", "b"}));
    folder_.write(name(3), part(2, 3, 3, {"c"}));
  }
  fs::path first() const { return folder_.path() / name(1); }

  TempFolder folder_;
};

TEST(PartName, ReadsAndWritesNames) {
  const auto found = part_name("a-00002-of-00012.gguf", ".gguf");
  ASSERT_TRUE(found);
  EXPECT_EQ(found->stem, "a");
  EXPECT_EQ(found->number, 2);
  EXPECT_EQ(found->count, 12);
  EXPECT_EQ(found->of(11), "a-00011-of-00012.gguf");
  for (const char* other :
       {"", ".gguf", "a.gguf", "-00001-of-00002.gguf", "a-00001-of-00002.bin",
        "a-0001-of-00002.gguf", "a-00000-of-00002.gguf", "a-00003-of-00002.gguf",
        "a-0000x-of-00002.gguf", "a_00001-of-00002.gguf", "a-00001_of_00002.gguf"}) {
    EXPECT_FALSE(part_name(other, ".gguf")) << other;
  }
}

TEST_F(GgufParts, AreOneFile) {
  write_set();
  const auto file = GgufFile::open(first());
  ASSERT_TRUE(file) << file.error().to_string();
  EXPECT_EQ(file->tensors().size(), 3u);
  EXPECT_EQ(file->data_bytes(), 3 * 16);
  EXPECT_EQ(file->text("general.architecture").value(), "llama");
  ASSERT_EQ(file->files().size(), 3u);
  EXPECT_EQ(file->files()[2].filename(), name(3));
  EXPECT_EQ(file->where(file->tensors().at("b")), (folder_.path() / name(2)).string());
  EXPECT_EQ(file->where(), first().string());
}

TEST_F(GgufParts, TheirFolderIsTheModel) {
  write_set();
  EXPECT_EQ(ModelFiles::find(folder_.path()).value().path(), first());
  folder_.write("notes.txt", "x");
  EXPECT_EQ(ModelFiles::find(folder_.path()).value().path(), first());
  // So is the folder of one file.
  const TempFolder other;
  const fs::path alone = other.write("alone.gguf", part(0, 1, 1, {"a"}));
  EXPECT_EQ(ModelFiles::find(other.path()).value().path(), alone);
  // Of two models one must be named.
  folder_.write("other.gguf", part(0, 1, 1, {"a"}));
  expect_refused(ModelFiles::find(folder_.path()), kBad, {"2 GGUF models", name(1), "other.gguf"});
}

TEST_F(GgufParts, NamesWhatIsMissing) {
  write_set();
  fs::remove(folder_.path() / name(2));
  expect_refused(GgufFile::open(first()), kBad,
                 {first().string(), "3 parts", "1 of which is", name(2), "download"});
  fs::remove(folder_.path() / name(3));
  expect_refused(ModelFiles::find(folder_.path()), kBad, {"2 of which are", name(2), name(3)});
  write_set();
  fs::remove(first());
  expect_refused(ModelFiles::find(folder_.path()), kBad, {"not the first", name(1), "download"});
}

TEST_F(GgufParts, AsksForTheFirst) {
  write_set();
  expect_refused(GgufFile::open(folder_.path() / name(2)), kBad,
                 {name(2), "part 2 of 3", "give the first part", name(1)});
}

TEST_F(GgufParts, RefusesNamesThatDoNotLeadToTheOthers) {
  const fs::path renamed = folder_.write("renamed.gguf", part(0, 3, 3, {"a"}));
  expect_refused(GgufFile::open(renamed), kBad, {"part 1 of 3", "renamed-00001-of-00003.gguf"});
  const fs::path wrong = folder_.write("m-00001-of-00004.gguf", part(0, 3, 3, {"a"}));
  expect_refused(GgufFile::open(wrong), kBad, {"part 1 of 3", "m-00001-of-00003.gguf"});
}

TEST_F(GgufParts, RefusesPartsOfAnotherSet) {
  for (const std::string& other : {part(1, 4, 3, {"a", "b"}), part(2, 3, 3, {"a", "b"}),
                                   part(1, 3, 7, {"a", "b"}), part(0, 1, 3, {"a", "b"})}) {
    write_set();
    folder_.write(name(2), other);
    expect_refused(GgufFile::open(first()), kBad,
                   {name(2), "expected part 2 of 3, of 3 tensors", "not of one set"});
  }
  write_set();
  folder_.write(name(2), part(1, 3, 3, {"a"}));
  expect_refused(GgufFile::open(first()), kBad, {name(1), "2 tensors together", "expected 3"});
  folder_.write(name(2), part(1, 3, 3, {"a", "c"}));
  expect_refused(GgufFile::open(first()), kBad, {name(3), "\"c\"", "also in", name(2)});
}

TEST_F(GgufParts, RefusesBrokenMetadata) {
  const auto with = [&](uint32_t index, uint32_t count) {
    return GgufFile::open(folder_.write(name(1), part(index, count, 3, {"a"})));
  };
  expect_refused(with(3, 3), kBad, {name(1), "split.no", "3"});
  EXPECT_TRUE(with(0, 0));  // as a merged file says
  GgufWriter writer;
  writer.head(0, 2).integer("split.count", 3).integer("split.no", 0);
  expect_refused(GgufFile::open(folder_.write(name(1), writer.bytes)), kBad,
                 {"split.tensors.count", "missing"});
}

TEST_F(GgufParts, RefusesATruncatedPart) {
  write_set();
  const std::string whole = part(2, 3, 3, {"c"});
  folder_.write(name(3), whole.substr(0, whole.size() - 20));
  expect_refused(GgufFile::open(first()), kBad, {name(3), "truncated"});
}

}  // namespace
}  // namespace clo
