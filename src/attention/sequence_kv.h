#pragma once
// SequenceKv: the key and value rows of one sequence, its head caches and its policy. Created at
// admission, when everything it will ever need is reserved (pages, codes, slots, resident rows),
// so that no step can run out of memory; its destructor gives all of it back. Persistent heads that
// only fill the budget may be given up for another sequence (demote).
// Owned by the engine's sequence, used from the engine thread only.
//
// States: created (reused_tokens rows are in place) -> rows appended in prefill -> primed (sets
// chosen from the last prompt query) -> one row appended per decode step -> destroyed. A sequence
// may be destroyed in any state.
//
// Where stored rows are compressed, sink and ring rows that a stored prefix supplies are expanded
// from its rows: they have the values that these hold, not those they were made from.
#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "attention/kv_system.h"
#include "clo/policy.h"
#include "clo/report.h"
#include "kv/head_cache.h"
#include "ops/token_mask.h"
#include "reuse/dial.h"
#include "transfer/transfer_engine.h"

namespace clo {

class SequenceKv {
 public:
  struct Options {
    PolicyOptions policy;
    int64_t capacity_tokens = 0;      // prompt and answer
    int64_t num_budget_heads = 0;     // persistent heads the memory plan has room for
    bool host_copy = true;            // pages are kept for others: all rows and codes in the store
    bool may_demote = false;          // all rows in the store, so that budget heads can be given up
    std::span<const int32_t> prompt;  // to find a stored prefix; needed only now
    // Prompt tokens that no other token attends to: ascending, disjoint. Requires: none with
    // host_copy, as pages know nothing of the mask their rows were made under; not on a backend
    // that runs its steps itself.
    std::span<const TokenRange> masked;
    uint64_t random_seed = 0;  // for Select::kRandom
  };
  // Device bytes create() will reserve, codes of new pages included.
  static int64_t device_bytes(const KvSystem& system, const Options& options);
  // Whether the rows must be in the host store: some head is evictable.
  static bool needs_host_copy(const KvSystem& system, const Options& options);

  // Fails: kHostMemory or kDeviceMemory; nothing stays reserved then.
  static Result<std::unique_ptr<SequenceKv>> create(KvSystem& system, const Options& options);
  ~SequenceKv();
  SequenceKv(const SequenceKv&) = delete;
  SequenceKv& operator=(const SequenceKv&) = delete;

  int64_t reused_tokens() const { return reused_tokens_; }
  int64_t num_tokens() const { return num_tokens_; }
  int64_t capacity_tokens() const { return capacity_tokens_; }
  const PolicyOptions& policy() const { return policy_; }
  // Measurement: other numbers over the same memory. Requires: no larger a set than was reserved.
  void set_policy(const PolicyOptions& policy) { policy_ = policy; }

  SequenceLayerView layer_view(int32_t layer);
  HeadCacheView& head(int32_t layer, int32_t kv_head);
  bool is_resident(int32_t layer, int32_t kv_head) const;
  bool is_dense_layer(int32_t layer) const;
  std::span<const float> importance(int32_t layer, int32_t kv_head) const;  // [group_size]
  // The true queries of the last token, per layer [num_q_heads, head_dim].
  std::span<float> last_query(int32_t layer);
  bool has_last_query = false;
  // Null: every token is visible.
  const TokenMask* mask() const { return mask_ ? &*mask_ : nullptr; }
  // Of tokens [first, end), those that later tokens may attend to.
  int64_t num_visible(int64_t first, int64_t end) const {
    return mask_ ? mask_->num_visible(first, end) : end - first;
  }
  // The set rule over the visible tokens of a context: how many may be chosen, k, and whether k
  // takes them all.
  int64_t num_candidates(int64_t context_tokens) const;
  int64_t num_set_tokens(int64_t context_tokens) const;
  bool covers(int64_t context_tokens) const;
  // Evaluation: decode steps measure the mass that sets keep.
  bool measures_mass = false;
  // Evaluation: rows that decode attention counts when it reads them. Ascending, disjoint, none
  // masked.
  std::vector<TokenRange> watched;

  // What a hit test knows of a head beside its label; there for the tests that read it.
  struct HeadMemory {
    float key_spread = 0;                 // KeySpreadParams, of the prompt
    std::vector<float> entropy_at_label;  // [group_size] min-entropy over the set when it was new
    std::vector<float> entropy;           // and in the last step
    double mass_at_label = NAN;           // measured, where mass is
  };
  HeadMemory& memory(int32_t layer, int32_t kv_head);

  // Null without a quality to hold.
  Dial* dial() { return dial_ ? &*dial_ : nullptr; }
  const Dial* dial() const { return dial_ ? &*dial_ : nullptr; }
  // Takes over what the dial says: policy() is another from then on.
  void follow_dial();
  // Of the angle that thresholds allow.
  double dial_angle() const { return dial_ ? dial_->setting().angle : 1.0; }

  // Heads that demote() may take; none where that would give nothing back.
  int64_t num_budget_heads() const;
  // Device bytes that demoting one head gives back.
  int64_t bytes_of_demotion() const;
  // The `count` budget heads that are easiest to reuse become evictable: sink and ring are filled
  // from the host store (or stay, where stored rows are compressed), the set is chosen anew at the
  // next step. Between steps, with nothing launched; a backend with tables of its own must be told
  // afterwards (Runner::heads_changed). Requires: count <= num_budget_heads(). Blocks: until the
  // rows have arrived.
  // written_tokens: rows that are in the store, num_tokens() or, where a backend launches steps
  // ahead of it, more.
  void demote(int64_t count, int64_t written_tokens);
  int64_t num_demoted_heads() const { return num_demoted_heads_; }

