#pragma once
// CodeCache: the codes of the tokens in context, on the device, by host page. Codes belong to the
// page, so sequences that share a page share its codes: sixteen users of one document hold them
// once. Owned by the engine, engine thread only.
//
// States of a page's codes: absent -> resident (acquire: a block is allocated and, unless the page
// is still being filled, copied from the host) -> resident with more references -> absent (release
// of the last one).
#include <cstdint>
#include <cstring>
#include <functional>
#include <unordered_map>

#include "kv/host_store.h"
#include "tensor/arena.h"

namespace clo {

class CodeCache {
 public:
  // Writes host bytes to the device's memory.
  using Upload = std::function<void(void* target, const void* source, size_t num_bytes)>;

  // Both outlive the cache. Without `upload` the device's memory is written directly.
  CodeCache(HostStore& store, Arena& device, Upload upload = std::memcpy)
      : store_(store), device_(device), upload_(std::move(upload)) {}

  int64_t block_bytes() const;  // codes of one page in all layers and heads
  // Fails: kDeviceMemory when the arena has no room.
  Result<uint64_t*> acquire(PageId page);
  void release(PageId page);
  bool is_resident(PageId page) const { return blocks_.contains(page); }
  // The part of a block that belongs to one layer: [kv_head][token] codes.
  uint64_t* layer_codes(uint64_t* block, int32_t layer) const;

 private:
  struct Block {
    uint64_t* codes = nullptr;  // [layer][kv_head][token][word]
    int32_t references = 0;
  };
  HostStore& store_;
  Arena& device_;
  Upload upload_;
  std::unordered_map<PageId, Block> blocks_;
};

}  // namespace clo
