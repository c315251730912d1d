#pragma once
// What an evaluation sees of attention: for each layer of a prefill step the keys and queries of
// its tokens, and of a decode step every head's query and, through the task's head cache and pages,
// its token rows. Installed by EngineOptions::observer; without one attention does nothing more
// than look at a pointer. Called on the engine thread; nothing that a call points to may be kept.
#include <cstddef>
#include <cstdint>
#include <span>

#include "ops/params.h"

namespace clo {

// One layer of a chunk of a prompt, after the rotary embedding.
struct PrefillRows {
  int64_t first_token = 0;  // of the sequence
  int64_t num_tokens = 0;
  // As full rows hold them, in the shape's type, however rows are stored: key of KV head h and
  // token t of the chunk at h * key_head_bytes + t * key_token_bytes.
  const std::byte* keys = nullptr;
  int64_t key_head_bytes = 0, key_token_bytes = 0;
  const std::byte* queries = nullptr;  // [num_tokens, num_q_heads * head_dim] of query_type
  DType query_type = DType::kF32;
  int64_t query_token_bytes = 0;
};

class AttentionObserver {
 public:
  virtual ~AttentionObserver() = default;

  // Whether on_decode() is wanted. The CUDA backend, whose decode steps are captured graphs, serves
  // only observers that look at prefill alone.
  virtual bool watches_decode() const = 0;

  // Tokens of a prefix that is taken from the store are computed nowhere and not seen.
  virtual void on_prefill(const KvShape& shape, int32_t layer, const PrefillRows& rows) = 0;

  // After the layer's attention. tasks: KV heads of the first sequence, then of the next, queries
  // after the rotary embedding, context_tokens with the newest token.
  virtual void on_decode(const KvShape& shape, int32_t layer, std::span<const HeadTask> tasks) = 0;
};

}  // namespace clo
