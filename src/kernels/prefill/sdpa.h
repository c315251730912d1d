#pragma once
// The same attention as prefill.h through cuDNN's fused kernel (scaled dot-product attention),
// which uses the matrix instructions of each GPU generation. Optional: built from sdpa.cpp where
// cuDNN and its frontend headers are found, from none/sdpa.cpp elsewhere; the engine asks create(),
// and reports by name which of the two kernels it uses.
//
// A plan holds for one exact shape: chunk, context and layer capacity. Fixed shapes with a padding
// mask would need fewer plans, but then cuDNN may touch up to a tile past the last query and the
// last token, and those are not ours. The device code behind the plans is shared by all lengths
// (KernelSharing::kAllLengths): a second or so to compile once, milliseconds for every further
// plan. All layers share a plan; the latest kMaxPlans are kept.
//
// Owned by the CUDA runner; one thread at a time.
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "clo/result.h"
#include "kernels/prefill/prefill.h"

namespace clo::kernels {

class Sdpa {
 public:
  static constexpr size_t kMaxPlans = 32;

  // Whether device code takes its lengths at run time, or is compiled anew for every shape.
  enum class KernelSharing { kAllLengths, kNone };

  // For the current device. Fails: kUnsupported, with the reason, where this build or this machine
  // has no cuDNN that can do it.
  static Result<std::unique_ptr<Sdpa>> create(KernelSharing sharing = KernelSharing::kAllLengths);
  ~Sdpa();
  Sdpa(const Sdpa&) = delete;
  Sdpa& operator=(const Sdpa&) = delete;

  // "cuDNN 9.19.0": of the library that is loaded, not of the headers.
  std::string version() const;

  // Workspace that attention() needs for this shape (the pointers are not looked at).
  // Fails: kUnsupported, with cuDNN's reason: use prefill_attention().
  // Blocks: builds the plan when the shape is new; when that drops an old plan, until the device
  // has finished.
  Result<int64_t> workspace_bytes(const PrefillAttention& params);

  // Requires: workspace [workspace_bytes(params)], 256-byte aligned, null when that is 0.
  // Fails: as workspace_bytes, or kDeviceFault when cuDNN refuses the launch.
  // Ordered on: `stream`. Builds nothing once workspace_bytes has been asked for the shape.
  Status attention(const PrefillAttention& params, void* workspace, cudaStream_t stream);

 private:
  struct Plans;
  explicit Sdpa(std::unique_ptr<Plans> plans);
  std::unique_ptr<Plans> plans_;
};

}  // namespace clo::kernels
