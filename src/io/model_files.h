#pragma once
// ModelFiles: a model where the user said it is: a directory with config.json, or a GGUF file,
// which is parsed here, once; the readers of config, weights and texts are handed this object.
// Cheap to copy; the parsed file lives as long as any copy.
#include <filesystem>
#include <memory>

#include "clo/result.h"
#include "io/gguf.h"
#include "io/model_config.h"

namespace clo {

class ModelFiles {
 public:
  // From what a user types: a GGUF file (of a split model its first part), a directory that holds
  // config.json, one that holds a single GGUF model, or a hub cache folder (models--org--name), of
  // which the snapshot that refs/main names is taken, else the only one.
  // Fails: kBadFile when there is none or several, or it is another file (with advice by its
  // ending); for a GGUF file as GgufFile::open().
  static Result<ModelFiles> find(const std::filesystem::path& given);

  // The directory, or the GGUF file.
  const std::filesystem::path& path() const { return path_; }
  const std::shared_ptr<const GgufFile>& gguf() const { return gguf_; }  // null: a directory

  // Fails: as load_model_config().
  Result<ModelConfig> config() const;

 private:
  explicit ModelFiles(std::filesystem::path directory) : path_(std::move(directory)) {}
  static Result<ModelFiles> open_gguf(std::filesystem::path path);
  // The one GGUF model of a directory that is not of the other kind.
  static Result<ModelFiles> only_gguf(const std::filesystem::path& directory);

  std::filesystem::path path_;
  std::shared_ptr<const GgufFile> gguf_;
};

}  // namespace clo
