#pragma once
// What all sequences of an engine share: the stores, the arena, the backend. Owned by the engine;
// it outlives every SequenceKv and Attention that refers to it.
#include <cstdint>
#include <optional>
#include <vector>

#include "attention/attention_observer.h"
#include "kv/code_cache.h"
#include "kv/host_store.h"
#include "ops/ops.h"
#include "select/hash_signs.h"
#include "tensor/arena.h"
#include "transfer/transfer_engine.h"

namespace clo {

// What an offline profile says of a model's heads; empty vectors: no profile.
struct HeadProfile {
  std::vector<float> importance;    // [num_layers, num_q_heads] in [0, 1]; without: all 1
  std::vector<float> difficulty;    // [num_layers, num_kv_heads]
  std::vector<float> hash_weights;  // [num_layers, num_kv_heads, head_dim + 1, code_bits]
  int64_t hash_tokens = 0;          // longest context that they were trained at; 0: unknown
};

struct KvSystem {
  KvShape shape;
  Ops* ops = nullptr;  // null: the backend runs its steps itself (cuda/)
  TransferEngine& transfer;
  Arena& device;
  HostStore* store = nullptr;  // null: nothing is offloaded and no prefix is kept
  CodeCache* codes = nullptr;  // null when the store has no codes
  HeadProfile profile;
  std::vector<HashParams> hashes;  // [num_layers, num_kv_heads]; empty without codes
  PageKey root_key;                // model, layout, KV type, hash and RoPE
  // Test mode: host rows cannot be read while decode attention runs.
  bool guard_host_rows = false;
  // Evaluation: at every decode step attended rows are compared with all rows, and queries with
  // those of the step before (slow).
  bool measure_mass = false;
  // The backend makes codes on the device and copies them to the host store from there, so a
  // sequence whose pages are shared keeps them on the device whether it reads them or not.
  bool codes_pass_device = false;
  AttentionObserver* observer = nullptr;  // evaluation; may be null

  const HashParams* layer_hashes(int32_t layer) const {
    return hashes.empty() ? nullptr : hashes.data() + int64_t{layer} * shape.num_kv_heads;
  }
};

}  // namespace clo
