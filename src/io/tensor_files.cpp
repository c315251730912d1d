#include "io/tensor_files.h"

#include <algorithm>
#include <set>
#include <system_error>
#include <utility>

#include "base/try.h"
#include "io/json_object.h"
#include "io/refusal.h"

namespace clo {

namespace fs = std::filesystem;

namespace {

constexpr const char* kSingleFile = "model.safetensors";
constexpr const char* kIndexFile = "model.safetensors.index.json";
constexpr int64_t kMaxIndexBytes = int64_t{256} << 20;  // a million tensors with long names
constexpr size_t kMaxListed = 40;

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

// Why a directory without model.safetensors and without an index cannot be read.
Error no_weights(const fs::path& directory) {
  const std::vector<std::string> names = file_names(directory);
  const std::string where = directory.string();
  if (const auto found = ending_with(names, ".safetensors"); !found.empty()) {
    return bad_file(where, "holds " + listed(found, kMaxListed) + " but neither " + kSingleFile +
                               " nor " + kIndexFile +
                               (found.size() > 1 ? ": download the index too"
                                                 : ": if that file is the whole model, rename it"));
  }
  for (const char* ending : {".bin", ".pt", ".pth"}) {
    if (const auto found = ending_with(names, ending); !found.empty()) {
      return bad_file(where, "holds PyTorch pickles only (" + listed(found, kMaxListed) +
                                 "), expected " + kSingleFile + ": " + conversion_advice());
    }
  }
  if (const auto found = ending_with(names, ".gguf"); !found.empty()) {
    return bad_file(where, "holds GGUF files only (" + listed(found, kMaxListed) + "), expected " +
                               kSingleFile + ": download the safetensors version");
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
  return no_weights(model_dir);
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
                                 in_quotes(shard) +
                                 ", which does not hold it; download the index and "
                                 "the shards of one version");
    }
  }
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
                                         ": the shards are not of one version");
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
  if (held == holder_.end()) {
    return bad_file(directory_.string(), "tensor " + in_quotes(name) + " of shape " +
                                             shape_text(shape) + " is missing from the weights (" +
                                             std::to_string(holder_.size()) +
                                             " tensors were found)");
  }
  const std::string where = paths_[held->second].string();
  const TensorView* view = find(name);
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

std::vector<std::string> TensorFiles::names() const {
  if (gguf_) return gguf_->names();
  std::vector<std::string> all;
  for (const auto& [name, position] : holder_) all.push_back(name);
  return all;
}

int64_t TensorFiles::total_bytes() const {
  if (gguf_) return gguf_->total_bytes();
  int64_t total = 0;
  for (const SafetensorsFile& file : opened_) total += file.data_bytes();
  return total;
}

}  // namespace clo
