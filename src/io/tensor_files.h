#pragma once
// TensorFiles: all tensors of a model, mapped: of a GGUF file, or of a directory. The directory
// holds model.safetensors, or model.safetensors.index.json and its shards; when both are there the
// single file wins, as in transformers; when neither is, all .safetensors files are read, which
// must hold each tensor once. Files may be links (the hub's cache). Views live as long as
// the object; moving it keeps them valid; of a GGUF file a view lives until the next require(),
// which may expand numbers. Reading is safe from any thread, of a GGUF file from one at a time. It
// does not know what a model needs: the model room asks for each tensor by name and shape.
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "clo/result.h"
#include "io/gguf_model.h"
#include "io/model_files.h"
#include "io/safetensors.h"
#include "tensor/view.h"

namespace clo {

class TensorFiles {
 public:
  // Maps every file and checks every header.
  // Fails: kBadFile when weights are absent or in another format (with advice), a shard is missing
  // (all are listed), the index does not match its shards in both directions, two files hold the
  // same tensor, or a file is malformed.
  static Result<TensorFiles> open(const ModelFiles& model);
  static Result<TensorFiles> open(const std::filesystem::path& directory);

  // The tensor, or null when it is absent or of a type other than F32, F16 and BF16; see
  // contains(). Requires: a directory.
  const TensorView* find(const std::string& name) const;
  // Whether the files hold the tensor, of whatever type.
  bool contains(const std::string& name) const;
  // Whether the tensor is there, with exactly this shape.
  // Fails: kBadFile when it is missing or has another shape, kUnsupported for another type or when
  // it is quantised, by the name of the method.
  Status check(const std::string& name, std::span<const int64_t> shape) const;
  // The tensor itself. Fails: as check().
  Result<TensorView> require(const std::string& name, std::span<const int64_t> shape) const;

  // Row `row` of a matrix in blocks, as it lies in a quantised file; false where there is no such
  // file or the row must be made from its numbers. Safe from several threads. Requires: check().
  bool block_row(const std::string& name, int64_t row, WeightBlocks blocks, BlockRow& target) const;

  // All tensors, of whatever type, in alphabetical order.
  std::vector<std::string> names() const;
  // Bytes of all tensors.
  int64_t total_bytes() const;
  std::vector<std::filesystem::path> files() const { return paths_; }
  // Names of files in the directory that look like weights and are not of this model: pickles, a
  // second copy, an adapter. Of a GGUF file none.
  std::vector<std::string> files_not_read() const;

 private:
  TensorFiles() = default;
  static Result<TensorFiles> open_single(const std::filesystem::path& model_dir);
  static Result<TensorFiles> open_sharded(const std::filesystem::path& model_dir);
  static Result<TensorFiles> open_all(const std::filesystem::path& model_dir,
                                      const std::vector<std::string>& names);
  // Opens one safetensors file and registers its tensors.
  Status add(const std::filesystem::path& path);

  std::filesystem::path directory_;
  std::vector<std::filesystem::path> paths_;
  std::vector<SafetensorsFile> opened_;   // in the order of paths_
  std::map<std::string, size_t> holder_;  // tensor -> index into opened_
  std::shared_ptr<GgufTensors> gguf_;     // instead of all these
};

}  // namespace clo
