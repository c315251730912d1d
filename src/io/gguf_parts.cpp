// GgufFile::open: one file, or all parts of a model that was split. Every part says in its metadata
// which it is (split.no, counted from 0), of how many (split.count), and how many tensors all have
// together (split.tensors.count); where the others lie is in the file's name alone.
#include <system_error>
#include <utility>

#include "base/try.h"
#include "io/gguf.h"
#include "io/part_name.h"
#include "io/refusal.h"

namespace clo {

namespace fs = std::filesystem;

namespace {

constexpr size_t kMaxListed = 10;

// What a part says of itself and of its set.
struct Place {
  int64_t number = 1;
  int64_t count = 1;
  int64_t num_tensors = 0;  // of all parts
};

Result<Place> read_place(const GgufFile& file) {
  Place place{1, 1, std::ssize(file.tensors())};
  if (!file.metadata().contains("split.count")) return place;
  CLO_ASSIGN(const int64_t count, file.integer("split.count"));
  if (count == 0 || count == 1) return place;  // 0: parts that were merged again
  place.count = count;
  CLO_ASSIGN(const int64_t index, file.integer("split.no"));
  CLO_ASSIGN(place.num_tensors, file.integer("split.tensors.count"));
  if (index < 0 || index >= place.count) {
    return bad_file(file.where(), "metadata \"split.no\" is " + std::to_string(index) +
                                      " and \"split.count\" is " + std::to_string(place.count) +
                                      ": the first is expected to be from 0 to one below the "
                                      "second");
  }
  place.number = index + 1;
  return place;
}

std::string part_of(int64_t number, int64_t count) {
  return "part " + std::to_string(number) + " of " + std::to_string(count);
}

// The paths of all parts, in order; the first is given. Fails: kBadFile when the name does not lead
// to the others, or some of them are not there.
Result<std::vector<fs::path>> find_parts(const fs::path& first, const Place& place) {
  const auto name = part_name(first.filename().string(), ".gguf");
  if (!name || name->count != place.count || name->number != place.number) {
    PartName expected{name ? name->stem : first.stem().string(), ".gguf", place.number,
                      place.count};
    return bad_file(first.string(),
                    "is " + part_of(place.number, place.count) +
                        " by its metadata, so its name is expected to be like " +
                        in_quotes(expected.of(place.number)) +
                        ", by which the other parts are found: give all parts the names that they "
                        "were published under");
  }
  if (place.number != 1) {
    return bad_file(first.string(), "is " + part_of(place.number, place.count) +
                                        " of a model; give the first part, " +
                                        in_quotes(name->of(1)) + ", which leads to the others");
  }
  std::vector<fs::path> paths;
  std::vector<std::string> missing;
  std::error_code ignored;
  for (int64_t number = 1; number <= place.count; ++number) {
    paths.push_back(first.parent_path() / name->of(number));
    if (!fs::exists(paths.back(), ignored)) missing.push_back(in_quotes(name->of(number)));
  }
  if (!missing.empty()) {
    return bad_file(first.string(), "is the first of " + std::to_string(place.count) + " parts, " +
                                        std::to_string(missing.size()) + " of which " +
                                        (missing.size() == 1 ? "is" : "are") +
                                        " missing: " + listed(missing, kMaxListed) +
                                        "; download them into the same folder");
  }
  return paths;
}

}  // namespace

Result<GgufFile> GgufFile::open_one(const fs::path& path) {
  CLO_ASSIGN(MappedFile mapped, MappedFile::open(path));
  CLO_ASSIGN(GgufFile parsed, parse(mapped.bytes(), path.string()));
  parsed.files_.push_back(std::move(mapped));
  return parsed;
}

Status GgufFile::take_in(GgufFile part) {
  for (auto& [name, tensor] : part.tensors_) {
    tensor.part = files_.size();
    const auto [held, is_new] = tensors_.emplace(name, tensor);
    if (!is_new) {
      return bad_file(part.where_, "holds tensor " + in_quotes(name) + ", which is also in " +
                                       where(held->second) +
                                       ": the parts are not of one model, download them again");
    }
  }
  data_bytes_ += part.data_bytes_;
  files_.push_back(std::move(part.files_.front()));
  return Ok{};
}

Result<GgufFile> GgufFile::open(const fs::path& path) {
  CLO_ASSIGN(GgufFile file, open_one(path));
  CLO_ASSIGN(const Place first, read_place(file));
  if (first.count == 1) return file;
  CLO_ASSIGN(const std::vector<fs::path> paths, find_parts(path, first));
  for (size_t i = 1; i < paths.size(); ++i) {
    CLO_ASSIGN(GgufFile part, open_one(paths[i]));
    CLO_ASSIGN(const Place found, read_place(part));
    const auto number = static_cast<int64_t>(i) + 1;
    if (found.number != number || found.count != first.count ||
        found.num_tensors != first.num_tensors) {
      return bad_file(part.where_, "is " + part_of(found.number, found.count) + ", of " +
                                       std::to_string(found.num_tensors) +
                                       " tensors in all, by its metadata; expected " +
                                       part_of(number, first.count) + ", of " +
                                       std::to_string(first.num_tensors) + " tensors, as " +
                                       path.filename().string() +
                                       " says: the parts are not of one set, download them again");
    }
    CLO_TRY(file.take_in(std::move(part)));
  }
  if (std::ssize(file.tensors_) != first.num_tensors) {
    return bad_file(path.string(),
                    "is the first of " + std::to_string(first.count) + " parts, which hold " +
                        std::to_string(file.tensors_.size()) + " tensors together, expected " +
                        std::to_string(first.num_tensors) +
                        " (\"split.tensors.count\"): the parts are not of one set, "
                        "download them again");
  }
  return file;
}

std::vector<fs::path> GgufFile::files() const {
  std::vector<fs::path> paths;
  for (const MappedFile& file : files_) paths.push_back(file.path());
  return paths;
}

std::string GgufFile::where(const GgufTensor& tensor) const {
  return files_.empty() ? where_ : files_[tensor.part].path().string();
}

}  // namespace clo
