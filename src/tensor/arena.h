#pragma once
// Arena: a range of memory with a byte budget, cut into blocks. It stands for one memory: the
// device's or the host's. On the CPU backend both are anonymous maps; what makes one "the device"
// is its budget and the rule that decode reads only from it.
//
// States of a byte: free -> allocated (allocate) -> free (deallocate). Neighbouring free blocks
// merge at once. Used from the engine thread only.
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

#include "clo/result.h"

namespace clo {

class Arena {
 public:
  static constexpr int64_t kAlignment = 64;  // a cache line, and more than any vector load needs

  // Reserves address space for `budget_bytes`; pages cost memory only once they are written.
  // Fails: `shortage` when the system refuses the map.
  static Result<Arena> create(std::string name, int64_t budget_bytes, ErrorCode shortage);

  // Lays an arena over memory that someone else owns and that outlives it, a device's for example:
  // the arena itself never touches its bytes.
  static Arena over(std::string name, std::byte* base, int64_t num_bytes, ErrorCode shortage);

  Arena(Arena&& other) noexcept;
  Arena& operator=(Arena&& other) noexcept;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  ~Arena();

  // First fit; the block is aligned to kAlignment and holds zeros only where never used before.
  // Fails: `shortage` with the bytes asked, used and budgeted.
  Result<std::byte*> allocate(int64_t num_bytes);
  // Requires: `block` came from allocate() and was not deallocated since.
  void deallocate(std::byte* block);
  // Gives back what lies behind a block's first num_bytes; these stay as they are. Requires: as
  // deallocate(), and 0 < num_bytes <= what was asked for.
  void shrink(std::byte* block, int64_t num_bytes);
  // Whether allocate(num_bytes) would succeed now.
  bool fits(int64_t num_bytes) const;

  int64_t budget_bytes() const { return budget_bytes_; }
  int64_t used_bytes() const { return used_bytes_; }
  int64_t peak_bytes() const { return peak_bytes_; }
  void reset_peak() { peak_bytes_ = used_bytes_; }
  bool contains(const void* address) const;
  std::byte* base() const { return base_; }

  // Test mode: makes the whole arena unreadable and unwritable, or accessible again. Requires:
  // made by create().
  void set_accessible(bool accessible);

 private:
  Arena() = default;
  void release();
  // A range that was allocated becomes free and merges with its neighbours.
  void add_free(int64_t offset, int64_t size);

  std::string name_;
  ErrorCode shortage_ = ErrorCode::kHostMemory;
  std::byte* base_ = nullptr;
  int64_t mapped_bytes_ = 0;
  int64_t budget_bytes_ = 0;
  int64_t used_bytes_ = 0;
  int64_t peak_bytes_ = 0;
  std::map<int64_t, int64_t> free_;       // offset -> size
  std::map<int64_t, int64_t> allocated_;  // offset -> size
};

}  // namespace clo
