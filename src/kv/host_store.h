#pragma once
// HostStore: the full KV cache of every sequence, in host memory, cut into pages of kPageTokens
// tokens. A page holds K, V and codes of its tokens in all layers and heads. Pages that are full
// and published are the prefix cache: a later sequence with the same beginning shares them.
// Owned by the engine, used from its thread only. It never copies rows and knows no policy.
//
// States of a page, and who moves it:
//
//   kFree      -> kFilling    allocate()   one sequence owns it and appends rows
//   kFilling   -> kFull       mark_full()  the owner wrote its last row in every layer; immutable
//   kFilling   -> kFree       release()    the owner ended; a half page is of no use to others
//   kFull      -> kPublished  publish()    the owner vouches for it (no NaN, all copies done)
//   kFull      -> kFree       release()    by the last reference
//   kPublished -> kPublished  find(), retain(), release(): references come and go; at zero the
//                             page stays, findable, in least-recently-used order
//   kPublished -> kFree       allocate() or drop_unused(): only at zero references, oldest first
#include <array>
#include <cstdint>
#include <list>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "ops/kv_layout.h"
#include "tensor/arena.h"

namespace clo {

using PageId = int32_t;

// Names a page's content: all tokens from the first to the page's last, and everything that
// decides what their rows are (model, type, hash, RoPE), folded into the root key.
struct PageKey {
  uint64_t low = 0;
  uint64_t high = 0;
  bool operator==(const PageKey&) const = default;
};

// Key of the page that follows `parent` (or starts from a root key) with these tokens.
PageKey page_key(const PageKey& parent, std::span<const int32_t> tokens);

class HostStore {
 public:
  enum class PageState : uint8_t { kFree, kFilling, kFull, kPublished };

  // Fails: kHostMemory when the budget holds no page (the smallest one that works is named).
  static Result<HostStore> create(const KvShape& shape, int64_t budget_bytes);

  const HostLayout& layout() const { return layout_; }
  int64_t num_pages() const { return layout_.num_pages; }
  // Pages that allocate() could hand out now.
  int64_t available_pages() const;
  // Pages that are not free; those no sequence refers to are counted too.
  int64_t used_pages() const { return num_pages() - static_cast<int64_t>(free_.size()); }
  int64_t unreferenced_pages() const { return static_cast<int64_t>(unused_.size()); }

  // A page in kFilling with one reference. Fails: kHostMemory when none is available.
  Result<PageId> allocate();
  void mark_full(PageId page);
  // Makes the page findable. When another page already has the key, nothing changes.
  void publish(PageId page, const PageKey& key, std::span<const int32_t> tokens);
  // A published page with this key and exactly these tokens, retained for the caller.
  std::optional<PageId> find(const PageKey& key, std::span<const int32_t> tokens);
  void retain(PageId page);
  void release(PageId page);
  // Frees every published page without references.
  void drop_unused();

  PageState state(PageId page) const { return pages_[checked(page)].state; }
  int32_t references(PageId page) const { return pages_[checked(page)].references; }

  std::byte* rows(int32_t layer, PageId page) const;  // [kv_head][token] rows
  uint64_t* codes(int32_t layer, PageId page) const;  // [kv_head][token] codes; null: none
  const Arena& arena() const { return arena_; }
  // Test mode: see Arena::set_accessible.
  void set_accessible(bool accessible) { arena_.set_accessible(accessible); }

 private:
  struct Page {
    PageState state = PageState::kFree;
    int32_t references = 0;
    PageKey key;                            // when published
    std::vector<int32_t> tokens;            // of this page, kept to verify a find
    std::list<PageId>::iterator unused_at;  // valid when published with zero references
  };
  struct KeyHash {
    size_t operator()(const PageKey& key) const { return key.low; }
  };

  HostStore(Arena arena, const HostLayout& layout);
  size_t checked(PageId page) const;
  void free_page(PageId page);

  Arena arena_;
  HostLayout layout_;
  std::byte* rows_ = nullptr;
  std::byte* codes_ = nullptr;
  std::vector<Page> pages_;
  std::vector<PageId> free_;
  std::list<PageId> unused_;  // published, zero references; front = least recently used
  std::unordered_map<PageKey, PageId, KeyHash> by_key_;
};

}  // namespace clo
