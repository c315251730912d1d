// Does compute-sanitizer's racecheck know that a bulk copy which a barrier awaited has ended?
//
//   nvcc -arch=sm_90a -lineinfo -o probe bench/probes/racecheck_bulk_copies.cu
//   compute-sanitizer --tool racecheck ./probe
//
// One thread fills the same 128 bytes of shared memory by two bulk copies, the second started after
// the barrier of the first was awaited: nothing here runs beside anything else. What racecheck
// says of it, it will say of every buffer that bulk copies fill more than once.
#include <cstdint>
#include <cstdio>

__global__ void fill_twice(const uint32_t* source, uint32_t* target) {
  __shared__ alignas(128) uint32_t buffer[32];
  __shared__ alignas(8) uint64_t barrier;
  const auto word = [](const void* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
  };
  if (threadIdx.x != 0) return;
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(word(&barrier)) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async;" ::: "memory");
  for (uint32_t phase = 0; phase < 2; ++phase) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(word(&barrier)),
                 "r"(128)
                 : "memory");
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
        "[%3];" ::"r"(word(buffer)),
        "l"(source + 32 * phase), "r"(128), "r"(word(&barrier))
        : "memory");
    uint32_t done = 0;
    while (done == 0) {
      asm volatile(
          "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
          "selp.u32 %0, 1, 0, p;\n}"
          : "=r"(done)
          : "r"(word(&barrier)), "r"(phase)
          : "memory");
    }
  }
  for (int i = 0; i < 32; ++i) target[i] = buffer[i];
}

int main() {
  uint32_t *source = nullptr, *target = nullptr, host[64] = {}, out[32] = {};
  for (uint32_t i = 0; i < 64; ++i) host[i] = i;
  if (cudaMalloc(&source, sizeof host) != cudaSuccess) return 2;
  if (cudaMalloc(&target, sizeof out) != cudaSuccess) return 2;
  cudaMemcpy(source, host, sizeof host, cudaMemcpyHostToDevice);
  fill_twice<<<1, 32>>>(source, target);
  cudaMemcpy(out, target, sizeof out, cudaMemcpyDeviceToHost);
  const bool right = cudaGetLastError() == cudaSuccess && out[0] == 32 && out[31] == 63;
  std::printf("%s\n", right ? "the second copy's bytes" : "wrong bytes");
  return right ? 0 : 1;
}
