#include "io/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

#include "io/refusal.h"

namespace clo {

namespace {

// Closes the descriptor at the end of open(); the mapping needs it no longer.
struct Descriptor {
  int number;
  ~Descriptor() {
    if (number >= 0) ::close(number);
  }
};

Error open_fault(const std::filesystem::path& path, int fault) {
  std::error_code ignored;
  if (fault == ENOENT && std::filesystem::is_symlink(path, ignored)) {
    return bad_file(path.string(),
                    "is a link whose target does not exist: the download is incomplete, "
                    "download the model again");
  }
  return bad_file(path.string(), "cannot be opened: " + std::generic_category().message(fault));
}

}  // namespace

Result<MappedFile> MappedFile::open(const std::filesystem::path& path) {
  // O_NONBLOCK: opening a pipe must not wait for a writer; it is refused below.
  const Descriptor file{::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)};
  if (file.number < 0) return open_fault(path, errno);
  struct stat status = {};
  if (::fstat(file.number, &status) != 0) return open_fault(path, errno);
  if (S_ISDIR(status.st_mode)) return bad_file(path.string(), "is a directory, expected a file");
  if (!S_ISREG(status.st_mode)) return bad_file(path.string(), "is not a regular file");

  MappedFile mapped;
  mapped.path_ = path;
  const auto size = static_cast<size_t>(status.st_size);
  if (size > 0) {
    void* base = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file.number, 0);
    if (base == MAP_FAILED) {
      return bad_file(path.string(), "cannot be mapped: " + std::generic_category().message(errno));
    }
    mapped.bytes_ = {static_cast<const std::byte*>(base), size};
  }
  return mapped;
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : path_(std::move(other.path_)), bytes_(std::exchange(other.bytes_, {})) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  if (this != &other) {
    release();
    path_ = std::move(other.path_);
    bytes_ = std::exchange(other.bytes_, {});
  }
  return *this;
}

MappedFile::~MappedFile() { release(); }

void MappedFile::release() {
  if (!bytes_.empty()) ::munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
  bytes_ = {};
}

}  // namespace clo
