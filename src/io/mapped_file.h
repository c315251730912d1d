#pragma once
// MappedFile: the bytes of a regular file, mapped read-only and private. The mapping lives as long
// as the object; moving it keeps the addresses. Safe to read from any thread.
// It does not guard against another process that shortens the file while it is mapped: the reader
// of a lost page is killed by the system (SIGBUS).
#include <cstddef>
#include <filesystem>
#include <span>

#include "clo/result.h"

namespace clo {

class MappedFile {
 public:
  // Maps the whole file; an empty file gives an empty span.
  // Fails: kBadFile when the path is missing, a broken link, unreadable or not a regular file.
  static Result<MappedFile> open(const std::filesystem::path& path);

  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  ~MappedFile();

  std::span<const std::byte> bytes() const { return bytes_; }
  const std::filesystem::path& path() const { return path_; }

 private:
  MappedFile() = default;
  void release();

  std::filesystem::path path_;
  std::span<const std::byte> bytes_;
};

}  // namespace clo
