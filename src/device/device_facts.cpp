#include "device/device_facts.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <cstdlib>

#include "device/cuda_error.h"

namespace clo {

namespace {

std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

int attribute(cudaDeviceAttr which) {
  int value = 0;
  CLO_CUDA(cudaDeviceGetAttribute(&value, which, 0));
  return value;
}

DeviceFeature feature(std::string name, bool present, std::string used_for, std::string absent) {
  return {std::move(name), present, present ? std::move(used_for) : std::move(absent)};
}

// The part of the management library's memory record that is asked for (nvmlMemory_t).
struct NvmlMemory {
  unsigned long long total, free, used;
};

}  // namespace

int64_t driver_used_at_start() {
  static const int64_t used = [] {
    // Kernels are loaded with the context rather than at first use: what they hold is then part of
    // the overhead that a budget knows. The driver reads this once, when it is first called.
    setenv("CUDA_MODULE_LOADING", "EAGER", 0);
    return driver_used_bytes();
  }();
  return used;
}

Result<DeviceFacts> device_facts() {
  (void)driver_used_at_start();
  DeviceFacts facts;
  (void)cudaDriverGetVersion(&facts.driver_version);
  (void)cudaRuntimeGetVersion(&facts.runtime_version);
  int count = 0;
  const cudaError_t code = cudaGetDeviceCount(&count);
  if (code != cudaSuccess || count == 0) {
    (void)cudaGetLastError();
    if (facts.driver_version == 0) {
      return Error{ErrorCode::kDeviceFault,
                   "the CUDA backend found no NVIDIA driver (libcuda.so.1); install one, or use "
                   "--backend cpu",
                   "--backend"};
    }
    if (code == cudaErrorInsufficientDriver) {
      return Error{ErrorCode::kDeviceFault,
                   "the driver supports CUDA " + version_text(facts.driver_version) +
                       ", this build needs " + version_text(facts.runtime_version) +
                       "; update the driver, or use --backend cpu",
                   "--backend"};
    }
    return Error{ErrorCode::kDeviceFault,
                 std::string("no CUDA device was found (") + cudaGetErrorString(code) +
                     "); use --backend cpu",
                 "--backend"};
  }
  cudaDeviceProp properties{};
  CLO_CUDA(cudaGetDeviceProperties(&properties, 0));
  facts.name = properties.name;
  facts.capability_major = properties.major;
  facts.capability_minor = properties.minor;
  facts.num_multiprocessors = properties.multiProcessorCount;
  facts.memory_bytes = static_cast<int64_t>(properties.totalGlobalMem);
  facts.shared_bytes_per_block = static_cast<int64_t>(properties.sharedMemPerBlockOptin);
  if (facts.capability_major < 8) {
    return Error{ErrorCode::kDeviceFault,
                 facts.name + " has compute capability " + std::to_string(facts.capability_major) +
                     "." + std::to_string(facts.capability_minor) +
                     "; the CUDA backend needs 8.0 or newer; use --backend cpu",
                 "--backend"};
  }
  size_t free_bytes = 0, total_bytes = 0;
  CLO_CUDA(cudaMemGetInfo(&free_bytes, &total_bytes));
  facts.free_memory_bytes = static_cast<int64_t>(free_bytes);
  const std::string capability = "compute capability " + std::to_string(facts.capability_major) +
                                 "." + std::to_string(facts.capability_minor);
  facts.features.push_back(feature("mapped host memory",
                                   attribute(cudaDevAttrCanMapHostMemory) != 0,
                                   "kernels fetch rows by themselves", "the device cannot map it"));
  facts.features.push_back(feature("programmatic launch", facts.capability_major >= 9,
                                   "kernels prefetch weights before the one ahead ends",
                                   capability + ", needs 9.0"));
  facts.features.push_back(feature("block clusters", facts.capability_major >= 9,
                                   "four blocks choose a head's set together",
                                   capability + ", needs 9.0: one block does it"));
  facts.features.push_back(feature("NVML", driver_used_bytes() >= 0,
                                   "the memory budget is checked against the driver's figure",
                                   "libnvidia-ml.so.1 could not be asked"));
  return facts;
}

int64_t driver_used_bytes() {
  void* library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return -1;
  const auto symbol = [&]<typename F>(const char* name, F*& target) {
    target = reinterpret_cast<F*>(dlsym(library, name));
    return target != nullptr;
  };
  int (*init)() = nullptr;
  int (*shutdown)() = nullptr;
  int (*device_by_bus)(const char*, void**) = nullptr;
  int (*memory)(void*, NvmlMemory*) = nullptr;
  char bus[32] = {};
  void* device = nullptr;
  NvmlMemory record{};
  int64_t used = -1;
  if (symbol("nvmlInit_v2", init) && symbol("nvmlShutdown", shutdown) &&
      symbol("nvmlDeviceGetHandleByPciBusId_v2", device_by_bus) &&
      symbol("nvmlDeviceGetMemoryInfo", memory) && init() == 0) {
    if (cudaDeviceGetPCIBusId(bus, sizeof bus, 0) == cudaSuccess &&
        device_by_bus(bus, &device) == 0 && memory(device, &record) == 0) {
      used = static_cast<int64_t>(record.used);
    }
    shutdown();
  }
  dlclose(library);
  return used;
}

}  // namespace clo
