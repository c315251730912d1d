// Whole steps through Attention on sequences without a model: what is attended, with which rows,
// and that no token becomes invisible.
#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <set>
#include <stdexcept>
#include <string>

#include "kv_world.h"
#include "ops/stored_row.h"

namespace clo {
namespace {

// Largest error of attention over a few hundred f32 rows of size 1; see tests/reference/scene.h.
constexpr double kAttentionError = 2e-5;

// One sequence and everything that was ever appended to it, outside the system under test.
struct Actor {
  Actor(KvWorld& in_world, const SequenceKv::Options& options, std::vector<int32_t> prompt_tokens,
        uint64_t its_seed)
      : world(in_world), tokens(std::move(prompt_tokens)), seed(its_seed) {
    SequenceKv::Options with_prompt = options;
    with_prompt.prompt = tokens;
    for (const TokenRange& range : options.masked) {
      for (int64_t t = range.first; t < range.end; ++t) masked.insert(t);
    }
    auto made = SequenceKv::create(world.system, with_prompt);
    if (made) kv = std::move(*made);
    for (int32_t layer = 0; layer < world.shape.num_layers; ++layer) {
      queries.push_back(normals(seed * 100 + static_cast<uint64_t>(layer), world.q_width()));
    }
  }
  // The query drifts, and now and then jumps, so that labels hit and miss.
  void move_query(int32_t layer) {
    const uint64_t step = ++num_moves;
    const auto noise = normals(seed * 1000003 + step, world.q_width());
    const float kept = step % 7 == 0 ? 0.0f : 0.95f;
    auto& query = queries[static_cast<size_t>(layer)];
    for (size_t i = 0; i < query.size(); ++i) query[i] = kept * query[i] + 0.3f * noise[i];
  }
  // Tokens of [first, end) that attention may see.
  int64_t num_visible(int64_t first, int64_t end) const {
    int64_t count = 0;
    for (int64_t t = first; t < end; ++t) count += !masked.contains(t);
    return count;
  }
  const float* group_query(int32_t layer, int32_t kv_head) const {
    return queries[static_cast<size_t>(layer)].data() +
           int64_t{kv_head} * world.shape.group_size() * world.shape.head_dim;
  }

