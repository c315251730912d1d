// Stands in for the measurements where the build has no CUDA.
#include "cuda/measure.h"

#include "device/device_facts.h"

namespace clo {

Result<std::unique_ptr<CudaMeasure>> CudaMeasure::create(const MeasureOptions&) {
  return std::move(device_facts()).error();
}

}  // namespace clo
