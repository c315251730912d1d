// Which orders of bulk copies does compute-sanitizer's racecheck understand?
//
//   nvcc -arch=sm_90a -lineinfo -o probe bench/probes/racecheck_bulk_copies.cu
//   compute-sanitizer --tool racecheck ./probe
//
// A warp fills the same piece of shared memory twice by bulk copies. The second is started after
// every lane has seen the first's barrier complete, after all stores out of that memory have read
// it, and after a warp barrier: no two accesses run side by side, in any of the kernels. A hazard
// that is reported is the tool's limit, and which kernel has it says of what.
#include <cstdint>
#include <cstdio>

enum Order {
  kOneLane,       // one lane copies, 128 bytes
  kOwnPlaces,     // every lane copies to a place of its own
  kTurnedPlaces,  // the second time to its neighbour's place
  kStored,        // as kTurnedPlaces; bulk stores take what has arrived to global memory
  kNewBarrier,    // as kStored; the barrier is invalidated and initialised again in between
};

__device__ uint32_t word(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
__device__ void init(uint64_t* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(word(barrier)) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

template <Order order>
__global__ void fill_twice(const uint32_t* source, uint32_t* target) {
  __shared__ alignas(128) uint32_t buffer[32 * 32];
  __shared__ alignas(8) uint64_t barrier;
  const uint32_t lane = threadIdx.x;
  const uint32_t lanes = order == kOneLane ? 1 : 32;
  if (lane == 0) init(&barrier);
  asm volatile("fence.proxy.async;" ::: "memory");
  __syncwarp();
  uint32_t parity = 0;
  for (uint32_t turn = 0; turn < 2; ++turn) {
    const uint32_t place = order >= kTurnedPlaces ? (lane + turn) % 32 : lane;
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
    __syncwarp();
    if (lane == 0) {
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(word(&barrier)),
                   "r"(lanes * 128)
                   : "memory");
    }
    __syncwarp();
    if (lane < lanes) {
      asm volatile(
          "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
          "[%3];" ::"r"(word(buffer + 32 * place)),
          "l"(source + 32 * (32 * turn + lane)), "r"(128), "r"(word(&barrier))
          : "memory");
    }
    uint32_t done = 0;
    while (done == 0) {
      asm volatile(
          "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
          "selp.u32 %0, 1, 0, p;\n}"
          : "=r"(done)
          : "r"(word(&barrier)), "r"(parity)
          : "memory");
    }
    parity ^= 1;
    if (order >= kStored) {
      asm volatile(
          "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(target + 32 * lane),
          "r"(word(buffer + 32 * place)), "r"(128)
          : "memory");
      asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    }
    if (order == kNewBarrier) {
      __syncwarp();
      if (lane == 0) {
        asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(word(&barrier)) : "memory");
        init(&barrier);
      }
      __syncwarp();
      parity = 0;
    }
  }
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  __syncwarp();
  if (order < kStored) {
    const uint32_t place = order == kTurnedPlaces ? (lane + 1) % 32 : lane;
    for (uint32_t i = 0; i < 32 && lane < lanes; ++i)
      target[32 * lane + i] = buffer[32 * place + i];
  }
}

template <Order order>
bool run(const char* name, const uint32_t* source, uint32_t* target) {
  uint32_t out[32] = {};
  fill_twice<order><<<1, 32>>>(source, target);
  const bool ran = cudaMemcpy(out, target, sizeof out, cudaMemcpyDeviceToHost) == cudaSuccess;
  const bool right = ran && out[0] == 1024 && out[31] == 1055;
  std::printf("%s: %s\n", name, right ? "the second copy's bytes" : "wrong bytes");
  return right;
}

int main() {
  static uint32_t host[2048];
  uint32_t *source = nullptr, *target = nullptr;
  for (uint32_t i = 0; i < 2048; ++i) host[i] = i;
  if (cudaMalloc(&source, sizeof host) != cudaSuccess) return 2;
  if (cudaMalloc(&target, sizeof host) != cudaSuccess) return 2;
  if (cudaMemcpy(source, host, sizeof host, cudaMemcpyHostToDevice) != cudaSuccess) return 2;
  bool right = run<kOneLane>("one lane", source, target);
  right &= run<kOwnPlaces>("own places", source, target);
  right &= run<kTurnedPlaces>("turned places", source, target);
  right &= run<kStored>("stored", source, target);
  right &= run<kNewBarrier>("new barrier", source, target);
  return right ? 0 : 1;
}
