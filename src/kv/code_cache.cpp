#include "kv/code_cache.h"

#include <cstring>

#include "base/check.h"
#include "base/try.h"

namespace clo {

int64_t CodeCache::block_bytes() const {
  return kPageTokens * store_.layout().shape.token_code_bytes();
}

uint64_t* CodeCache::layer_codes(uint64_t* block, int32_t layer) const {
  const KvShape& shape = store_.layout().shape;
  return block +
         static_cast<int64_t>(layer) * shape.num_kv_heads * kPageTokens * shape.code_words();
}

Result<uint64_t*> CodeCache::acquire(PageId page) {
  Block& block = blocks_[page];
  if (block.references == 0) {
    auto memory = device_.allocate(block_bytes());
    if (!memory) {
      blocks_.erase(page);
      return std::move(memory).error();
    }
    block.codes = reinterpret_cast<uint64_t*>(*memory);
    const HostLayout& layout = store_.layout();
    const auto layer_bytes =
        static_cast<size_t>(layout.shape.num_kv_heads * layout.head_codes_bytes());
    // A page that is being filled gets its codes with its rows, here and on the host.
    const bool filled = store_.state(page) != HostStore::PageState::kFilling;
    for (int32_t layer = 0; filled && layer < layout.shape.num_layers; ++layer) {
      upload_(layer_codes(block.codes, layer), store_.codes(layer, page), layer_bytes);
    }
  }
  ++block.references;
  return block.codes;
}

void CodeCache::release(PageId page) {
  const auto found = blocks_.find(page);
  CLO_CHECK(found != blocks_.end(), page);
  if (--found->second.references > 0) return;
  device_.deallocate(reinterpret_cast<std::byte*>(found->second.codes));
  blocks_.erase(found);
}

}  // namespace clo
