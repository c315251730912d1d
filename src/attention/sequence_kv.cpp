#include "attention/sequence_kv.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "base/check.h"
#include "base/try.h"
#include "base/units.h"
#include "reuse/persistent_heads.h"
#include "select/set_rule.h"

namespace clo {

namespace {

HeadCacheSpec spec_for(const PolicyOptions& policy, int64_t capacity_tokens, bool resident) {
  HeadCacheSpec spec;
  spec.sink_tokens = policy.sink;
  spec.ring_tokens = ring_tokens(policy);
  spec.slot_capacity = slot_capacity(policy, capacity_tokens);
  spec.capacity_tokens = capacity_tokens;
  spec.resident = resident;
  return spec;
}

// A page holds the rows of a head under each other, and so does a resident head: several at once
// keep lists of moves short.
constexpr int64_t kRun = 16;
static_assert(kPageTokens % kRun == 0);

Result<std::vector<uint8_t>> resident_heads(const KvSystem& system,
                                            const SequenceKv::Options& options) {
  return choose_resident_heads(options.policy, system.shape, system.profile.difficulty,
                               options.num_budget_heads);
}

bool keeps_codes(const KvSystem& system, const SequenceKv::Options& options) {
  return reads_codes(options.policy, system.shape) ||
         (system.codes_pass_device && options.host_copy && system.codes != nullptr);
}

}  // namespace

bool SequenceKv::needs_host_copy(const KvSystem& system, const Options& options) {
  const auto resident = resident_heads(system, options);
  return options.host_copy || options.may_demote || !resident ||
         std::count(resident->begin(), resident->end(), 0) > 0;
}

int64_t SequenceKv::device_bytes(const KvSystem& system, const Options& options) {
  const auto resident = resident_heads(system, options);
  if (!resident) return 0;
  const int64_t residents = std::count(resident->begin(), resident->end(), 1);
  const int64_t evictables = std::ssize(*resident) - residents;
  const PolicyOptions& policy = options.policy;
  const int64_t capacity = options.capacity_tokens;
  const int64_t heads =
      residents * head_cache_bytes(system.shape, spec_for(policy, capacity, true)) +
      evictables * head_cache_bytes(system.shape, spec_for(policy, capacity, false));
  if (!keeps_codes(system, options)) return heads;
  return heads + divide_up(capacity, kPageTokens) *
                     round_up(kPageTokens * system.shape.token_code_bytes(), Arena::kAlignment);
}

SequenceKv::SequenceKv(KvSystem& system, const Options& options)
    : system_(system),
      policy_(options.policy),
      reserved_policy_(options.policy),
      mask_(options.masked.empty() ? std::nullopt : std::optional<TokenMask>(options.masked)),
      capacity_tokens_(options.capacity_tokens),
      random_seed_(options.random_seed),
      shares_pages_(options.host_copy),
      reads_codes_(keeps_codes(system, options)),
      may_demote_(options.may_demote) {
  const KvShape& shape = system.shape;
  CLO_CHECK(!mask_ || !shares_pages_);
  counters_.resize(static_cast<size_t>(shape.num_layers));
  unit_importance_.assign(static_cast<size_t>(shape.group_size()), 1.0f);
  last_queries_.resize(static_cast<size_t>(shape.num_layers) * shape.num_q_heads * shape.head_dim);
  if (policy_.quality) dial_.emplace(*policy_.quality, kMostSetScale);
}

Result<std::unique_ptr<SequenceKv>> SequenceKv::create(KvSystem& system, const Options& options) {
  std::unique_ptr<SequenceKv> sequence(new SequenceKv(system, options));
  CLO_TRY(sequence->reserve(options));
  sequence->restore_rows();
  return sequence;
}

Status SequenceKv::reserve(const Options& options) {
  const KvShape& shape = system_.shape;
  const int64_t num_pages = divide_up(capacity_tokens_, kPageTokens);
  CLO_ASSIGN(resident_, resident_heads(system_, options));
  CLO_ASSIGN(const auto fixed,
             choose_resident_heads(policy_, shape, system_.profile.difficulty, 0));
  num_budget_heads_ =
      std::count(resident_.begin(), resident_.end(), 1) - std::count(fixed.begin(), fixed.end(), 1);

  if (shares_pages_) {
    CLO_CHECK(system_.store != nullptr);
    // At least the last prompt token is computed: its logits and its queries are needed.
    const int64_t shareable = std::max<int64_t>(0, std::ssize(options.prompt) - 1) / kPageTokens;
    PageKey key = system_.root_key;
    for (int64_t page = 0; page < shareable; ++page) {
      const auto tokens = options.prompt.subspan(static_cast<size_t>(page) * kPageTokens,
                                                 static_cast<size_t>(kPageTokens));
      key = page_key(key, tokens);
      const auto found = system_.store->find(key, tokens);
      if (!found) break;
      pages_.push_back(*found);
      page_keys_.push_back(key);
    }
    num_full_pages_ = pages_.size();
    reused_tokens_ = num_tokens_ = std::ssize(pages_) * kPageTokens;
  }

  // Before device memory: others may give way for it, in vain if the store is full.
  const bool host_copy = needs_host_copy(system_, options);
  if (host_copy) CLO_TRY(check_pages(num_pages));
  blocks_.resize(resident_.size());
  heads_.resize(resident_.size());
  for (size_t i = 0; i < resident_.size(); ++i) CLO_TRY(take_head(i));
  if (host_copy) CLO_TRY(take_pages(num_pages));

  const auto table_size = static_cast<size_t>(num_pages) * shape.num_layers;
  if (!pages_.empty()) host_rows_.resize(table_size);
  const bool host_codes = shares_pages_ && shape.code_bits > 0;
  if (host_codes) host_codes_.resize(table_size);
  if (reads_codes_) device_codes_.resize(table_size);
  for (int64_t page = 0; page < num_pages; ++page) {
    uint64_t* codes = nullptr;
    if (reads_codes_) {
      if (shares_pages_) {
        CLO_ASSIGN(codes, system_.codes->acquire(pages_[static_cast<size_t>(page)]));
        ++num_code_blocks_;
      } else {
        CLO_ASSIGN(std::byte* const block, system_.device.allocate(code_block_bytes()));
        private_codes_.push_back(block);
        codes = reinterpret_cast<uint64_t*>(block);
      }
      device_kv_bytes_ += code_block_bytes();
    }
    for (int32_t layer = 0; layer < shape.num_layers; ++layer) {
      const auto i = static_cast<size_t>(layer * num_pages + page);
      if (!pages_.empty()) {
        host_rows_[i] = system_.store->rows(layer, pages_[static_cast<size_t>(page)]);
      }
      if (host_codes) {
        host_codes_[i] = system_.store->codes(layer, pages_[static_cast<size_t>(page)]);
      }
      if (reads_codes_) {
        device_codes_[i] =
            codes + int64_t{layer} * shape.num_kv_heads * kPageTokens * shape.code_words();
      }
    }
  }
  // Not before everything is reserved: a sequence that is refused costs no work.
  for (size_t i = 0; i < heads_.size(); ++i) clear_head(i);
  return Ok{};
}

HeadCacheSpec SequenceKv::head_spec(uint8_t resident) const {
  return spec_for(reserved_policy_, capacity_tokens_, resident != 0);
}

Status SequenceKv::take_head(size_t index) {
  const HeadCacheSpec spec = head_spec(resident_[index]);
  const int64_t bytes = head_cache_bytes(system_.shape, spec);
  CLO_ASSIGN(blocks_[index], system_.device.allocate(bytes));
  device_kv_bytes_ += bytes;
  heads_[index] = view_head_cache(system_.shape, spec, blocks_[index]);
  return Ok{};
}

void SequenceKv::clear_head(size_t index) {
  const HeadCacheSpec spec = head_spec(resident_[index]);
  const std::span<std::byte> records = head_cache_records(system_.shape, spec, blocks_[index]);
  system_.transfer.fill(records.data(), 0, std::ssize(records));
  system_.transfer.fill(reinterpret_cast<std::byte*>(heads_[index].slot_token), 0xFF,
                        int64_t{4} * spec.slot_capacity);
}

int64_t SequenceKv::bytes_of_demotion() const {
  return head_cache_bytes(system_.shape, head_spec(1)) -
         head_cache_bytes(system_.shape, head_spec(0));
}

void SequenceKv::demote(int64_t count, int64_t written_tokens) {
  CLO_CHECK(count >= 0 && count <= num_budget_heads(), count, num_budget_heads());
  CLO_CHECK(written_tokens >= num_tokens_ && written_tokens <= capacity_tokens_, written_tokens,
            num_tokens_);
  // Of those that are resident now, which need not be the hardest of all: not every swap is worth
  // its rows. The order is that in which heads fill a budget.
  const auto fixed = choose_resident_heads(reserved_policy_, system_.shape, difficulty(), 0);
  CLO_CHECK(fixed.has_value());  // it was when the sequence was made
  std::vector<size_t> leaving;
  for (size_t i = 0; i < resident_.size(); ++i) {
    if (resident_[i] != 0 && (*fixed)[i] == 0) leaving.push_back(i);
  }
  if (!difficulty().empty()) {
    std::stable_sort(leaving.begin(), leaving.end(),
                     [&](size_t a, size_t b) { return difficulty()[a] > difficulty()[b]; });
  }
  CLO_CHECK(std::ssize(leaving) == num_budget_heads_, leaving.size(), num_budget_heads_);
  leaving.erase(leaving.begin(), leaving.end() - count);
  num_budget_heads_ -= count;
  std::vector<RowMove> moves;
  for (const size_t i : leaving) {
    device_kv_bytes_ -= head_cache_bytes(system_.shape, head_spec(1));
    resident_[i] = 0;
    if (system_.shape.compressed()) {
      // Sink and ring are there, in front of both kinds of block; from the store they would come
      // back rounded.
      const HeadCacheSpec spec = head_spec(0);
      const int64_t bytes = head_cache_bytes(system_.shape, spec);
      system_.device.shrink(blocks_[i], bytes);
      device_kv_bytes_ += bytes;
      heads_[i] = view_head_cache(system_.shape, spec, blocks_[i]);
    } else {
      system_.device.deallocate(std::exchange(blocks_[i], nullptr));
      const Status taken = take_head(i);  // in the place that was just given back
      CLO_CHECK(taken.has_value());
      const auto kv_heads = static_cast<size_t>(system_.shape.num_kv_heads);
      add_fixed_rows(moves, static_cast<int32_t>(i / kv_heads), static_cast<int32_t>(i % kv_heads),
                     written_tokens);
    }
    clear_head(i);
    ++num_demoted_heads_;
  }
  bring_full_rows(moves);
}

std::span<const float> SequenceKv::difficulty() const {
  return difficulty_.empty() ? std::span<const float>(system_.profile.difficulty) : difficulty_;
}

bool SequenceKv::can_settle_residents() const {
  return num_budget_heads_ > 0 && !pages_.empty() &&
         std::count(resident_.begin(), resident_.end(), 0) > 0;
}

void SequenceKv::note_difficulty(int32_t layer, int32_t kv_head, double share, int64_t samples) {
  // A profile weighs as much as a prompt's end does.
  constexpr double kProfileSamples = 64;
  const std::span<const float> profile = system_.profile.difficulty;
  if (difficulty_.empty()) difficulty_.assign(resident_.size(), 0.0f);
  const auto i = static_cast<size_t>(layer) * system_.shape.num_kv_heads + kv_head;
  const auto n = static_cast<double>(samples);
  difficulty_[i] = static_cast<float>(
      profile.empty() ? share
                      : (n * share + kProfileSamples * static_cast<double>(profile[i])) /
                            (n + kProfileSamples));
}

std::vector<size_t> SequenceKv::settle_residents() {
  std::vector<size_t> swapped;
  if (difficulty_.empty()) return swapped;
  const auto wanted =
      choose_resident_heads(reserved_policy_, system_.shape, difficulty_, num_budget_heads_);
  CLO_CHECK(wanted.has_value());  // it was when the sequence was made
  std::vector<size_t> easy, hard;
  for (size_t i = 0; i < resident_.size(); ++i) {
    if (resident_[i] != 0 && (*wanted)[i] == 0) easy.push_back(i);
    if (resident_[i] == 0 && (*wanted)[i] != 0) hard.push_back(i);
  }
  CLO_CHECK(easy.size() == hard.size(), easy.size(), hard.size());
  const auto softer = [&](size_t a, size_t b) { return difficulty_[a] < difficulty_[b]; };
  std::stable_sort(easy.begin(), easy.end(), softer);
  std::stable_sort(hard.rbegin(), hard.rend(), softer);
  // Of a set that is chosen again about this share is new (docs/measurements).
  constexpr double kNewShare = 0.4;
  const double rows_by_step =
      kNewShare * static_cast<double>(set_size(reserved_policy_, num_visible(0, num_tokens_)));
  const auto steps = static_cast<double>(capacity_tokens_ - num_tokens_);
  for (size_t i = 0; i < easy.size(); ++i) {
    const double misses = static_cast<double>(difficulty_[hard[i]] - difficulty_[easy[i]]) * steps;
    if (misses * rows_by_step <= static_cast<double>(num_tokens_)) break;
    swap_heads(easy[i], hard[i]);
    swapped.insert(swapped.end(), {easy[i], hard[i]});
  }
  std::sort(swapped.begin(), swapped.end());
  return swapped;
}

void SequenceKv::swap_heads(size_t easy, size_t hard) {
  const KvShape& shape = system_.shape;
  const auto kv_heads = static_cast<size_t>(shape.num_kv_heads);
  if (shape.compressed()) {
    // Both kinds of block begin with sink and ring, and from the store these would come back
    // rounded: they change blocks first, and then blocks change heads.
    const HeadCacheView &a = heads_[easy], &b = heads_[hard];
    system_.transfer.exchange(a.sink, b.sink, a.sink_tokens * shape.row_bytes());
    system_.transfer.exchange(a.ring, b.ring, a.ring_tokens * shape.row_bytes());
  }
  std::swap(blocks_[easy], blocks_[hard]);
  std::swap(resident_[easy], resident_[hard]);
  std::vector<RowMove> rows, runs, full;
  for (const size_t i : {easy, hard}) {
    heads_[i] = view_head_cache(shape, head_spec(resident_[i]), blocks_[i]);
    clear_head(i);
    const auto layer = static_cast<int32_t>(i / kv_heads), h = static_cast<int32_t>(i % kv_heads);
    if (resident_[i] != 0) {
      add_stored_rows(runs, rows, layer, h, num_tokens_);
      counters(layer).rows_restored += num_tokens_;
    } else if (!shape.compressed()) {
      add_fixed_rows(full, layer, h, num_tokens_);
      counters(layer).rows_restored += std::ssize(full);
    }
  }
  system_.transfer.fetch(runs, kRun * shape.stored_row_bytes());
  system_.transfer.fetch(rows, shape.stored_row_bytes());
  if (!shape.compressed()) bring_full_rows(full);
  ++num_swapped_heads_;
}

int64_t SequenceKv::num_budget_heads() const {
  // Slots for nearly every token, with their map, can take more than the rows themselves.
  return may_demote_ && bytes_of_demotion() > 0 ? num_budget_heads_ : 0;
}

void SequenceKv::bring_full_rows(std::span<const RowMove> moves) {
  if (system_.shape.compressed()) {
    system_.transfer.expand(moves, system_.shape);
  } else {
    system_.transfer.fetch(moves, system_.shape.row_bytes());
  }
}

Status SequenceKv::check_pages(int64_t num_pages) {
  const int64_t missing = num_pages - std::ssize(pages_);
  if (system_.store->available_pages() < missing) {
    return Error{ErrorCode::kHostMemory,
                 "the sequence needs " + std::to_string(missing) +
                     " more pages of the host store and " +
                     std::to_string(system_.store->available_pages()) + " of " +
                     std::to_string(system_.store->num_pages()) +
                     " are available; raise --host-memory or lower the context",
                 ""};
  }
  return Ok{};
}

Status SequenceKv::take_pages(int64_t num_pages) {
  // A new page may push out a stored prefix, so a sequence that cannot be served takes none.
  if (reads_codes_) CLO_TRY(check_code_room(num_pages));
  while (std::ssize(pages_) < num_pages) {
    CLO_ASSIGN(const PageId page, system_.store->allocate());
    pages_.push_back(page);
  }
  return Ok{};
}

int64_t SequenceKv::code_block_bytes() const {
  return kPageTokens * system_.shape.token_code_bytes();
}

Status SequenceKv::check_code_room(int64_t num_pages) {
  int64_t blocks = num_pages;
  if (shares_pages_) {
    for (const PageId page : pages_) blocks -= system_.codes->is_resident(page);
  }
  // Taken and given back: an arena that is in pieces can have the bytes and not the blocks.
  std::vector<std::byte*> taken;
  Status room = Ok{};
  while (room && std::ssize(taken) < blocks) {
    auto block = system_.device.allocate(code_block_bytes());
    if (block) {
      taken.push_back(*block);
    } else {
      room = std::move(block).error();
    }
  }
  for (std::byte* block : taken) system_.device.deallocate(block);
  return room;
}

void SequenceKv::add_fixed_rows(std::vector<RowMove>& moves, int32_t layer, int32_t kv_head,
                                int64_t num_tokens) {
  const KvShape& shape = system_.shape;
  const SequenceLayerView view = layer_view(layer);
  const HeadCacheView& cache = view.heads[kv_head];
  const auto bring = [&](int64_t token) {
    moves.push_back(
        {view.host_rows[token / kPageTokens] +
             (int64_t{kv_head} * kPageTokens + token % kPageTokens) * shape.stored_row_bytes(),
         fixed_row(shape, cache, token, num_tokens)});
  };
  for (int64_t t = 0; t < std::min<int64_t>(cache.sink_tokens, num_tokens); ++t) bring(t);
  for (int64_t t = std::max<int64_t>(cache.sink_tokens, num_tokens - cache.ring_tokens);
       t < num_tokens; ++t) {
    bring(t);
  }
}

void SequenceKv::restore_rows() {
  if (reused_tokens_ == 0) return;
  const KvShape& shape = system_.shape;
  std::vector<RowMove> moves, run_moves;
  for (int32_t layer = 0; layer < shape.num_layers; ++layer) {
    const SequenceLayerView view = layer_view(layer);
    for (int32_t h = 0; h < shape.num_kv_heads; ++h) {
      const HeadCacheView& cache = view.heads[h];
      if (!cache.is_resident() || shape.compressed()) {
        const size_t before = moves.size();
        add_fixed_rows(moves, layer, h, reused_tokens_);
        if (!cache.is_resident()) {
          counters(layer).rows_restored += static_cast<int64_t>(moves.size() - before);
        }
      }
      if (!cache.is_resident()) continue;
      add_stored_rows(run_moves, moves, layer, h, reused_tokens_);
      counters(layer).rows_restored += reused_tokens_;
    }
  }
  bring_full_rows(moves);
  system_.transfer.fetch(run_moves, kRun * shape.stored_row_bytes());
}

void SequenceKv::add_stored_rows(std::vector<RowMove>& runs, std::vector<RowMove>& rows,
                                 int32_t layer, int32_t kv_head, int64_t num_tokens) {
  const int64_t stored_bytes = system_.shape.stored_row_bytes();
  const SequenceLayerView view = layer_view(layer);
  for (int64_t t = 0; t < num_tokens;) {
    const bool run = t % kRun == 0 && num_tokens - t >= kRun;
    (run ? runs : rows)
        .push_back({view.host_rows[t / kPageTokens] +
                        (int64_t{kv_head} * kPageTokens + t % kPageTokens) * stored_bytes,
                    view.heads[kv_head].resident + t * stored_bytes});
    t += run ? kRun : 1;
  }
}

SequenceKv::~SequenceKv() {
  for (size_t i = 0; i < num_code_blocks_; ++i) system_.codes->release(pages_[i]);
  for (std::byte* block : private_codes_) system_.device.deallocate(block);
  for (std::byte* block : blocks_) {
    if (block != nullptr) system_.device.deallocate(block);
  }
  // From the end: a stored prefix is found from its first page on, so that one is pushed out last.
  for (size_t i = pages_.size(); i > 0; --i) system_.store->release(pages_[i - 1]);
}

SequenceLayerView SequenceKv::layer_view(int32_t layer) {
  const int64_t num_pages = divide_up(capacity_tokens_, kPageTokens);
  const auto at = static_cast<size_t>(layer * num_pages);
  SequenceLayerView view;
  if (!host_rows_.empty()) view.host_rows = host_rows_.data() + at;
  if (!host_codes_.empty()) view.host_codes = host_codes_.data() + at;
  if (!device_codes_.empty()) view.device_codes = device_codes_.data() + at;
  view.heads = &head(layer, 0);
  view.mask = mask();
  return view;
}

int64_t SequenceKv::num_candidates(int64_t context_tokens) const {
  const CandidateRange range = candidates(policy_, context_tokens);
  return num_visible(range.first, range.end);
}

int64_t SequenceKv::num_set_tokens(int64_t context_tokens) const {
  return set_size(policy_, num_visible(0, context_tokens));
}

bool SequenceKv::covers(int64_t context_tokens) const {
  return num_set_tokens(context_tokens) >= num_candidates(context_tokens);
}

HeadCacheView& SequenceKv::head(int32_t layer, int32_t kv_head) {
  return heads_[static_cast<size_t>(layer) * system_.shape.num_kv_heads + kv_head];
}

bool SequenceKv::is_resident(int32_t layer, int32_t kv_head) const {
  return resident_[static_cast<size_t>(layer) * system_.shape.num_kv_heads + kv_head] != 0;
}

bool SequenceKv::is_dense_layer(int32_t layer) const {
  return policy_.select == Select::kNone || policy_.dense_layers < 0 ||
         layer < policy_.dense_layers;
}

std::span<const float> SequenceKv::importance(int32_t layer, int32_t kv_head) const {
  const KvShape& shape = system_.shape;
  const auto group = static_cast<size_t>(shape.group_size());
  if (system_.profile.importance.empty()) return unit_importance_;
  const std::span<const float> all = system_.profile.importance;
  return all.subspan((static_cast<size_t>(layer) * shape.num_kv_heads + kv_head) * group, group);
}

SequenceKv::HeadMemory& SequenceKv::memory(int32_t layer, int32_t kv_head) {
  if (memories_.empty()) {
    const auto group = static_cast<size_t>(system_.shape.group_size());
    memories_.resize(resident_.size());
    for (HeadMemory& m : memories_) {
      m.entropy_at_label.assign(group, NAN);
      m.entropy.assign(group, NAN);
    }
  }
  return memories_[static_cast<size_t>(layer) * system_.shape.num_kv_heads + kv_head];
}

void SequenceKv::follow_dial() {
  const DialSetting& setting = dial_->setting();
  policy_.set_tokens = scaled_set_size(set_size(reserved_policy_, num_visible(0, num_tokens_ + 1)),
                                       setting.set_scale);
  // A stricter angle comes with a younger label; a wider one cannot have an older one, for rings
  // are as long as the label age asks for.
  if (reserved_policy_.max_label_age > 0) {
    policy_.max_label_age = std::max(
        1, static_cast<int32_t>(std::min(1.0, setting.angle) * reserved_policy_.max_label_age));
  }
}

std::span<float> SequenceKv::last_query(int32_t layer) {
  const auto width = static_cast<size_t>(system_.shape.num_q_heads) * system_.shape.head_dim;
  return std::span(last_queries_).subspan(static_cast<size_t>(layer) * width, width);
}

void SequenceKv::advance(int64_t count) {
  num_tokens_ += count;
  CLO_CHECK(num_tokens_ <= capacity_tokens_, num_tokens_, capacity_tokens_);
  if (pages_.empty()) return;
  while (static_cast<int64_t>(num_full_pages_ + 1) * kPageTokens <= num_tokens_) {
    system_.store->mark_full(pages_[num_full_pages_++]);
  }
}

void SequenceKv::publish(std::span<const int32_t> tokens) {
  CLO_CHECK(shares_pages_);
  while (page_keys_.size() < num_full_pages_) {
    const size_t page = page_keys_.size();
    CLO_CHECK((page + 1) * kPageTokens <= tokens.size(), page, tokens.size());
    const auto of_page = tokens.subspan(page * kPageTokens, static_cast<size_t>(kPageTokens));
    const PageKey key = page_key(page == 0 ? system_.root_key : page_keys_.back(), of_page);
    system_.store->publish(pages_[page], key, of_page);
    page_keys_.push_back(key);
  }
}

int64_t SequenceKv::host_kv_bytes() const {
  return pages_.empty() ? 0 : std::ssize(pages_) * system_.store->layout().page_bytes();
}

int32_t SequenceKv::num_resident_heads() const {
  return static_cast<int32_t>(std::count(resident_.begin(), resident_.end(), 1));
}

}  // namespace clo