  // Whether which heads fill the budget is still open at the end of the prompt: its last queries
  // say better than a profile, or than none, which heads are hard to reuse in this request.
  bool can_settle_residents() const;
  // How many of a prompt's last queries, each against the one before it, say so. All of one chunk.
  static int64_t difficulty_samples(int64_t chunk_tokens) {
    return std::min<int64_t>(64, chunk_tokens - 1);
  }
  // share: of `samples` of them, how many would have missed.
  void note_difficulty(int32_t layer, int32_t kv_head, double share, int64_t samples);
  // Budget heads that turned out easy change places with evictable ones that turned out hard, where
  // the rows that saves in the steps to come are more than those that move. Returns those that did,
  // layer * num_kv_heads + kv_head, ascending: they have no sets. After the last row of the prompt
  // is written. Blocks: until rows have arrived.
  std::vector<size_t> settle_residents();
  int64_t num_swapped_heads() const { return num_swapped_heads_; }

  // Counts `count` new rows as written. Called once per step, after the last layer.
  void advance(int64_t count);
  // Makes full pages of `tokens` [num_tokens()] findable by later sequences. Not for a sequence
  // that failed: its rows may be wrong. Requires: made with host_copy.
  void publish(std::span<const int32_t> tokens);

  // What a backend that runs steps by itself needs to reach the same memory.
  std::span<const PageId> pages() const { return pages_; }  // empty: no host copy
  // [num_layers, pages]; the first `pages` entries start the code blocks. Empty: no codes.
  std::span<uint64_t* const> device_code_table() const { return device_codes_; }

  KvCounters& counters(int32_t layer) { return counters_[static_cast<size_t>(layer)]; }
  std::span<const KvCounters> layer_counters() const { return counters_; }
  int64_t device_kv_bytes() const { return device_kv_bytes_; }
  int64_t host_kv_bytes() const;
  int32_t num_resident_heads() const;
  uint64_t random_seed() const { return random_seed_; }

 private:
  SequenceKv(KvSystem& system, const Options& options);
  Status reserve(const Options& options);
  Status check_pages(int64_t num_pages);
  Status take_pages(int64_t num_pages);  // checked before
  Status check_code_room(int64_t num_pages);
  int64_t code_block_bytes() const;  // codes of one page in all layers and heads
  void restore_rows();
  HeadCacheSpec head_spec(uint8_t resident) const;
  // Takes the block of head `index` and lays an empty cache over it. Fails: kDeviceMemory.
  Status take_head(size_t index);
  void clear_head(size_t index);
  // The sink and ring rows that a head keeps of `num_tokens` tokens, from the store.
  void add_fixed_rows(std::vector<RowMove>& moves, int32_t layer, int32_t kv_head,
                      int64_t num_tokens);
  // All stored rows of a resident head from the store, `num_tokens` of them.
  void add_stored_rows(std::vector<RowMove>& runs, std::vector<RowMove>& rows, int32_t layer,
                       int32_t kv_head, int64_t num_tokens);
  // The hardness of heads as far as it is known; empty: unknown.
  std::span<const float> difficulty() const;
  void swap_heads(size_t easy, size_t hard);
  // From stored rows to full ones. Blocks: until they have arrived.
  void bring_full_rows(std::span<const RowMove> moves);

  KvSystem& system_;
  PolicyOptions policy_;                 // in force
  const PolicyOptions reserved_policy_;  // that memory was taken for
  const std::optional<TokenMask> mask_;
  int64_t capacity_tokens_ = 0;
  int64_t num_tokens_ = 0;
  int64_t reused_tokens_ = 0;
  int64_t device_kv_bytes_ = 0;
  uint64_t random_seed_ = 0;
  bool shares_pages_ = false;  // host pages are found, kept and published, with their codes
  bool reads_codes_ = false;   // codes are on the device
  bool may_demote_ = false;
  int64_t num_budget_heads_ = 0;
  int64_t num_demoted_heads_ = 0;
  int64_t num_swapped_heads_ = 0;

  std::vector<PageId> pages_;
  std::vector<PageKey> page_keys_;     // of pages that are published or were found
  size_t num_full_pages_ = 0;          // pages marked full (shared ones included)
  std::vector<std::byte*> host_rows_;  // [num_layers, pages]
  std::vector<uint64_t*> host_codes_;
  std::vector<uint64_t*> device_codes_;
  size_t num_code_blocks_ = 0;             // acquired from the code cache, in page order
  std::vector<std::byte*> private_codes_;  // code blocks of a sequence that shares no pages
  std::vector<std::byte*> blocks_;         // [num_layers, num_kv_heads] head caches
  std::vector<uint8_t> resident_;          // [num_layers, num_kv_heads]
  std::vector<HeadCacheView> heads_;       // [num_layers, num_kv_heads]
  std::vector<float> last_queries_;        // [num_layers, num_q_heads, head_dim]
  std::vector<float> unit_importance_;     // [group_size] ones
  std::vector<KvCounters> counters_;       // [num_layers]
  std::vector<float> difficulty_;          // [num_layers, num_kv_heads]; empty: not settled
  std::vector<HeadMemory> memories_;       // [num_layers, num_kv_heads]; empty until asked for
  std::optional<Dial> dial_;
};

}  // namespace clo
