#include "kernels/prefill/sdpa.h"

#include <cudnn.h>
// Graphs are neither saved nor printed, so the frontend's JSON library is left out.
#ifndef CUDNN_FRONTEND_SKIP_JSON_LIB
#define CUDNN_FRONTEND_SKIP_JSON_LIB
#endif
#include <cudnn_frontend.h>

#include <algorithm>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/check.h"
#include "device/cuda_error.h"

namespace clo::kernels {
namespace {

namespace fe = cudnn_frontend;

enum TensorUid : int64_t { kQuery = 1, kKey, kValue, kOut };

// The least version whose bottom-right causal mask takes lengths that are no multiple of 64, and
// which is free of the faults that the frontend lists for 9.10.0 and 9.10.1.
constexpr size_t kLeastVersion = 91002;

std::string version_text(size_t version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

Error unsupported(const std::string& what) {
  return {ErrorCode::kUnsupported, "cuDNN attention: " + what, ""};
}

// What decides which device code a plan runs. cuDNN keeps one store of compiled code per graph, so
// each of these has its own.
enum class Mask { kNone, kTopLeft, kBottomRight };
struct KernelKey {
  int32_t num_q_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  DType type;
  Mask mask;
  bool operator==(const KernelKey&) const = default;
};

// All that a plan depends on.
struct PlanKey {
  int32_t num_q_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  DType type;
  int64_t num_tokens;
  int64_t num_keys;
  int64_t layer_capacity;
  float scale;

  explicit PlanKey(const PrefillAttention& params)
      : num_q_heads(params.shape.num_q_heads),
        num_kv_heads(params.shape.num_kv_heads),
        head_dim(params.shape.head_dim),
        type(params.shape.type),
        num_tokens(params.num_tokens),
        num_keys(params.first_token + params.num_tokens),
        layer_capacity(params.layer_capacity),
        scale(params.scale) {}
  bool operator==(const PlanKey&) const = default;

  // The last query sees every key, so one query needs no mask. A first chunk is square: both
  // corners start the same diagonal, and the top left one is what every version has.
  Mask mask() const {
    if (num_tokens == 1) return Mask::kNone;
    return num_tokens == num_keys ? Mask::kTopLeft : Mask::kBottomRight;
  }
  KernelKey kernel() const { return {num_q_heads, num_kv_heads, head_dim, type, mask()}; }
};

struct Plan {
  PlanKey key;
  fe::graph::Graph graph;
  int64_t workspace_bytes = 0;

  explicit Plan(const PlanKey& plan_key) : key(plan_key) {}
};

fe::graph::Tensor_attributes tensor(const char* name, TensorUid uid, std::vector<int64_t> dim,
                                    std::vector<int64_t> stride, fe::DataType_t type) {
  return fe::graph::Tensor_attributes()
      .set_name(name)
      .set_uid(uid)
      .set_dim(std::move(dim))
      .set_stride(std::move(stride))
      .set_data_type(type);
}

// Describes the layer's attention in cuDNN's terms: [batch, head, token, element] and strides in
// elements. K and V are two views of the same rows, V one head_dim further on.
void describe(Plan& plan) {
  const PlanKey& key = plan.key;
  const int64_t row = 2 * key.head_dim;
  const int64_t head_rows = key.layer_capacity * row;
  const std::vector<int64_t> kv_dim = {1, key.num_kv_heads, key.num_keys, key.head_dim};
  const std::vector<int64_t> kv_stride = {key.num_kv_heads * head_rows, head_rows, row, 1};
  const int64_t token = static_cast<int64_t>(key.num_q_heads) * key.head_dim;
  const std::vector<int64_t> q_dim = {1, key.num_q_heads, key.num_tokens, key.head_dim};
  const std::vector<int64_t> q_stride = {key.num_tokens * token, key.head_dim, token, 1};

  const fe::DataType_t type =
      key.type == DType::kBF16 ? fe::DataType_t::BFLOAT16 : fe::DataType_t::HALF;
  plan.graph.set_io_data_type(type)
      .set_intermediate_data_type(fe::DataType_t::FLOAT)
      .set_compute_data_type(fe::DataType_t::FLOAT);
  auto query = plan.graph.tensor(tensor("Q", kQuery, q_dim, q_stride, type));
  auto keys = plan.graph.tensor(tensor("K", kKey, kv_dim, kv_stride, type));
  auto values = plan.graph.tensor(tensor("V", kValue, kv_dim, kv_stride, type));

  auto options =
      fe::graph::SDPA_attributes().set_name("prefill").set_generate_stats(false).set_attn_scale(
          key.scale);
  if (key.mask() != Mask::kNone) {
    options
        .set_diagonal_alignment(key.mask() == Mask::kTopLeft
                                    ? fe::DiagonalAlignment_t::TOP_LEFT
                                    : fe::DiagonalAlignment_t::BOTTOM_RIGHT)
        .set_diagonal_band_right_bound(0);
  }
  auto [out, stats] = plan.graph.sdpa(query, keys, values, std::move(options));
  (void)stats;
  out->set_output(true).set_uid(kOut).set_dim(q_dim).set_stride(q_stride).set_data_type(type);
}

}  // namespace

struct Sdpa::Plans {
  struct Kernel {
    KernelKey key;
    std::shared_ptr<fe::KernelCache> cache;
  };

