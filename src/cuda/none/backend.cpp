// Stands in for the CUDA backend where the build has none.
#include "cuda/backend.h"

#include "base/try.h"
#include "device/device_facts.h"

namespace clo {

Result<std::unique_ptr<CudaBackend>> CudaBackend::create(int) {
  return std::move(device_facts()).error();
}

Status CudaBackend::supports(const KvShape&) { return std::move(device_facts()).error(); }

int64_t CudaBackend::workspace_bytes(const ModelConfig&, const KvShape&, const CudaLimits&) {
  return 0;
}

int64_t CudaBackend::largest_chunk(const ModelConfig&, const KvShape&, CudaLimits, int64_t,
                                   int64_t) {
  return 0;
}

}  // namespace clo
