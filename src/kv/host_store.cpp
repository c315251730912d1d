#include "kv/host_store.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/try.h"
#include "base/units.h"

namespace clo {

PageKey page_key(const PageKey& parent, std::span<const int32_t> tokens) {
  XXH3_state_t state;
  XXH3_128bits_reset(&state);
  XXH3_128bits_update(&state, &parent, sizeof parent);
  XXH3_128bits_update(&state, tokens.data(), tokens.size_bytes());
  const XXH128_hash_t hash = XXH3_128bits_digest(&state);
  return {hash.low64, hash.high64};
}

Result<HostStore> HostStore::create(const KvShape& shape, int64_t budget_bytes) {
  HostLayout layout{shape, 0};
  layout.num_pages = budget_bytes / layout.page_bytes();
  if (layout.num_pages == 0) {
    return Error{ErrorCode::kHostMemory,
                 "the host store needs at least one page of " + format_bytes(layout.page_bytes()) +
                     ", the budget is " + format_bytes(budget_bytes) + "; raise --host-memory",
                 ""};
  }
  const int64_t bytes = round_up(layout.rows_bytes(), Arena::kAlignment) +
                        round_up(layout.codes_bytes(), Arena::kAlignment);
  CLO_ASSIGN(Arena arena, Arena::create("host", bytes, ErrorCode::kHostMemory));
  HostStore store(std::move(arena), layout);
  CLO_ASSIGN(store.rows_, store.arena_.allocate(layout.rows_bytes()));
  if (shape.code_bits > 0) {
    CLO_ASSIGN(store.codes_, store.arena_.allocate(layout.codes_bytes()));
  }
  return store;
}

HostStore::HostStore(Arena arena, const HostLayout& layout)
    : arena_(std::move(arena)), layout_(layout) {
  pages_.resize(static_cast<size_t>(layout.num_pages));
  free_.reserve(pages_.size());
  // Handed out from the back: low pages first, so that a small load touches little memory.
  for (int64_t page = layout.num_pages - 1; page >= 0; --page) {
    free_.push_back(static_cast<PageId>(page));
  }
}

size_t HostStore::checked(PageId page) const {
  CLO_CHECK(page >= 0 && page < layout_.num_pages, page, layout_.num_pages);
  return static_cast<size_t>(page);
}

int64_t HostStore::available_pages() const {
  return static_cast<int64_t>(free_.size() + unused_.size());
}

Result<PageId> HostStore::allocate() {
  if (free_.empty() && !unused_.empty()) free_page(unused_.front());
  if (free_.empty()) {
    return Error{ErrorCode::kHostMemory,
                 "all " + std::to_string(num_pages()) + " pages of the host store (" +
                     format_bytes(arena_.budget_bytes()) + ") are in use; raise --host-memory",
                 ""};
  }
  const PageId page = free_.back();
  free_.pop_back();
  Page& entry = pages_[checked(page)];
  entry.state = PageState::kFilling;
  entry.references = 1;
  return page;
}

void HostStore::mark_full(PageId page) {
  Page& entry = pages_[checked(page)];
  CLO_CHECK(entry.state == PageState::kFilling, page, static_cast<int>(entry.state));
  entry.state = PageState::kFull;
}

void HostStore::publish(PageId page, const PageKey& key, std::span<const int32_t> tokens) {
  Page& entry = pages_[checked(page)];
  CLO_CHECK(entry.state == PageState::kFull, page, static_cast<int>(entry.state));
  CLO_CHECK(tokens.size() == kPageTokens, tokens.size());
  if (!by_key_.emplace(key, page).second) return;
  entry.state = PageState::kPublished;
  entry.key = key;
  entry.tokens.assign(tokens.begin(), tokens.end());
}

std::optional<PageId> HostStore::find(const PageKey& key, std::span<const int32_t> tokens) {
  const auto found = by_key_.find(key);
  if (found == by_key_.end()) return std::nullopt;
  const Page& entry = pages_[checked(found->second)];
  if (!std::equal(tokens.begin(), tokens.end(), entry.tokens.begin(), entry.tokens.end())) {
    return std::nullopt;  // a collision of hashes must never show one request another's rows
  }
  retain(found->second);
  return found->second;
}

void HostStore::retain(PageId page) {
  Page& entry = pages_[checked(page)];
  CLO_CHECK(entry.state == PageState::kPublished, page, static_cast<int>(entry.state));
  if (entry.references == 0) unused_.erase(entry.unused_at);
  ++entry.references;
}

void HostStore::release(PageId page) {
  Page& entry = pages_[checked(page)];
  CLO_CHECK(entry.references > 0, page);
  --entry.references;
  if (entry.references > 0) return;
  if (entry.state == PageState::kPublished) {
    entry.unused_at = unused_.insert(unused_.end(), page);
  } else {
    entry.state = PageState::kFree;
    free_.push_back(page);
  }
}

void HostStore::free_page(PageId page) {
  Page& entry = pages_[checked(page)];
  CLO_CHECK(entry.state == PageState::kPublished && entry.references == 0, page);
  by_key_.erase(entry.key);
  unused_.erase(entry.unused_at);
  entry = Page{};
  free_.push_back(page);
}

void HostStore::drop_unused() {
  while (!unused_.empty()) free_page(unused_.front());
}

std::byte* HostStore::rows(int32_t layer, PageId page) const {
  return rows_ + layout_.row_offset(layer, static_cast<int64_t>(checked(page)), 0, 0);
}

uint64_t* HostStore::codes(int32_t layer, PageId page) const {
  if (codes_ == nullptr) return nullptr;
  return reinterpret_cast<uint64_t*>(
      codes_ + layout_.code_offset(layer, static_cast<int64_t>(checked(page)), 0, 0));
}

}  // namespace clo
