#include "io/tensor_files.h"

#include <algorithm>
#include <array>
#include <set>
#include <system_error>
#include <utility>

#include "base/try.h"
#include "io/json_object.h"
#include "io/part_name.h"
#include "io/refusal.h"

namespace clo {

namespace fs = std::filesystem;

namespace {

constexpr const char* kSingleFile = "model.safetensors";
constexpr const char* kIndexFile = "model.safetensors.index.json";
constexpr const char* kEnding = ".safetensors";
constexpr std::array<std::string_view, 5> kWeightEndings = {".safetensors", ".bin", ".pt", ".pth",
                                                            ".gguf"};
constexpr int64_t kMaxIndexBytes = int64_t{256} << 20;  // a million tensors with long names
constexpr size_t kMaxListed = 40;
constexpr const char* kIndexAdvice =
    "download the index and the shards of one version, or remove the index if the shards are whole";

// Whether the directory has an entry of this name; a broken link counts, so that opening it can
// say what is wrong.
bool has_entry(const fs::path& path) {
  std::error_code fault;
  return fs::exists(fs::symlink_status(path, fault));
}

std::vector<std::string> file_names(const fs::path& directory) {
  std::vector<std::string> names;
  std::error_code fault;
  fs::directory_iterator entry(directory, fault);
  for (; !fault && entry != fs::directory_iterator(); entry.increment(fault)) {
    names.push_back(entry->path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

std::vector<std::string> ending_with(const std::vector<std::string>& names,
                                     std::string_view ending) {
  std::vector<std::string> found;
  std::copy_if(names.begin(), names.end(), std::back_inserter(found),
               [&](const std::string& name) { return name.ends_with(ending); });
  return found;
}

std::string conversion_advice() {
  return "convert it with transformers' save_pretrained, which writes model.safetensors, or "
         "download the safetensors version";
}

// Why a directory without safetensors files cannot be read.
Error no_weights(const fs::path& directory) {
  const std::vector<std::string> names = file_names(directory);
  const std::string where = directory.string();
  for (const char* ending : {".bin", ".pt", ".pth"}) {
    if (const auto found = ending_with(names, ending); !found.empty()) {
      return bad_file(where, "holds PyTorch pickles only (" + listed(found, kMaxListed) +
                                 "), expected " + kSingleFile + ": " + conversion_advice());
    }
  }
  if (const auto found = ending_with(names, ".gguf"); !found.empty()) {
    return bad_file(where, "holds GGUF files only (" + listed(found, kMaxListed) + "), expected " +
                               kSingleFile +
                               ": give the GGUF file itself as the model, or download the "
                               "safetensors version");
  }
  return bad_file(where,
                  std::string("holds no weights: expected ") + kSingleFile + " or " + kIndexFile);
}

// Shard names come from outside: only plain paths below the directory are opened.
bool stays_inside(const std::string& name) {
  if (name.empty() || name.find('\0') != std::string::npos) return false;
  const fs::path path(name);
  if (path.is_absolute() || !path.has_filename()) return false;
  return std::none_of(path.begin(), path.end(), [](const fs::path& part) { return part == ".."; });
}

// Files that are numbered as parts of a set must be there to the last: without an index nothing
// else tells a download that is half done from a model.
Status check_complete(const fs::path& directory, const std::vector<std::string>& names) {
  const std::set<std::string> present(names.begin(), names.end());
  std::set<std::string> sets;  // by their first parts: each is looked through once
  std::vector<std::string> missing;
  for (const std::string& name : names) {
    const auto part = part_name(name, kEnding);
    if (!part || !sets.insert(part->of(1)).second) continue;
    for (int64_t number = 1; number <= part->count; ++number) {
      if (!present.contains(part->of(number))) missing.push_back(in_quotes(part->of(number)));
    }
  }
  if (missing.empty()) return Ok{};
  return bad_file(directory.string(), "lacks " + std::to_string(missing.size()) +
                                          (missing.size() == 1 ? " shard" : " shards") +
                                          " of the model: " + listed(missing, kMaxListed) +
                                          "; download " + (missing.size() == 1 ? "it" : "them"));
}

// The way in which a checkpoint without a tensor, or with one of another type, keeps it instead:
// by the names of the tensors beside it. Empty when it looks like none of these.
std::string quantisation_of(const std::string& name, const std::string& type,
                            const std::map<std::string, size_t>& names) {
  const std::string stem = name.substr(0, name.rfind('.'));
  const auto beside = [&](const char* ending) { return names.contains(stem + ending); };
  if (beside(".qweight")) return beside(".g_idx") ? "GPTQ" : "AWQ or GPTQ";
  if (beside(".weight_packed")) return "compressed-tensors";
  if (beside(".weight.absmax") || beside(".SCB")) return "bitsandbytes";
  if (type.starts_with("F8_")) return "fp8";
  return "";
}

}  // namespace

Result<TensorFiles> TensorFiles::open(const ModelFiles& model) {
  if (!model.gguf()) return open(model.path());
  TensorFiles files;
  CLO_ASSIGN(GgufTensors tensors, GgufTensors::open(model.gguf()));
  files.paths_ = model.gguf()->files();
  files.gguf_ = std::make_shared<GgufTensors>(std::move(tensors));
  return files;
}

Result<TensorFiles> TensorFiles::open(const fs::path& model_dir) {
  std::error_code fault;
  if (!fs::is_directory(model_dir, fault)) {
    return bad_file(model_dir.string(), "is not a directory; a model directory is expected");
  }
  if (has_entry(model_dir / kSingleFile)) return open_single(model_dir);
  if (has_entry(model_dir / kIndexFile)) return open_sharded(model_dir);
  const std::vector<std::string> names = ending_with(file_names(model_dir), kEnding);
  if (names.empty()) return no_weights(model_dir);
  return open_all(model_dir, names);
}

Result<TensorFiles> TensorFiles::open_single(const fs::path& model_dir) {
  TensorFiles files;
  files.directory_ = model_dir;
  CLO_TRY(files.add(model_dir / kSingleFile));
  return files;
}

Result<TensorFiles> TensorFiles::open_sharded(const fs::path& model_dir) {
  const fs::path index_path = model_dir / kIndexFile;
  const std::string where = index_path.string();
  CLO_ASSIGN(const JsonObject index, JsonObject::read(index_path, kMaxIndexBytes));
  CLO_ASSIGN(const std::optional<JsonObject> weight_map, index.object("weight_map"));
  if (!weight_map) return bad_file(where, "has no \"weight_map\" object");

  std::map<std::string, std::string> shard_of;
  std::set<std::string> shards;
  for (const std::string& name : weight_map->keys()) {
    CLO_ASSIGN(const std::optional<std::string> shard, weight_map->text(name));
    if (!shard) return bad_file(where, "names no file for tensor " + in_quotes(name));
    if (!stays_inside(*shard)) {
      return bad_file(where, "puts tensor " + in_quotes(name) + " into " + in_quotes(*shard) +
                                 ": a shard must be a file inside the model directory");
    }
    shard_of[name] = *shard;
    shards.insert(*shard);
  }
  if (shards.empty()) return bad_file(where, "names no tensors");

  std::vector<std::string> missing;
  std::error_code ignored;
  for (const std::string& shard : shards) {
    if (!fs::exists(model_dir / shard, ignored)) missing.push_back(in_quotes(shard));
  }
  if (!missing.empty()) {
    return bad_file(
        where, "names " + std::to_string(missing.size()) + " of " + std::to_string(shards.size()) +
                   " shards that are missing: " + listed(missing, kMaxListed) + "; download them");
  }

  TensorFiles files;
  files.directory_ = model_dir;
  for (const std::string& shard : shards) CLO_TRY(files.add(model_dir / shard));
  for (const auto& [name, shard] : shard_of) {
    const auto found = files.holder_.find(name);
    if (found == files.holder_.end() || files.paths_[found->second] != model_dir / shard) {
      return bad_file(where, "is stale: it puts tensor " + in_quotes(name) + " into " +
                                 in_quotes(shard) + ", which does not hold it; " + kIndexAdvice);
    }
  }
  for (const auto& [name, position] : files.holder_) {
    if (shard_of.contains(name)) continue;
    return bad_file(where, "is stale: it does not name tensor " + in_quotes(name) + ", which " +
                               in_quotes(files.paths_[position].filename().string()) + " holds; " +
                               kIndexAdvice);
  }
  return files;
}

Result<TensorFiles> TensorFiles::open_all(const fs::path& model_dir,
                                          const std::vector<std::string>& names) {
  CLO_TRY(check_complete(model_dir, names));
  TensorFiles files;
  files.directory_ = model_dir;
  for (const std::string& name : names) CLO_TRY(files.add(model_dir / name));
  return files;
}

Status TensorFiles::add(const fs::path& path) {
  CLO_ASSIGN(SafetensorsFile file, SafetensorsFile::open(path));
  const size_t position = opened_.size();
  const auto hold = [&](const std::string& name) -> Status {
    const auto [held, is_new] = holder_.emplace(name, position);
    if (!is_new) {
      return bad_file(path.string(), "holds tensor " + in_quotes(name) + ", which is also in " +
                                         paths_[held->second].string() +
                                         ": the shards are not of one version; keep those of one, "
                                         "with their index");
    }
    return Ok{};
  };
  for (const auto& [name, view] : file.tensors()) CLO_TRY(hold(name));
  for (const auto& [name, type] : file.unsupported_tensors()) CLO_TRY(hold(name));
  opened_.push_back(std::move(file));
  paths_.push_back(path);
  return Ok{};
}

const TensorView* TensorFiles::find(const std::string& name) const {
  const auto held = holder_.find(name);
  if (held == holder_.end()) return nullptr;
  const auto& tensors = opened_[held->second].tensors();
  const auto found = tensors.find(name);
  return found == tensors.end() ? nullptr : &found->second;
}

bool TensorFiles::contains(const std::string& name) const {
  return gguf_ ? gguf_->contains(name) : holder_.count(name) > 0;
}

Result<TensorView> TensorFiles::require(const std::string& name,
                                        std::span<const int64_t> shape) const {
  if (gguf_) return gguf_->require(name, shape);
  CLO_TRY(check(name, shape));
  return *find(name);
}

Status TensorFiles::check(const std::string& name, std::span<const int64_t> shape) const {
  if (gguf_) return gguf_->check(name, shape);
  const auto held = holder_.find(name);
  const TensorView* view = find(name);
  if (!view) {
    std::string type;
    if (held != holder_.end()) type = opened_[held->second].unsupported_tensors().at(name);
    if (const std::string method = quantisation_of(name, type, holder_); !method.empty()) {
      return unsupported(directory_.string(),
                         "tensor " + in_quotes(name) + " is quantised (" + method +
                             "): safetensors must be F32, F16 or BF16, so use the unquantised "
                             "version of the model, or a GGUF file of it");
    }
  }
  if (held == holder_.end()) {
    return bad_file(directory_.string(), "tensor " + in_quotes(name) + " of shape " +
                                             shape_text(shape) + " is missing from the weights (" +
                                             std::to_string(holder_.size()) +
                                             " tensors were found)");
  }
  const std::string where = paths_[held->second].string();
  if (!view) {
    const std::string& type = opened_[held->second].unsupported_tensors().at(name);
    return unsupported(where, "tensor " + in_quotes(name) + " has type " + in_quotes(type) +
                                  "; weights must be F32, F16 or BF16, so use the unquantised "
                                  "version of the model");
  }
  if (!std::equal(shape.begin(), shape.end(), view->shape.begin(), view->shape.end())) {
    return bad_file(where, "tensor " + in_quotes(name) + " has shape " + shape_text(view->shape) +
                               ", expected " + shape_text(shape) +
                               " from config.json: the two are not of one model");
  }
  return Ok{};
}

bool TensorFiles::block_row(const std::string& name, int64_t row, WeightBlocks blocks,
                            BlockRow& target) const {
  return gguf_ && gguf_->block_row(name, row, blocks, target);
}

std::vector<std::string> TensorFiles::names() const {
  if (gguf_) return gguf_->names();
  std::vector<std::string> all;
  for (const auto& [name, position] : holder_) all.push_back(name);
  return all;
}

std::vector<std::string> TensorFiles::files_not_read() const {
  std::vector<std::string> found;
  if (gguf_) return found;
  std::set<std::string> read;
  for (const fs::path& path : paths_) read.insert(path.filename().string());
  for (const std::string& name : file_names(directory_)) {
    const bool is_weights =
        std::any_of(kWeightEndings.begin(), kWeightEndings.end(),
                    [&](std::string_view ending) { return name.ends_with(ending); });
    if (is_weights && !read.contains(name)) found.push_back(name);
  }
  return found;
}

int64_t TensorFiles::total_bytes() const {
  if (gguf_) return gguf_->total_bytes();
  int64_t total = 0;
  for (const SafetensorsFile& file : opened_) total += file.data_bytes();
  return total;
}

}  // namespace clo
