#pragma once
// Support for tests that run on a GPU: they skip, by name, where there is none.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <random>
#include <span>
#include <vector>

#include "device/cuda_error.h"
#include "tensor/dtype.h"

namespace clo::kernels {

class GpuTest : public ::testing::Test {
 protected:
  void SetUp() override {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
      (void)cudaGetLastError();
      GTEST_SKIP() << "no CUDA device";
    }
  }
};

// Memory on the device for the length of a test, filled with 0xCB so that what a kernel failed to
// write shows (as NaN-like values, not as zeros).
template <typename T>
class DeviceArray {
 public:
  explicit DeviceArray(int64_t count) : count_(count) {
    CLO_CUDA(cudaMalloc(&data_, static_cast<size_t>(count > 0 ? count : 1) * sizeof(T)));
    CLO_CUDA(cudaMemset(data_, 0xCB, static_cast<size_t>(count) * sizeof(T)));
  }
  explicit DeviceArray(std::span<const T> values) : DeviceArray(std::ssize(values)) {
    upload(values);
  }
  explicit DeviceArray(const std::vector<T>& values) : DeviceArray(std::span<const T>(values)) {}
  ~DeviceArray() { (void)cudaFree(data_); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;

  T* data() const { return static_cast<T*>(data_); }
  int64_t size() const { return count_; }
  void upload(std::span<const T> values) {
    CLO_CUDA(cudaMemcpy(data_, values.data(), values.size_bytes(), cudaMemcpyHostToDevice));
  }
  std::vector<T> download() const {
    std::vector<T> values(static_cast<size_t>(count_));
    CLO_CUDA(cudaMemcpy(values.data(), data_, values.size() * sizeof(T), cudaMemcpyDeviceToHost));
    return values;
  }

 private:
  void* data_ = nullptr;
  int64_t count_ = 0;
};

// Pinned host memory that the device can read and write at the same address.
template <typename T>
class PinnedArray {
 public:
  explicit PinnedArray(int64_t count) : count_(count) {
    CLO_CUDA(cudaHostAlloc(&data_, static_cast<size_t>(count) * sizeof(T), cudaHostAllocMapped));
    std::memset(data_, 0xCB, static_cast<size_t>(count) * sizeof(T));
  }
  ~PinnedArray() { (void)cudaFreeHost(data_); }
  PinnedArray(const PinnedArray&) = delete;
  PinnedArray& operator=(const PinnedArray&) = delete;
  T* data() const { return static_cast<T*>(data_); }
  std::span<T> span() const { return {data(), static_cast<size_t>(count_)}; }

 private:
  void* data_ = nullptr;
  int64_t count_ = 0;
};

inline std::vector<float> random_floats(int64_t count, uint64_t seed, float scale = 1) {
  std::mt19937_64 generator(seed);
  std::normal_distribution<float> normal(0, scale);
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = normal(generator);
  return values;
}

// The element types of kernels, both of 16 bits.
inline constexpr DType kElementTypes[] = {DType::kBF16, DType::kF16};

inline std::vector<uint16_t> to_bits(DType type, std::span<const float> values) {
  std::vector<uint16_t> bits(values.size());
  convert_from_f32(type, values.data(), bits.data(), std::ssize(values));
  return bits;
}
inline std::vector<float> from_bits(DType type, std::span<const uint16_t> bits) {
  std::vector<float> values(bits.size());
  convert_to_f32(type, bits.data(), values.data(), std::ssize(bits));
  return values;
}

}  // namespace clo::kernels
