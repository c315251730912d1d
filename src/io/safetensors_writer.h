#pragma once
// Writes what SafetensorsFile reads: tensors of f32 values, each stored in a type of its own.
#include <map>
#include <span>
#include <string>

#include "tensor/view.h"

namespace clo {

struct NewTensor {
  std::string name;
  Shape shape;                    // no extent is 0
  std::span<const float> values;  // as many as the shape has elements
  DType type = DType::kF32;       // in the file
};

// The bytes of a whole file. Tensors lie in the order given, each at a multiple of 8 bytes unless
// one before it has an odd number of 16-bit or 32-bit values.
std::string safetensors_bytes(std::span<const NewTensor> tensors,
                              const std::map<std::string, std::string>& metadata);

}  // namespace clo