  KernelSharing sharing = KernelSharing::kAllLengths;
  cudnnHandle_t handle = nullptr;
  std::vector<Kernel> kernels;               // one model makes at most one per mask
  std::vector<std::unique_ptr<Plan>> plans;  // the latest used is last

  ~Plans() {
    // A plan owns code that the device may still be running.
    (void)cudaDeviceSynchronize();
    plans.clear();
    kernels.clear();
    if (handle != nullptr) (void)cudnnDestroy(handle);
  }

  std::shared_ptr<fe::KernelCache> kernel_cache(const KernelKey& key);
  Result<Plan*> find_or_build(const PrefillAttention& params);
};

std::shared_ptr<fe::KernelCache> Sdpa::Plans::kernel_cache(const KernelKey& key) {
  for (const Kernel& kernel : kernels) {
    if (kernel.key == key) return kernel.cache;
  }
  return kernels.emplace_back(Kernel{key, std::make_shared<fe::KernelCache>()}).cache;
}

Result<Plan*> Sdpa::Plans::find_or_build(const PrefillAttention& params) {
  CLO_CHECK(params.num_tokens >= 1 && params.first_token >= 0 && params.scale > 0,
            params.num_tokens, params.first_token, params.scale);
  CLO_CHECK(params.first_token + params.num_tokens <= params.layer_capacity, params.first_token,
            params.num_tokens, params.layer_capacity);
  if (params.shape.type != DType::kBF16 && params.shape.type != DType::kF16) {
    return unsupported("rows are neither bf16 nor f16");
  }

  const PlanKey key(params);
  const auto known =
      std::find_if(plans.begin(), plans.end(), [&](const auto& plan) { return plan->key == key; });
  if (known != plans.end()) {
    std::rotate(known, known + 1, plans.end());
    return plans.back().get();
  }

  auto plan = std::make_unique<Plan>(key);
  describe(*plan);
  if (sharing == KernelSharing::kAllLengths) {
    plan->graph.set_dynamic_shape_enabled(true).set_kernel_cache(kernel_cache(key.kernel()));
  }
  auto status = plan->graph.build(handle, {fe::HeurMode_t::A});
  if (status.is_bad() && sharing == KernelSharing::kAllLengths) {
    // Older libraries compile for one shape only: from here on every length has its own kernel.
    sharing = KernelSharing::kNone;
    plan = std::make_unique<Plan>(key);
    describe(*plan);
    status = plan->graph.build(handle, {fe::HeurMode_t::A});
  }
  if (status.is_bad()) return unsupported(status.get_message());
  if (auto sized = plan->graph.get_workspace_size(plan->workspace_bytes); sized.is_bad()) {
    return unsupported(sized.get_message());
  }

  if (plans.size() == kMaxPlans) {
    CLO_CUDA(cudaDeviceSynchronize());
    plans.erase(plans.begin());
  }
  plans.push_back(std::move(plan));
  return plans.back().get();
}

Sdpa::Sdpa(std::unique_ptr<Plans> plans) : plans_(std::move(plans)) {}
Sdpa::~Sdpa() = default;

Result<std::unique_ptr<Sdpa>> Sdpa::create(KernelSharing sharing) {
  if (cudnnGetVersion() < kLeastVersion) {
    return unsupported("needs " + version_text(kLeastVersion) + " or newer, found " +
                       version_text(cudnnGetVersion()));
  }
  auto plans = std::make_unique<Plans>();
  plans->sharing = sharing;
  if (const cudnnStatus_t status = cudnnCreate(&plans->handle); status != CUDNN_STATUS_SUCCESS) {
    return unsupported(std::string("cudnnCreate: ") + cudnnGetErrorString(status));
  }
  return std::unique_ptr<Sdpa>(new Sdpa(std::move(plans)));
}

std::string Sdpa::version() const { return "cuDNN " + version_text(cudnnGetVersion()); }

Result<int64_t> Sdpa::workspace_bytes(const PrefillAttention& params) {
  auto plan = plans_->find_or_build(params);
  if (!plan) return std::move(plan).error();
  return (*plan)->workspace_bytes;
}

Status Sdpa::attention(const PrefillAttention& params, void* workspace, cudaStream_t stream) {
  auto plan = plans_->find_or_build(params);
  if (!plan) return std::move(plan).error();
  CLO_CHECK((*plan)->workspace_bytes == 0 || workspace != nullptr, (*plan)->workspace_bytes);

  // The frontend takes mutable pointers for inputs as well.
  auto* rows = const_cast<std::byte*>(params.layer_rows);
  std::unordered_map<int64_t, void*> pointers = {
      {kQuery, const_cast<void*>(params.queries)},
      {kKey, rows},
      {kValue, rows + params.shape.value_offset()},
      {kOut, params.out},
  };
  if (const cudnnStatus_t status = cudnnSetStream(plans_->handle, stream);
      status != CUDNN_STATUS_SUCCESS) {
    return Error{ErrorCode::kDeviceFault,
                 std::string("cuDNN attention: cudnnSetStream: ") + cudnnGetErrorString(status),
                 ""};
  }
  auto status = (*plan)->graph.execute(plans_->handle, pointers, workspace);
  if (status.is_bad()) {
    return Error{ErrorCode::kDeviceFault, "cuDNN attention: " + status.get_message(), ""};
  }
  return Ok{};
}

}  // namespace clo::kernels
