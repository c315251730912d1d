// Stands in for prefill/sdpa.cpp in builds without cuDNN or its frontend headers. CMake says which
// of the two was missing: CLO_NO_SDPA_REASON.
#include "kernels/prefill/sdpa.h"

#ifndef CLO_NO_SDPA_REASON
#define CLO_NO_SDPA_REASON "cuDNN was not found"
#endif

namespace clo::kernels {

struct Sdpa::Plans {};

namespace {
Error unavailable() {
  return {ErrorCode::kUnsupported,
          "cuDNN attention is unavailable: when this program was built, " CLO_NO_SDPA_REASON
          "; prefill uses the built-in kernel",
          ""};
}
}  // namespace

Sdpa::Sdpa(std::unique_ptr<Plans> plans) : plans_(std::move(plans)) {}
Sdpa::~Sdpa() = default;

Result<std::unique_ptr<Sdpa>> Sdpa::create(KernelSharing) { return unavailable(); }
std::string Sdpa::version() const { return "none"; }
Result<int64_t> Sdpa::workspace_bytes(const PrefillAttention&) { return unavailable(); }
Status Sdpa::attention(const PrefillAttention&, void*, cudaStream_t) { return unavailable(); }

}  // namespace clo::kernels
