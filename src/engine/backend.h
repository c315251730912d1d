#pragma once
// Which backend serves an engine, and why.
#include <string>

#include "clo/engine.h"
#include "io/model_config.h"
#include "ops/kv_layout.h"

namespace clo {

struct BackendChoice {
  Backend backend = Backend::kCpu;  // never kAuto
  std::string note;                 // why a device that is there is not used; mostly empty
};

// `auto` takes CUDA where a device is there and its kernels are cut for the model, and says in
// `note` when they are not. Fails: as CpuOps::supports, CudaBackend::supports and device_facts for
// a backend that was named.
Result<BackendChoice> choose_backend(const ModelConfig& config, const EngineOptions& options);

// Whether the CUDA backend takes rows of this shape beside products in `model_type`. Fails:
// kUnsupported, naming --kv-type.
Status check_device_rows(const KvShape& shape, DType model_type);

// The policy with what it leaves to the backend decided. Requires: not Backend::kAuto.
PolicyOptions for_backend(PolicyOptions policy, Backend backend);

}  // namespace clo
