#pragma once
// A non-owning view of a dense row-major tensor. The owner of the bytes outlives it.
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "tensor/dtype.h"

namespace clo {

using Shape = std::vector<int64_t>;

inline std::string shape_text(std::span<const int64_t> shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

struct TensorView {
  const std::byte* bytes = nullptr;  // may be unaligned: it can point into a mapped file
  DType type = DType::kF32;
  Shape shape;

  int64_t num_elements() const {
    int64_t count = 1;
    for (const int64_t extent : shape) count *= extent;
    return count;
  }
  int64_t num_bytes() const { return num_elements() * dtype_bytes(type); }
};

}  // namespace clo
