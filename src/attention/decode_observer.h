#pragma once
// What an evaluation sees of decode attention: for each layer of a decode step every head's query
// and, through the task's head cache and pages, its token rows. Installed by
// EngineOptions::observer; without one attention does nothing more than look at a pointer.
#include <cstdint>
#include <span>

#include "ops/params.h"

namespace clo {

class DecodeObserver {
 public:
  virtual ~DecodeObserver() = default;

  // Called on the engine thread after the layer's attention. tasks: KV heads of the first sequence,
  // then of the next, queries after the rotary embedding, context_tokens with the newest token.
  // Nothing they point to may be kept.
  virtual void on_decode(const KvShape& shape, int32_t layer, std::span<const HeadTask> tasks) = 0;
};

}  // namespace clo
