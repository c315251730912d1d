#pragma once
// Owners of device memory and of pinned host memory. Arenas are laid over them: these only take and
// give back. Any thread; not for the decode path, where nothing is allocated.
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "clo/result.h"

namespace clo {

// A range of device memory. Fails: kDeviceMemory with what was asked and what was free.
class DeviceBlock {
 public:
  static Result<DeviceBlock> create(int64_t num_bytes);
  DeviceBlock() = default;
  ~DeviceBlock();
  DeviceBlock(DeviceBlock&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)),
        num_bytes_(std::exchange(other.num_bytes_, 0)) {}
  DeviceBlock& operator=(DeviceBlock&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(num_bytes_, other.num_bytes_);
    return *this;
  }

  std::byte* data() const { return data_; }
  int64_t num_bytes() const { return num_bytes_; }

 private:
  std::byte* data_ = nullptr;
  int64_t num_bytes_ = 0;
};

// Small pinned host memory that the device reads and writes at the same address.
class PinnedBlock {
 public:
  static Result<PinnedBlock> create(int64_t num_bytes);
  PinnedBlock() = default;
  ~PinnedBlock();
  PinnedBlock(PinnedBlock&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)),
        num_bytes_(std::exchange(other.num_bytes_, 0)) {}
  PinnedBlock& operator=(PinnedBlock&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(num_bytes_, other.num_bytes_);
    return *this;
  }
  template <typename T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }

 private:
  std::byte* data_ = nullptr;
  int64_t num_bytes_ = 0;
};

// Pins memory that exists already: its pages are touched by several threads first (the kernel would
// clear them one by one otherwise, ten times slower), then registered in pieces, so that a refusal
// says how far it came. The memory outlives the registration.
class PinnedRange {
 public:
  // Fails: kHostMemory, naming the bytes asked, the bytes pinned before the refusal, the limit of
  // locked memory and --host-memory; everything is unpinned again and no CUDA error stays behind.
  static Result<PinnedRange> create(std::byte* base, int64_t num_bytes, int num_threads);
  PinnedRange() = default;
  ~PinnedRange();
  PinnedRange(PinnedRange&& other) noexcept { *this = std::move(other); }
  PinnedRange& operator=(PinnedRange&& other) noexcept {
    std::swap(pieces_, other.pieces_);
    std::swap(device_base_, other.device_base_);
    std::swap(seconds_, other.seconds_);
    return *this;
  }

  // The range as the device addresses it.
  std::byte* device_base() const { return device_base_; }
  double seconds() const { return seconds_; }  // touching and registering

 private:
  std::vector<std::byte*> pieces_;
  std::byte* device_base_ = nullptr;
  double seconds_ = 0;
};

}  // namespace clo
