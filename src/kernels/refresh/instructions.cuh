#pragma once
// What the refresh kernels say in their own instructions: loads (codes on their way to shared
// memory without a register, rows that are read once) and logic of three inputs.
#include <cstddef>
#include <cstdint>

namespace clo::kernels {

// kBytes (8 or 16) from global to shared memory, in the background of the thread; see wait_copies.
template <int kBytes>
__device__ __forceinline__ void copy_async(void* shared, const void* global) {
  static_assert(kBytes == 8 || kBytes == 16);
  const auto target = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(global) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(target), "l"(global) : "memory");
  }
}
// Closes the group of copies started since the last call.
__device__ __forceinline__ void close_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// Until at most kOpen of this thread's groups are under way: the older ones' bytes are there, for
// this thread.
template <int kOpen>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kOpen) : "memory");
}

// Sum and carry of three bits, in each of 32 places. Written out: from the formulas the compiler
// makes half as many instructions again.
__device__ __forceinline__ uint32_t sum_bits(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t sum;
  asm("lop3.b32 %0, %1, %2, %3, 0x96;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
  return sum;
}
__device__ __forceinline__ uint32_t carry_bits(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t carry;
  asm("lop3.b32 %0, %1, %2, %3, 0xE8;" : "=r"(carry) : "r"(a), "r"(b), "r"(c));
  return carry;
}

// 16 bytes of a row. Not the read-only path: rows of later tokens are written, by other kernels,
// while a refresh kernel lives.
__device__ __forceinline__ uint4 load_once(const std::byte* address) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address)
               : "memory");
  return v;
}

// Bulk copies (sm_90 and newer): a whole row by one instruction, through the copy engine of the
// multiprocessor and not through its load path, which the layers' own loads need.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
__device__ __forceinline__ uint32_t shared_word(const void* address) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(address));
}
// One thread arrives per phase, by expect_bytes.
__device__ __forceinline__ void init_barrier(uint64_t* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_word(barrier)) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void end_barrier(uint64_t* barrier) {
  asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(shared_word(barrier)) : "memory");
}
__device__ __forceinline__ void expect_bytes(uint64_t* barrier, uint32_t num_bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_word(barrier)),
               "r"(num_bytes)
               : "memory");
}
__device__ __forceinline__ void wait_barrier(uint64_t* barrier, uint32_t phase) {
  uint32_t done = 0;
  while (done == 0) {
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(shared_word(barrier)), "r"(phase)
        : "memory");
  }
}
__device__ __forceinline__ void bulk_load(void* shared, const void* global, uint32_t num_bytes,
                                          uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_word(shared)),
      "l"(global), "r"(num_bytes), "r"(shared_word(barrier))
      : "memory");
}
__device__ __forceinline__ void bulk_store(void* global, const void* shared, uint32_t num_bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global),
               "r"(shared_word(shared)), "r"(num_bytes)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Until this thread's stores have read their shared memory, and until they are written.
__device__ __forceinline__ void wait_stores_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
__device__ __forceinline__ void wait_stores_written() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
// Orders ordinary accesses of this thread before and after with those of the copy engine.
__device__ __forceinline__ void fence_copy_engine() {
  asm volatile("fence.proxy.async;" ::: "memory");
}
#endif

}  // namespace clo::kernels
