#include "io/model_files.h"

#include <algorithm>
#include <set>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "base/try.h"
#include "io/gguf_model.h"
#include "io/mapped_file.h"
#include "io/part_name.h"
#include "io/refusal.h"

namespace clo {

namespace fs = std::filesystem;

namespace {

constexpr size_t kMaxListed = 10;
constexpr size_t kMaxRevisionLength = 200;

Error file_instead_of_directory(const fs::path& path) {
  const std::string ending = path.extension().string();
  std::string advice = "give the directory that holds config.json and model.safetensors";
  if (ending == ".bin" || ending == ".pt" || ending == ".pth") {
    advice =
        "PyTorch pickles are not read; convert the model with transformers' save_pretrained "
        "and " +
        advice;
  } else if (ending == ".safetensors") {
    advice += " (probably " + in_quotes(path.parent_path().string()) + ")";
  }
  return bad_file(path.string(), "is a file, expected a model directory: " + advice);
}

// The revision that refs/main names, trimmed; it must be a plain folder name.
Result<std::string> read_revision(const fs::path& reference) {
  CLO_ASSIGN(const MappedFile file, MappedFile::open(reference));
  const std::string_view text(reinterpret_cast<const char*>(file.bytes().data()),
                              std::min(file.bytes().size(), kMaxRevisionLength));
  const size_t first = text.find_first_not_of(" \t\r\n");
  const size_t last = text.find_last_not_of(" \t\r\n");
  std::string revision;
  if (first != std::string_view::npos) revision = text.substr(first, last - first + 1);
  const bool is_plain = std::all_of(revision.begin(), revision.end(), [](char c) {
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '-' ||
           c == '_' || c == '.';
  });
  if (revision.empty() || revision == "." || revision == ".." || !is_plain) {
    return bad_file(reference.string(), "names no revision, found " + in_quotes(revision));
  }
  return revision;
}

Result<fs::path> pick_snapshot(const fs::path& cache) {
  std::error_code fault;
  const fs::path reference = cache / "refs" / "main";
  if (fs::exists(reference, fault)) {
    CLO_ASSIGN(const std::string revision, read_revision(reference));
    const fs::path snapshot = cache / "snapshots" / revision;
    if (!fs::is_directory(snapshot, fault)) {
      return bad_file(cache.string(), "refs/main names snapshot " + in_quotes(revision) +
                                          ", which is not there: download the model again");
    }
    return snapshot;
  }
  std::vector<std::string> found;
  fs::directory_iterator entry(cache / "snapshots", fault);
  for (; !fault && entry != fs::directory_iterator(); entry.increment(fault)) {
    std::error_code ignored;
    if (entry->is_directory(ignored)) found.push_back(entry->path().string());
  }
  std::sort(found.begin(), found.end());
  if (found.empty()) return bad_file(cache.string(), "holds no snapshot: download the model again");
  if (found.size() > 1) {
    return bad_file(cache.string(), "holds " + std::to_string(found.size()) +
                                        " snapshots and no refs/main to choose by; give one of " +
                                        listed(found, kMaxListed));
  }
  return fs::path(found.front());
}

}  // namespace

Result<ModelFiles> ModelFiles::open_gguf(fs::path path) {
  CLO_ASSIGN(GgufFile file, GgufFile::open(path));
  ModelFiles files(std::move(path));
  files.gguf_ = std::make_shared<const GgufFile>(std::move(file));
  return files;
}

Result<ModelConfig> ModelFiles::config() const {
  return gguf_ ? gguf_model_config(*gguf_) : load_model_config(path_);
}

Result<ModelFiles> ModelFiles::only_gguf(const fs::path& directory) {
  std::set<std::string> models;
  std::error_code fault;
  for (fs::directory_iterator entry(directory, fault); !fault && entry != fs::directory_iterator();
       entry.increment(fault)) {
    if (!is_gguf(entry->path())) continue;
    const std::string name = entry->path().filename().string();
    const auto part = part_name(name, ".gguf");
    models.insert(part ? part->of(1) : name);
  }
  const std::string where = directory.string();
  if (models.empty()) {
    return bad_file(where, "holds no config.json, so it is no complete model directory");
  }
  if (models.size() > 1) {
    std::vector<std::string> names;
    for (const std::string& model : models) names.push_back(in_quotes(model));
    return bad_file(where, "holds no config.json and " + std::to_string(names.size()) +
                               " GGUF models; give one of them: " + listed(names, kMaxListed));
  }
  const fs::path path = directory / *models.begin();
  if (!fs::exists(fs::symlink_status(path, fault))) {
    return bad_file(where, "holds parts of a GGUF model, but not the first, " +
                               in_quotes(*models.begin()) + ": download it too");
  }
  return open_gguf(path);
}

Result<ModelFiles> ModelFiles::find(const fs::path& path) {
  std::error_code fault;
  const fs::file_status status = fs::status(path, fault);
  if (status.type() == fs::file_type::not_found) {
    const std::string text = path.string();
    const bool like_an_id = !path.is_absolute() && !text.starts_with(".") &&
                            std::count(text.begin(), text.end(), '/') == 1;
    return bad_file(
        text, std::string("does not exist; a model directory or GGUF file is expected") +
                  (like_an_id
                       ? "; for a model of the hub, download it and give its "
                         "folder, such as ~/.cache/huggingface/hub/models--" +
                             text.substr(0, text.find('/')) + "--" + text.substr(text.find('/') + 1)
                       : std::string()));
  }
  if (fs::is_regular_file(status)) {
    if (is_gguf(path)) return open_gguf(path);
    return file_instead_of_directory(path);
  }
  if (!fs::is_directory(status)) {
    return bad_file(path.string(), "cannot be read as a model directory" +
                                       (fault ? ": " + fault.message() : std::string()));
  }
  fs::path directory = path;
  if (!fs::exists(path / "config.json", fault) && fs::is_directory(path / "snapshots", fault)) {
    CLO_ASSIGN(directory, pick_snapshot(path));
  }
  if (fs::exists(directory / "config.json", fault)) return ModelFiles(directory);
  return only_gguf(directory);
}

}  // namespace clo
