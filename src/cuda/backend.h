#pragma once
// CudaBackend: the device, its memory and what moves rows to it; makes the Runner that replays
// captured decode steps. No CUDA type here: cuda/none/ stands in where the build has no CUDA.
// Owned by the engine; outlives every arena block, store, sequence and runner that came from it.
#include <cstdint>
#include <memory>
#include <string>

#include "kv/host_store.h"
#include "model/runner.h"
#include "model/weights.h"
#include "transfer/transfer_engine.h"

namespace clo {

inline constexpr uint32_t kDefaultScoreNapNs = 4000;
inline constexpr int32_t kDefaultFetchWarps = 1;

// What a step must hold at most; fixes the workspace.
struct CudaLimits {
  int32_t max_batch = 1;
  int64_t chunk_rows = 0;  // prompt tokens of a prefill step
  int64_t max_context_tokens = 0;
  int32_t queue_clusters = 0;  // of four blocks, that refresh beside the layers; 0: by the jobs
  int32_t fetch_warps = kDefaultFetchWarps;  // of each of those blocks
  uint32_t score_nap_ns = kDefaultScoreNapNs;
  // Rows that a layer buffer holds; 0: max_context_tokens, which prefill needs.
  int64_t layer_tokens = 0;
  bool tiled_weights = false;  // some matrix lies in tiles of codes: prefill expands it
};

// Measurement only, labelled in every output: decisions and sets are drawn, not computed.
struct ForcedReuse {
  float hit_rate = -1;   // share of head-steps that keep their set; negative: natural
  float new_share = -1;  // share of a missed set that is new; negative: natural
  // Share of the misses that the true query finds, on the critical path; the rest is foreseen.
  float correction_share = 0;
  // Steps sample attention mass as a dial needs it (SequenceRules::looks), without one.
  bool looks_at_mass = false;
};

class CudaBackend {
 public:
  // Opens the device. Fails: kDeviceFault (no CUDA in the build, or no usable device).
  static Result<std::unique_ptr<CudaBackend>> create(int host_threads);
  virtual ~CudaBackend() = default;

  // KV shapes the kernels are cut for. Fails: kUnsupported, naming the limit.
  static Status supports(const KvShape& shape);
  // Rows of the memory plan: what a runner takes from the arena.
  static int64_t workspace_bytes(const ModelConfig& config, const KvShape& shape,
                                 const CudaLimits& limits);
  // The longest chunk whose workspace stays within `budget_bytes`, at most `wanted_rows`.
  static int64_t largest_chunk(const ModelConfig& config, const KvShape& shape, CudaLimits limits,
                               int64_t wanted_rows, int64_t budget_bytes);

  virtual std::string description() const = 0;
  // Device memory of the process outside the arena: context, modules, what libraries keep, and the
  // mapping of a store once that is pinned.
  virtual int64_t overhead_bytes() const = 0;
  // What mapping a store of that size will add, about; measured once it is pinned.
  static int64_t mapping_bytes(int64_t store_bytes) { return store_bytes / 512; }
  virtual int64_t free_bytes() const = 0;  // of the device, now
  // Takes the arena, once, in one piece. The budget includes overhead_bytes(), so that the process
  // stays within it. Fails: kDeviceMemory.
  virtual Status take_arena(int64_t budget_bytes) = 0;
  virtual Arena& arena() = 0;  // Requires: take_arena
  virtual TransferEngine& transfer() = 0;
  // Pins the store's memory so that kernels reach it. Fails: kHostMemory. The store lives on;
  // call once, before any row is written and before take_arena.
  virtual Status pin(HostStore& store) = 0;
  virtual double pin_seconds() const = 0;

  // A runner over weights in arena(). `system` and `weights` outlive it. Fails: kDeviceMemory.
  virtual Result<std::unique_ptr<Runner>> make_runner(const Weights& weights, KvSystem& system,
                                                      const CudaLimits& limits) = 0;
};

}  // namespace clo