  KvWorld& world;
  std::unique_ptr<SequenceKv> kv;
  std::vector<int32_t> tokens;
  std::set<int64_t> masked;
  uint64_t seed;
  uint64_t num_moves = 0;
  std::vector<std::vector<float>> queries;  // [layer] of the step at hand
};

// In which of its forms a row is read. kRestored: a full row that a stored one was expanded to.
enum class Form : uint8_t { kFull, kStored, kRestored };

struct Row {
  std::vector<float> key, value;  // of one head, the values that the form means
};
Row expected_row(const KvWorld& world, int32_t layer, int32_t head, int64_t position, int32_t token,
                 Form form) {
  Row row;
  const KvShape& shape = world.shape;
  const int dim = shape.head_dim;
  const auto keys = world.rows(0, layer, position, token);
  const auto values = world.rows(1, layer, position, token);
  for (int d = 0; d < dim; ++d) {
    row.key.push_back(world.rounded(keys[static_cast<size_t>(head * dim + d)]));
    row.value.push_back(world.rounded(values[static_cast<size_t>(head * dim + d)]));
  }
  if (form == Form::kFull || !shape.compressed()) return row;
  std::vector<std::byte> stored(static_cast<size_t>(shape.stored_row_bytes()));
  compress_row(shape, row.key.data(), row.value.data(), stored.data());
  expand_row(shape, stored.data(), row.key.data(), row.value.data());
  if (form == Form::kRestored) {
    for (float& x : row.key) x = world.rounded(x);
    for (float& x : row.value) x = world.rounded(x);
  }
  return row;
}
Row read_row(const KvShape& shape, const std::byte* at, bool full) {
  Row row;
  row.key.resize(static_cast<size_t>(shape.head_dim));
  row.value.resize(static_cast<size_t>(shape.head_dim));
  if (!full && shape.compressed()) {
    expand_row(shape, at, row.key.data(), row.value.data());
    return row;
  }
  convert_to_f32(shape.type, at, row.key.data(), shape.head_dim);
  convert_to_f32(shape.type, at + shape.value_offset(), row.value.data(), shape.head_dim);
  return row;
}

struct AttendedRow {
  int64_t token;
  const std::byte* row;
  bool full;  // or stored
};

// Sink, set and ring of a head, by the words of the design and not by the code that lists them. A
// set is taken as it is, so that a masked token in it shows.
std::vector<AttendedRow> attended_rows(const KvShape& shape, const HeadTask& task,
                                       const std::set<int64_t>& masked) {
  const HeadCacheView& head = *task.head;
  const int64_t full = shape.row_bytes(), stored = shape.stored_row_bytes();
  const int64_t context = task.context_tokens;
  // Whose sinks and latest tokens lie apart from its other rows.
  const bool has_fixed = !head.is_resident() || shape.compressed();
  std::vector<AttendedRow> rows;
  for (int64_t t = 0; t < context; ++t) {
    if (masked.contains(t)) continue;
    const bool fixed = t < head.sink_tokens || t >= context - head.ring_tokens;
    if (fixed && has_fixed) {
      rows.push_back(
          {t, t < head.sink_tokens ? head.sink + t * full : head.ring + t % head.ring_tokens * full,
           true});
    } else if (task.attend_all || fixed) {
      rows.push_back({t, head.resident + t * stored, false});
    }
  }
  if (task.attend_all) return rows;
  for (int32_t slot = 0; slot < head.state->num_slots_used; ++slot) {
    const int64_t token = head.slot_token[slot];
    if (token < 0 || token >= context - head.ring_tokens) continue;
    rows.push_back(
        {token,
         head.is_resident() ? head.resident + token * stored : head.slots + int64_t{slot} * stored,
         false});
  }
  return rows;
}

// Thrown, so that properties and plain tests alike stop and say where.
#define REQUIRE_THAT(condition)                                                       \
  do {                                                                                \
    if (!(condition)) {                                                               \
      throw std::runtime_error("line " + std::to_string(__LINE__) + ": " #condition); \
    }                                                                                 \
  } while (false)

class Simulation {
 public:
  Simulation(KvWorld& world, std::vector<Actor*> actors)
      : world_(world),
        actors_(std::move(actors)),
        scale_(1 / std::sqrt(static_cast<float>(world.shape.head_dim))),
        attention_(world.system, scale_) {
    world.ops.before_attend = [this](const AttendParams& p) { check_tasks(p); };
  }
  ~Simulation() { world_.ops.before_attend = nullptr; }

  void prefill(Actor& actor, int64_t chunk) {
    while (actor.kv->num_tokens() < std::ssize(actor.tokens)) {
      const int64_t first = actor.kv->num_tokens();
      const int64_t count = std::min(chunk, std::ssize(actor.tokens) - first);
      const bool last = first + count == std::ssize(actor.tokens);
      attention_.begin_prefill(*actor.kv, count, last);
      for (int32_t layer = 0; layer < world_.shape.num_layers; ++layer) {
        std::vector<float> keys, values, queries;
        for (int64_t t = first; t < first + count; ++t) {
          append_row(actor, layer, t, keys, values);
          const auto query = t + 1 == std::ssize(actor.tokens)
                                 ? actor.queries[static_cast<size_t>(layer)]
                                 : normals(static_cast<uint64_t>(t), world_.q_width());
          queries.insert(queries.end(), query.begin(), query.end());
        }
        attention_.append(layer, keys.data(), values.data(), world_.kv_width());
        std::vector<float> out(queries.size());
        attention_.attend(layer, queries.data(), world_.q_width(), out.data());
      }
      attention_.end();
    }
  }

  // One decode step of all actors, each with one new token.
  void decode() {
    std::vector<SequenceKv*> batch;
    for (Actor* actor : actors_) {
      batch.push_back(actor->kv.get());
      actor->tokens.push_back(static_cast<int32_t>(actor->tokens.size() % 50));
    }
    attention_.begin_decode(batch);
    for (Actor* actor : actors_) actor->move_query(0);
    for (layer_ = 0; layer_ < world_.shape.num_layers; ++layer_) {
      const int32_t next = layer_ + 1;
      if (next < world_.shape.num_layers) {
        // As a model does: the next layer's queries are foreseen, roughly.
        std::vector<float> foreseen;
        for (Actor* actor : actors_) {
          actor->move_query(next);
          const auto noise = normals(actor->seed + actor->num_moves, world_.q_width());
          for (size_t i = 0; i < noise.size(); ++i) {
            foreseen.push_back(actor->queries[static_cast<size_t>(next)][i] + 0.1f * noise[i]);
          }
        }
        if (attention_.wants_prediction(next)) attention_.prefetch(next, foreseen.data());
      }
      std::vector<float> keys, values, queries;
      for (Actor* actor : actors_) {
        append_row(*actor, layer_, std::ssize(actor->tokens) - 1, keys, values);
        const auto& query = actor->queries[static_cast<size_t>(layer_)];
        queries.insert(queries.end(), query.begin(), query.end());
      }
      attention_.append(layer_, keys.data(), values.data(), world_.kv_width());
      std::vector<float> out(queries.size());
      attention_.attend(layer_, queries.data(), world_.q_width(), out.data());
      check_output(out);
    }
    attention_.end();
    ++num_steps_;
  }

  int64_t num_steps() const { return num_steps_; }
  int64_t num_checked() const { return num_checked_; }
  // Of each sequence's `watched`, as KvCounters counts them.
  int64_t watched_rows() const { return watched_rows_; }
  int64_t watched_rows_attended() const { return watched_rows_attended_; }

 private:
  void append_row(const Actor& actor, int32_t layer, int64_t position, std::vector<float>& keys,
                  std::vector<float>& values) const {
    const int32_t token = actor.tokens[static_cast<size_t>(position)];
    const auto key = world_.rows(0, layer, position, token);
    const auto value = world_.rows(1, layer, position, token);
    keys.insert(keys.end(), key.begin(), key.end());
    values.insert(values.end(), value.begin(), value.end());
  }

  void check_tasks(const AttendParams& p) {
    const KvShape& shape = world_.shape;
    REQUIRE_THAT(p.num_tasks == std::ssize(actors_) * shape.num_kv_heads);
    seen_.clear();
    for (int64_t i = 0; i < p.num_tasks; ++i) {
      const HeadTask& task = p.tasks[i];
      Actor& actor = *actors_[static_cast<size_t>(i / shape.num_kv_heads)];
      REQUIRE_THAT(task.kv_head == i % shape.num_kv_heads);
      REQUIRE_THAT(task.layer == layer_);
      REQUIRE_THAT(task.head == &actor.kv->head(layer_, task.kv_head));
      REQUIRE_THAT(task.context_tokens == std::ssize(actor.tokens));
      check_task(actor, task);
    }
  }

  void check_task(Actor& actor, const HeadTask& task) {
    const PolicyOptions& policy = actor.kv->policy();
    const int64_t context = task.context_tokens;
    const auto rows = attended_rows(world_.shape, task, actor.masked);
    std::set<int64_t> tokens;
    std::map<int64_t, Form> forms;
    for (const AttendedRow& row : rows) {
      forms[row.token] = form_of(actor, row);
      REQUIRE_THAT(row.token >= 0);
      REQUIRE_THAT(row.token < context);
      REQUIRE_THAT(!actor.masked.contains(row.token));
      REQUIRE_THAT(tokens.insert(row.token).second);  // none twice
      REQUIRE_THAT(world_.device.contains(row.row));
      // The slot holds the row of the token that its map names.
      const Row expected =
          expected_row(world_, layer_, task.kv_head, row.token,
                       actor.tokens[static_cast<size_t>(row.token)], form_of(actor, row));
      const Row found = read_row(world_.shape, row.row, row.full);
      REQUIRE_THAT(found.key == expected.key);
      REQUIRE_THAT(found.value == expected.value);
    }
    for (int64_t t = 0; t < context; ++t) {
      if (t >= policy.sink && t < context - policy.recent) continue;
      REQUIRE_THAT(tokens.contains(t) == !actor.masked.contains(t));
    }
    ++num_checked_;
    seen_.push_back(std::move(forms));
    if (task.attend_all) {
      REQUIRE_THAT(std::ssize(tokens) == actor.num_visible(0, context));
      return;
    }
    check_visible(actor, task, tokens);
    for (const TokenRange& range : actor.kv->watched) {
      watched_rows_ += std::max<int64_t>(0, std::min(range.end, context) - range.first);
      watched_rows_attended_ +=
          std::distance(tokens.lower_bound(range.first), tokens.lower_bound(range.end));
    }
  }

  // A full row of a token that a stored prefix supplied was made from the stored one.
  static Form form_of(const Actor& actor, const AttendedRow& row) {
    if (!row.full) return Form::kStored;
    return row.token < actor.kv->reused_tokens() ? Form::kRestored : Form::kFull;
  }

  // Rule 1: a token that is neither sink nor in the ring was a candidate at the last selection.
  void check_visible(const Actor& actor, const HeadTask& task, const std::set<int64_t>& tokens) {
    const PolicyOptions& policy = actor.kv->policy();
    const HeadState& state = *task.head->state;
    const int64_t context = task.context_tokens;
    REQUIRE_THAT(state.has_label == 1);
    REQUIRE_THAT(state.label_length <= context);
    const auto wanted = [&](int64_t length) {  // of a set: k, and candidates
      const CandidateRange range = candidates(policy, length);
      return std::pair(set_size(policy, actor.num_visible(0, length)),
                       actor.num_visible(range.first, range.end));
    };
    REQUIRE_THAT(state.candidates_end == candidates(policy, state.label_length).end);
    const auto [k_then, candidates_then] = wanted(state.label_length);
    REQUIRE_THAT(state.num_set_tokens == std::min(k_then, candidates_then));
    if (policy.max_label_age > 0) {
      REQUIRE_THAT(context - state.label_length <= policy.max_label_age);
      REQUIRE_THAT(state.candidates_end >= std::min(context, context - task.head->ring_tokens));
    }
    // A set that can hold everything does, so that k >= context is dense attention.
    const auto [k, num_candidates] = wanted(context);
    if (k >= num_candidates) REQUIRE_THAT(std::ssize(tokens) == actor.num_visible(0, context));
    // A threshold above 1 is plain top-k where the true query decides.
    const bool true_query =
        policy.predict == Predict::kNone || policy.correction == Correction::kTrueQuery;
    if (policy.threshold && *policy.threshold > 1 && true_query) {
      REQUIRE_THAT(state.label_length == context);
    }
  }

  void check_output(const std::vector<float>& out) {
    const KvShape& shape = world_.shape;
    const int group = shape.group_size(), dim = shape.head_dim;
    for (size_t a = 0; a < actors_.size(); ++a) {
      for (int32_t h = 0; h < shape.num_kv_heads; ++h) {
        const Actor& actor = *actors_[a];
        const auto& tokens = seen_[a * static_cast<size_t>(shape.num_kv_heads) + h];
        std::vector<Row> rows;
        for (const auto& [t, form] : tokens) {
          rows.push_back(
              expected_row(world_, layer_, h, t, actor.tokens[static_cast<size_t>(t)], form));
        }
        for (int g = 0; g < group; ++g) {
          const float* query = actor.group_query(layer_, h) + g * dim;
          std::vector<double> sum(static_cast<size_t>(dim), 0.0);
          double total = 0;
          for (const Row& row : rows) {
            double dot = 0;
            for (int d = 0; d < dim; ++d) dot += static_cast<double>(query[d]) * row.key[d];
            const double weight = std::exp(dot * scale_);
            total += weight;
            for (int d = 0; d < dim; ++d) sum[d] += weight * row.value[d];
          }
          const float* found = out.data() + static_cast<int64_t>(a) * world_.q_width() +
                               (int64_t{h} * group + g) * dim;
          for (int d = 0; d < dim; ++d) {
            REQUIRE_THAT(std::abs(found[d] - sum[d] / total) < kAttentionError);
          }
        }
      }
    }
  }

  KvWorld& world_;
  std::vector<Actor*> actors_;
  float scale_;
  Attention attention_;
  int32_t layer_ = 0;
  int64_t num_steps_ = 0, num_checked_ = 0;
  int64_t watched_rows_ = 0, watched_rows_attended_ = 0;
  std::vector<std::map<int64_t, Form>> seen_;  // [task] tokens attended in the layer at hand
};

void check_counters(const KvWorld& world, const Actor& actor, int64_t steps) {
  const PolicyOptions& policy = actor.kv->policy();
  KvCounters total;
  for (const KvCounters& layer : actor.kv->layer_counters()) total += layer;
  RC_ASSERT(total.rows_fetched + total.rows_saved_by_delta == total.rows_requested);
  if (policy.fetch == Fetch::kWhole) RC_ASSERT(total.rows_saved_by_delta == 0);
  RC_ASSERT(total.rows_attended <= total.rows_in_context);
  const int64_t context = std::ssize(actor.tokens);
  int64_t in_context = 0;
  for (int64_t length = context - steps + 1; length <= context; ++length) {
    in_context += actor.num_visible(0, length);
  }
  RC_ASSERT(total.rows_in_context ==
            in_context * world.shape.num_layers * world.shape.num_kv_heads);
  RC_ASSERT(total.full_rows_attended <= total.rows_attended);
  RC_ASSERT((total.full_rows_attended > 0) == world.shape.compressed());
  const int64_t heads = int64_t{world.shape.num_layers} * world.shape.num_kv_heads;
  const int64_t evictable = heads - actor.kv->num_resident_heads();
  // Each evictable head decides once in each step.
  RC_ASSERT(total.hits + total.misses + total.aged + total.incomplete == evictable * steps);
  if (policy.select != Select::kExact) RC_ASSERT(total.oracle_rows == 0);
  if (policy.threshold && *policy.threshold > 1) RC_ASSERT(total.hits == 0);
  if (policy.max_label_age == 0) RC_ASSERT(total.aged == 0);
}

// None, or some runs of the prompt's tokens, never its last.
std::vector<TokenRange> arbitrary_mask(int64_t prompt) {
  std::vector<TokenRange> ranges;
  if (*rc::gen::inRange(0, 3) > 0) return ranges;
  for (int64_t t = *rc::gen::inRange<int64_t>(0, prompt); t + 1 < prompt;) {
    const int64_t end = *rc::gen::inRange<int64_t>(t + 1, prompt);
    ranges.push_back({t, end});
    t = end + *rc::gen::inRange<int64_t>(0, 20);
  }
  return ranges;
}

RC_GTEST_PROP(Decode, NoTokenBecomesInvisibleAndEachIsAttendedOnce, ()) {
  KvShape shape = arbitrary_small_shape();
  shape.num_layers = *rc::gen::inRange(1, 3);
  KvWorld world(shape, 40000000, 12);
  world.system.measure_mass = *rc::gen::element(false, false, true);
  const int64_t steps = *rc::gen::inRange<int64_t>(1, 40);
  std::vector<std::unique_ptr<Actor>> actors;
  std::vector<Actor*> batch;
  const int num_actors = *rc::gen::inRange(1, 4);
  for (int a = 0; a < num_actors; ++a) {
    const int64_t prompt = *rc::gen::element<int64_t>(1, 2, 5, 20, 70, 240, 257, 340);
    std::vector<int32_t> tokens(static_cast<size_t>(prompt), *rc::gen::inRange(0, 2));
    SequenceKv::Options options;
    options.policy = arbitrary_policy(shape, *rc::gen::element(true, true, false));
    options.capacity_tokens = prompt + steps;
    options.num_budget_heads = *rc::gen::inRange(0, 3);
    options.random_seed = static_cast<uint64_t>(a);
    const std::vector<TokenRange> masked = arbitrary_mask(prompt);
    options.masked = masked;
    options.host_copy = masked.empty();
    actors.push_back(
        std::make_unique<Actor>(world, options, std::move(tokens), static_cast<uint64_t>(a) + 1));
    RC_ASSERT(actors.back()->kv != nullptr);
    const int64_t watched = *rc::gen::inRange<int64_t>(0, prompt);
    if (masked.empty()) {
      actors.back()->kv->watched = {{watched / 3, watched}, {watched, prompt}};
    }
    batch.push_back(actors.back().get());
  }
  Simulation simulation(world, batch);
  const int64_t chunk = *rc::gen::element<int64_t>(1000, 100, 33);
  for (Actor* actor : batch) simulation.prefill(*actor, chunk);
  for (int64_t i = 0; i < steps; ++i) simulation.decode();
  RC_ASSERT(simulation.num_checked() == steps * num_actors * shape.num_layers * shape.num_kv_heads);
  KvCounters total;
  for (const auto& actor : actors) {
    check_counters(world, *actor, steps);
    for (const KvCounters& layer : actor->kv->layer_counters()) total += layer;
  }
  RC_ASSERT(total.watched_rows == simulation.watched_rows());
  RC_ASSERT(total.watched_rows_attended == simulation.watched_rows_attended());
}

PolicyOptions frozen_policy() {
  PolicyOptions policy;
  policy.threshold = -1;
  policy.max_label_age = 0;
  policy.sink = 2;
  policy.recent = 4;
  policy.persistent = PolicyOptions::Persistent::kPerLayer;
  return policy;
}

// k grows by steps of 64 rows: a set that lacked some candidates can come to have room for all.
TEST(Decode, ASetThatComesToCoverTheContextIsCompleted) {
  KvWorld world({1, 1, 1, 16, DType::kF32, 64}, 40000000, 4);
  SequenceKv::Options options;
  options.policy = frozen_policy();
  options.policy.kv_ratio = 0.9;
  options.policy.max_label_age = 20;
  options.capacity_tokens = 400;
  Actor actor(world, options, std::vector<int32_t>(355, 0), 1);
  Simulation simulation(world, {&actor});
  ASSERT_FALSE(covers(options.policy, 355));  // 320 of 349 candidates
  ASSERT_TRUE(covers(options.policy, 356));   // 384 slots for 350
  simulation.prefill(actor, 1000);
  simulation.decode();
  const KvCounters& counters = actor.kv->layer_counters()[0];
  EXPECT_EQ(counters.incomplete, 1);
  EXPECT_EQ(counters.rows_attended, 356);
}

// Threshold -1 freezes the set: nothing is fetched after priming, what is attended stays the same
// but for the ring, and the report says how little that is.
TEST(Decode, AThresholdOfMinusOneFreezesTheSet) {
  KvWorld world({1, 2, 1, 16, DType::kF32, 64}, 40000000, 4);
  SequenceKv::Options options;
  options.policy = frozen_policy();
  options.policy.set_tokens = 30;
  options.capacity_tokens = 200;
  Actor actor(world, options, std::vector<int32_t>(100, 0), 1);
  Simulation simulation(world, {&actor});
  simulation.prefill(actor, 1000);
  const HeadCacheView& head = actor.kv->head(0, 0);
  const std::vector<int32_t> primed(head.slot_token, head.slot_token + 30);
  for (int i = 0; i < 50; ++i) simulation.decode();
  EXPECT_TRUE(std::equal(primed.begin(), primed.end(), head.slot_token));
  const KvCounters& counters = actor.kv->layer_counters()[0];
  EXPECT_EQ(counters.hits, 50);
  EXPECT_EQ(counters.rows_fetched, 0);
  EXPECT_EQ(counters.rows_primed, 30);
  EXPECT_EQ(counters.rows_saved_by_hits, 50 * 30);
  EXPECT_EQ(counters.rows_attended, 50 * (2 + 30 + 4));
}

// A NaN query is a miss, chooses some set, and touches nobody else; the next step recovers.
TEST(Decode, ANaNQueryStaysWithItsSequence) {
  KvWorld world({1, 2, 1, 16, DType::kF32, 64}, 40000000, 4);
  SequenceKv::Options options;
  options.policy = frozen_policy();
  options.policy.set_tokens = 30;
  options.capacity_tokens = 200;
  Actor first(world, options, std::vector<int32_t>(100, 0), 1);
  Actor second(world, options, std::vector<int32_t>(90, 0), 2);
  {
    Simulation simulation(world, {&first, &second});
    simulation.prefill(first, 1000);
    simulation.prefill(second, 1000);
  }
  Attention attention(world.system, 0.25f);
  std::vector<SequenceKv*> batch = {first.kv.get(), second.kv.get()};
  const auto step = [&](float bad) {
    std::vector<float> queries = first.queries[0], rows;
    queries.insert(queries.end(), second.queries[0].begin(), second.queries[0].end());
    queries[3] += bad;
    for (int i = 0; i < 2; ++i) {
      const auto row = world.rows(0, 0, 500, i);
      rows.insert(rows.end(), row.begin(), row.end());
    }
    std::vector<float> out(queries.size());
    attention.begin_decode(batch);
    attention.append(0, rows.data(), rows.data(), world.kv_width());
    attention.attend(0, queries.data(), world.q_width(), out.data());
    attention.end();
    return out;
  };
  const auto broken = step(NAN);
  for (size_t i = 0; i < broken.size(); ++i) EXPECT_EQ(std::isnan(broken[i]), i < 16) << i;
  EXPECT_EQ(first.kv->layer_counters()[0].misses, 1);
  EXPECT_EQ(second.kv->layer_counters()[0].hits, 1);
  for (const float x : step(0)) EXPECT_FALSE(std::isnan(x));
  EXPECT_EQ(first.kv->layer_counters()[0].misses, 2);  // the label was NaN
  step(0);
  EXPECT_EQ(first.kv->layer_counters()[0].hits, 1);
}

// A sequence that finds its prompt's pages attends as one that computed them, bit for bit.
TEST(Decode, AReusedPrefixGivesTheSameBits) {
  for (const DType type : {DType::kF32, DType::kBF16}) {
    for (const auto persistent :
         {PolicyOptions::Persistent::kPerLayer, PolicyOptions::Persistent::kAll}) {
      KvWorld world({2, 4, 2, 16, type, 128}, 40000000, 12);
      SequenceKv::Options options;
      options.policy = frozen_policy();
      options.policy.threshold = 0.9;
      options.policy.set_tokens = 60;
      options.policy.persistent = persistent;
      options.capacity_tokens = 700;
      const std::vector<int32_t> prompt(600, 1);
      Actor first(world, options, prompt, 1);
      Simulation one(world, {&first});
      one.prefill(first, 256);  // the chunks that the second will see, so that sums agree
      first.kv->publish(prompt);
      Actor second(world, options, prompt, 1);
      EXPECT_EQ(first.kv->reused_tokens(), 0);
      EXPECT_EQ(second.kv->reused_tokens(), 512);
      one.prefill(second, 256);
      for (int32_t layer = 0; layer < 2; ++layer) {
        for (int32_t h = 0; h < 2; ++h) {
          const HeadCacheView& a = first.kv->head(layer, h);
          const HeadCacheView& b = second.kv->head(layer, h);
          EXPECT_TRUE(std::equal(a.slot_token, a.slot_token + a.slot_capacity, b.slot_token));
          for (int64_t t = 0; t < 600; ++t) {
            const std::byte* at = fixed_row(world.shape, a, t, 600);
            const std::byte* with = fixed_row(world.shape, b, t, 600);
            ASSERT_EQ(at == nullptr, with == nullptr);
            if (at == nullptr) continue;
            ASSERT_EQ(std::memcmp(at, with, static_cast<size_t>(world.shape.row_bytes())), 0);
          }
        }
      }
      EXPECT_GT(second.kv->layer_counters()[0].rows_restored, 0);
      // Both go on side by side; each is checked against its own rows.
      Simulation both(world, {&first, &second});
      for (int i = 0; i < 20; ++i) both.decode();
      EXPECT_EQ(first.kv->layer_counters()[1].hits, second.kv->layer_counters()[1].hits);
      EXPECT_EQ(first.kv->layer_counters()[1].rows_fetched,
                second.kv->layer_counters()[1].rows_fetched);
    }
  }
}

}  // namespace
}  // namespace clo
