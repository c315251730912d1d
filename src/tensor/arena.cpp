#include "tensor/arena.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/check.h"
#include "base/units.h"

namespace clo {

namespace {

constexpr int64_t kHugePageBudget = int64_t{1} << 30;

}  // namespace

Result<Arena> Arena::create(std::string name, int64_t budget_bytes, ErrorCode shortage) {
  CLO_CHECK(budget_bytes >= 0, name, budget_bytes);
  Arena arena;
  arena.name_ = std::move(name);
  arena.shortage_ = shortage;
  arena.budget_bytes_ = budget_bytes / kAlignment * kAlignment;
  if (arena.budget_bytes_ == 0) return arena;
  arena.mapped_bytes_ = round_up(arena.budget_bytes_, sysconf(_SC_PAGESIZE));
  void* map = mmap(nullptr, static_cast<size_t>(arena.mapped_bytes_), PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (map == MAP_FAILED) {
    return Error{shortage,
                 "could not reserve " + format_bytes(budget_bytes) + " of address space for the " +
                     arena.name_ + " arena: " + std::strerror(errno),
                 ""};
  }
  // Rows are read in long runs: fewer, larger pages cost fewer address translations. A small arena
  // would only be rounded up.
  if (arena.budget_bytes_ >= kHugePageBudget) {
    madvise(map, static_cast<size_t>(arena.mapped_bytes_), MADV_HUGEPAGE);
  }
  arena.base_ = static_cast<std::byte*>(map);
  arena.free_[0] = arena.budget_bytes_;
  return arena;
}

Arena Arena::over(std::string name, std::byte* base, int64_t num_bytes, ErrorCode shortage) {
  CLO_CHECK(reinterpret_cast<uintptr_t>(base) % kAlignment == 0, name);
  Arena arena;
  arena.name_ = std::move(name);
  arena.shortage_ = shortage;
  arena.base_ = base;
  arena.budget_bytes_ = num_bytes / kAlignment * kAlignment;
  if (arena.budget_bytes_ > 0) arena.free_[0] = arena.budget_bytes_;
  return arena;
}

Arena::Arena(Arena&& other) noexcept { *this = std::move(other); }

Arena& Arena::operator=(Arena&& other) noexcept {
  if (this == &other) return *this;
  release();
  name_ = std::move(other.name_);
  shortage_ = other.shortage_;
  base_ = std::exchange(other.base_, nullptr);
  mapped_bytes_ = std::exchange(other.mapped_bytes_, 0);
  budget_bytes_ = std::exchange(other.budget_bytes_, 0);
  used_bytes_ = std::exchange(other.used_bytes_, 0);
  peak_bytes_ = std::exchange(other.peak_bytes_, 0);
  free_ = std::move(other.free_);
  allocated_ = std::move(other.allocated_);
  return *this;
}

Arena::~Arena() { release(); }

void Arena::release() {
  if (mapped_bytes_ > 0) munmap(base_, static_cast<size_t>(mapped_bytes_));
  base_ = nullptr;
}

Result<std::byte*> Arena::allocate(int64_t num_bytes) {
  CLO_CHECK(num_bytes > 0, name_, num_bytes);
  const int64_t size = round_up(num_bytes, kAlignment);
  const auto fit = std::find_if(free_.begin(), free_.end(),
                                [&](const auto& block) { return block.second >= size; });
  if (fit == free_.end()) {
    return Error{shortage_,
                 "the " + name_ + " arena has no block of " + format_bytes(size) + " (" +
                     format_bytes(used_bytes_) + " of " + format_bytes(budget_bytes_) + " used)",
                 ""};
  }
  const auto [offset, available] = *fit;
  free_.erase(fit);
  if (available > size) free_[offset + size] = available - size;
  allocated_[offset] = size;
  used_bytes_ += size;
  peak_bytes_ = std::max(peak_bytes_, used_bytes_);
  return base_ + offset;
}

void Arena::deallocate(std::byte* block) {
  const auto found = allocated_.find(block - base_);
  CLO_CHECK(found != allocated_.end(), name_, block - base_);
  const auto [offset, size] = *found;
  allocated_.erase(found);
  add_free(offset, size);
}

void Arena::shrink(std::byte* block, int64_t num_bytes) {
  const auto found = allocated_.find(block - base_);
  CLO_CHECK(found != allocated_.end(), name_, block - base_);
  const int64_t kept = round_up(num_bytes, kAlignment), size = found->second;
  CLO_CHECK(num_bytes > 0 && kept <= size, name_, num_bytes, size);
  if (kept == size) return;
  found->second = kept;
  add_free(found->first + kept, size - kept);
}

void Arena::add_free(int64_t offset, int64_t size) {
  used_bytes_ -= size;
  auto next = free_.lower_bound(offset);
  if (next != free_.end() && next->first == offset + size) {
    size += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    const auto previous = std::prev(next);
    if (previous->first + previous->second == offset) {
      previous->second += size;
      return;
    }
  }
  free_[offset] = size;
}

bool Arena::fits(int64_t num_bytes) const {
  const int64_t size = round_up(num_bytes, kAlignment);
  return std::any_of(free_.begin(), free_.end(),
                     [&](const auto& block) { return block.second >= size; });
}

bool Arena::contains(const void* address) const {
  const auto* byte = static_cast<const std::byte*>(address);
  return byte >= base_ && byte < base_ + budget_bytes_;
}

void Arena::set_accessible(bool accessible) {
  if (base_ == nullptr) return;
  CLO_CHECK(mapped_bytes_ > 0, name_);
  const int protection = accessible ? PROT_READ | PROT_WRITE : PROT_NONE;
  CLO_CHECK(mprotect(base_, static_cast<size_t>(mapped_bytes_), protection) == 0, name_);
}

}  // namespace clo
