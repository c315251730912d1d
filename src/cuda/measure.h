#pragma once
// Measurements of the CUDA backend on a model shape with random weights: steps, stages of a step,
// the fetch path, prefill. What `clo bench` prints and writes; no CUDA type here.
//
// Caches are filled with random rows instead of a prefill, so nothing about hits or overlaps is
// real unless it is forced; every output says which.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cuda/backend.h"

namespace clo {

struct MeasureOptions {
  ModelConfig config;
  int64_t context_tokens = 0;
  int32_t batch = 1;
  int64_t device_memory_bytes = 0;  // of the process, in all; 0: what is free
  int64_t host_memory_bytes = 0;    // 0: what the batch needs
  WeightStorage weights = WeightStorage::kAuto;
  RowFormat stored_rows = RowFormat::kFull;
  int32_t code_bits = 128;
  int32_t host_threads = 16;
  int32_t queue_clusters = 0;  // 0: by the jobs there are
  int32_t fetch_warps = kDefaultFetchWarps;
  uint32_t score_nap_ns = kDefaultScoreNapNs;
  int64_t room_tokens = 4096;  // steps that may be decoded behind the context
  int64_t chunk_rows = 512;    // prefill workspace; the whole context for prefill measurements
  PolicyOptions policy;
};

// Measured in the same run, so that shares of it mean something.
struct Ceilings {
  double hbm_read_bytes_per_s = 0;
  double link_copy_bytes_per_s = 0;  // pinned host to device, one large copy; rows of a set lie
                                     // apart and come slower (StepFigures::gather_bytes_per_s)
};

struct StepFigures {
  int64_t steps = 0;
  double median_s = 0, p10_s = 0, p90_s = 0, mean_s = 0;
  double cpu_s_per_step = 0;  // of the whole process
  // The same over the first and the last tenth of the steps: does it grow?
  double cpu_s_first = 0, cpu_s_last = 0;
  double hit_rate = 0;
  double new_share = 0;  // of the rows of missed sets
  // Per step, all sequences.
  double weight_bytes = 0, code_bytes = 0, attended_bytes = 0, link_bytes = 0;
  double corrections = 0;
  double gather_bytes_per_s = 0;  // rows read at the density of these fetches; 0: none fetched
  double wait_s = 0;              // attention waiting for rows, the mean over heads
  double fetch_s = 0;             // clusters copying rows, the sum
  int64_t graph_nodes = 0;
  int32_t resident_heads = 0, heads = 0;
  // By the driver's count, less what it counted before this process opened the device; -1: unknown.
  int64_t device_used_bytes = -1;
  double hbm_floor_s(const Ceilings& c) const {
    return (weight_bytes + code_bytes + attended_bytes) / c.hbm_read_bytes_per_s;
  }
  double link_floor_s(const Ceilings& c) const {
    return link_bytes / (gather_bytes_per_s > 0 ? gather_bytes_per_s : c.link_copy_bytes_per_s);
  }
  double floor_s(const Ceilings& c) const { return std::max(hbm_floor_s(c), link_floor_s(c)); }
};

struct StageFigures {
  std::string name;
  double seconds = 0;  // of one step, the stage alone, all layers
  double bytes = 0;
};

struct FetchFigures {
  double share = 0;  // of the context that each head fetches
  int64_t rows = 0;
  double bytes = 0, seconds = 0;
  double idle_seconds = 0;  // without products beside it
};

// One piece of work of a prefill, on the device: seconds since its start.
struct PrefillSpan {
  std::string lane, work;
  int32_t layer = 0;
  double begin_s = 0, end_s = 0;
};

struct PrefillFigures {
  double seconds = 0, without_offload_seconds = 0;
  std::vector<PrefillSpan> spans;  // of one more prefill with offload, when asked for
  std::string attention_kernel;
};

class CudaMeasure {
 public:
  // Fails: as CudaBackend::create, and the memory codes.
  static Result<std::unique_ptr<CudaMeasure>> create(const MeasureOptions& options);
  virtual ~CudaMeasure() = default;

  virtual std::string description() const = 0;
  virtual double pin_seconds() const = 0;
  virtual Ceilings ceilings() = 0;
  // A fresh batch with caches full of random rows. Fails: the memory codes.
  virtual Status fill(const PolicyOptions& policy, int32_t batch, int64_t context_tokens) = 0;
  virtual StepFigures steps(const ForcedReuse& forced, int64_t warm_up, int64_t steps) = 0;
  virtual std::vector<StageFigures> stages() = 0;
  virtual FetchFigures fetch(double share) = 0;
  // Time of a prefill of `tokens` random ids, with and without rows leaving for the host.
  virtual Result<PrefillFigures> prefill(int64_t tokens, bool with_timeline) = 0;
};

}  // namespace clo
