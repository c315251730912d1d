#include "profile/measure.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <iterator>
#include <memory>
#include <numeric>

#include "base/check.h"
#include "base/try.h"
#include "select/hash_signs.h"
#include "select/set_rule.h"

namespace clo {

namespace {

float mean_of(std::span<const float> values) {
  const double sum = std::accumulate(values.begin(), values.end(), 0.0);
  return values.empty() ? 0.0f : static_cast<float>(sum / static_cast<double>(values.size()));
}

// Mean over all windows' steps of one query head's figure, [group_size, num_steps] in each.
float mean_figure(std::span<const HeadAttention> attention, int32_t group, int32_t head,
                  std::vector<float> HeadAttention::*figure) {
  std::vector<float> all;
  for (const HeadAttention& window : attention) {
    const std::vector<float>& values = window.*figure;
    const auto steps = std::ssize(values) / group;
    all.insert(all.end(), values.begin() + head * steps, values.begin() + (head + 1) * steps);
  }
  return mean_of(all);
}

// Makes room for every figure, so that heads can be written from several threads.
void make_room(Profile& profile, const KvShape& shape, const MeasureOptions& options) {
  const auto heads = static_cast<size_t>(shape.num_layers) * shape.num_kv_heads;
  profile.heads.importance.resize(static_cast<size_t>(shape.num_layers) * shape.num_q_heads);
  profile.heads.difficulty.resize(heads);
  if (options.training) {
    profile.code_bits = options.training->bits;
    profile.heads.hash_weights.resize(
        heads * static_cast<size_t>(hash_weight_count(shape.head_dim, options.training->bits)));
  }
  for (const ProfileField& field : statistics_fields(profile.statistics, shape)) {
    if (is_of_hash(field) && !options.training) continue;
    const int64_t count =
        std::accumulate(field.shape.begin(), field.shape.end(), int64_t{1}, std::multiplies<>());
    field.values->resize(static_cast<size_t>(count));
  }
}

// Everything that is measured of one KV head.
class HeadMeasurement {
 public:
  HeadMeasurement(const KvShape& shape, std::span<const WindowTrace> traces,
                  const MeasureOptions& options, int32_t layer, int32_t kv_head, Profile& profile)
      : shape_(shape),
        head_{shape.group_size(), shape.head_dim},
        options_(options),
        layer_(layer),
        kv_head_(kv_head),
        first_query_(size_t(layer) * shape.num_q_heads + size_t(kv_head) * shape.group_size()),
        index_(size_t(layer) * shape.num_kv_heads + kv_head),
        profile_(profile),
        runs_(traces[0].num_runs()) {
    const float scale = 1 / std::sqrt(static_cast<float>(shape.head_dim));
    for (const WindowTrace& trace : traces) {
      CLO_CHECK(trace.num_runs() == runs_, trace.num_runs(), runs_);
      for (int64_t run = 0; run < runs_; ++run) {
        windows_.push_back(trace.head(layer, kv_head, run));
        attention_.push_back(measure_attention(head_, windows_.back(), options.policy, scale));
      }
    }
  }

  void measure_queries(std::span<const float> inverse_frequencies);
  void measure_reuse();
  // The random projection, from which training sets out, and the samples it is given.
  void begin_training(const HashSigns& signs);
  TrainingHead training_head() const { return {samples_.train, random_}; }
  const HeadShape& head_shape() const { return head_; }
  // Trains on this thread.
  std::vector<float> train(const std::function<bool()>& keep_going) const;
  // Recall of the random projection and of `trained`, and which of them is kept.
  void judge(std::vector<float> trained);

 private:
  const KvShape& shape_;
  HeadShape head_;
  const MeasureOptions& options_;
  int32_t layer_, kv_head_;
  size_t first_query_, index_;  // of the group's first query head and of the KV head
  Profile& profile_;
  int64_t runs_;                     // of a window
  std::vector<HeadWindow> windows_;  // runs of each window, one window after another
  std::vector<HeadAttention> attention_;
  SampleSplit samples_;        // of training
  std::vector<float> random_;  // [head_dim + 1, bits]
};

void HeadMeasurement::measure_queries(std::span<const float> inverse_frequencies) {
  HeadStatistics& s = profile_.statistics;
  constexpr size_t kFigures = size_t{kMaxLag} * kNumSpread;
  for (int32_t g = 0; g < head_.group_size; ++g) {
    const size_t q = first_query_ + g;
    for (const bool rotated : {true, false}) {
      const auto lags = query_cosines(head_, windows_, g,
                                      rotated ? std::span<const float>() : inverse_frequencies);
      float* out = (rotated ? s.cosine : s.cosine_unrotated).data() + q * kFigures;
      for (const auto& lag : lags) out = std::copy(lag.begin(), lag.end(), out);
    }
    s.mass_outside[q] = mean_figure(attention_, head_.group_size, g, &HeadAttention::outside);
    s.entropy[q] = mean_figure(attention_, head_.group_size, g, &HeadAttention::entropy);
    s.modes[q] = mean_figure(attention_, head_.group_size, g, &HeadAttention::modes);
    switch (options_.importance) {
      case Importance::kMass:
        profile_.heads.importance[q] = s.mass_outside[q];
        break;
      case Importance::kGates:
        profile_.heads.importance[q] = options_.gates[index_];
        break;
      case Importance::kNone:
        profile_.heads.importance[q] = 1;
        break;
    }
  }
}

void HeadMeasurement::measure_reuse() {
  HeadStatistics& s = profile_.statistics;
  const std::span<const float> importance =
      std::span(profile_.heads.importance)
          .subspan(first_query_, static_cast<size_t>(head_.group_size));
  profile_.heads.difficulty[index_] =
      static_cast<float>(reuse_difficulty(head_, windows_, options_.policy, importance));
  s.overlap[index_] = static_cast<float>(adjacent_overlap(attention_));
  s.new_on_miss[index_] = static_cast<float>(
      try_reuse(head_, windows_, attention_, options_.policy, importance).new_on_miss);
  size_t at = index_ * kNumTrials;
  for (const double eta : kTriedEtas) {
    for (const double exponent : kTriedExponents) {
      PolicyOptions policy = options_.policy;
      policy.threshold.reset();
      policy.eta = eta;
      policy.importance_exponent = exponent;
      const ReuseTrial trial = try_reuse(head_, windows_, attention_, policy, importance);
      s.trial_hit_rate[at] = static_cast<float>(trial.hit_rate);
      s.trial_set_loss[at] = static_cast<float>(trial.set_loss);
      s.trial_fetched[at] = static_cast<float>(trial.fetched);
      ++at;
    }
  }
}

void HeadMeasurement::begin_training(const HashSigns& signs) {
  samples_ = split_samples(windows_, attention_, runs_);
  random_ = projection_matrix(signs.params(layer_, kv_head_));
}

std::vector<float> HeadMeasurement::train(const std::function<bool()>& keep_going) const {
  HashTraining training = *options_.training;
  training.keep_going = keep_going;
  return train_hash(head_, samples_.train, options_.policy, random_, training);
}

void HeadMeasurement::judge(std::vector<float> trained) {
  const int32_t bits = options_.training->bits;
  const std::span<const HeadSample> held_out = samples_.held_out;
  const Recall products = product_recall(head_, held_out, options_.policy);
  const Recall before = hash_recall(head_, held_out, options_.policy, random_, bits);
  Recall after = hash_recall(head_, held_out, options_.policy, trained, bits);
  // A head that training does not help keeps the codes it has without a profile.
  if (!(after.tokens > before.tokens)) {
    after = before;
    trained = std::move(random_);
  }
  HeadStatistics& s = profile_.statistics;
  s.recall_products[index_] = static_cast<float>(products.tokens);
  s.recall_random[index_] = static_cast<float>(before.tokens);
  s.recall_trained[index_] = static_cast<float>(after.tokens);
  s.weight_products[index_] = static_cast<float>(products.weight);
  s.weight_random[index_] = static_cast<float>(before.weight);
  s.weight_trained[index_] = static_cast<float>(after.weight);
  std::copy(trained.begin(), trained.end(),
            profile_.heads.hash_weights.begin() + static_cast<int64_t>(index_ * trained.size()));
}

}  // namespace

SampleSplit split_samples(std::span<const HeadWindow> windows,
                          std::span<const HeadAttention> attention, int64_t runs) {
  SampleSplit split;
  if (windows.size() == 1) {
    const int64_t steps = windows[0].num_steps, middle = std::max<int64_t>(1, steps * 3 / 4);
    const int64_t after = std::min(middle + kMaxLag, steps);
    split.train.push_back({windows[0], &attention[0], 0, middle});
    split.held_out.push_back({windows[0], &attention[0], after, steps});
    return split;
  }
  // What is held out as one: a window with all its runs, or a run of a single window.
  const auto of_one = static_cast<size_t>(std::ssize(windows) > runs ? runs : 1);
  const size_t count = windows.size() / of_one;
  for (size_t w = 0; w < windows.size(); ++w) {
    const size_t one = w / of_one;
    const bool held = count < 4 ? one + 1 == count : one % 4 == 3;
    (held ? split.held_out : split.train)
        .push_back({windows[w], &attention[w], 0, windows[w].num_steps});
  }
  return split;
}

namespace {

// Heads of a model, one by one or in groups.
class HeadsMeasurement {
 public:
  HeadsMeasurement(const KvShape& shape, const RopeConfig& rope,
                   std::span<const WindowTrace> traces, const MeasureOptions& options,
                   ThreadPool& pool, const MeasureCalls& calls)
      : shape_(shape),
        traces_(traces),
        options_(options),
        pool_(pool),
        calls_(calls),
        frequencies_(rope_inverse_frequencies(rope, shape.head_dim)),
        heads_(int64_t{shape.num_layers} * shape.num_kv_heads) {
    make_room(profile_, shape, options);
    KvShape hashed = shape;
    hashed.code_bits = options.training ? options.training->bits : 0;
    signs_ = std::make_unique<HashSigns>(hashed, kHashSeed);
  }

  // Each head is measured and trained on one thread.
  void run_heads();
  // Groups of heads are measured, trained on the device and judged together.
  Status run_groups(DeviceTraining& device);

  bool stopped() const { return stopped_; }
  Profile take() { return std::move(profile_); }

 private:
  std::unique_ptr<HeadMeasurement> measure(int64_t head);
  bool keep_going() {
    if (!stopped_ && calls_.keep_going && !calls_.keep_going()) stopped_ = true;
    return !stopped_;
  }

  const KvShape& shape_;
  std::span<const WindowTrace> traces_;
  const MeasureOptions& options_;
  ThreadPool& pool_;
  const MeasureCalls& calls_;
  std::vector<float> frequencies_;
  int64_t heads_;
  std::unique_ptr<HashSigns> signs_;
  Profile profile_;
  std::atomic<bool> stopped_{false};
};

std::unique_ptr<HeadMeasurement> HeadsMeasurement::measure(int64_t head) {
  auto one = std::make_unique<HeadMeasurement>(
      shape_, traces_, options_, static_cast<int32_t>(head / shape_.num_kv_heads),
      static_cast<int32_t>(head % shape_.num_kv_heads), profile_);
  one->measure_queries(frequencies_);
  one->measure_reuse();
  if (options_.training) one->begin_training(*signs_);
  return one;
}

void HeadsMeasurement::run_heads() {
  std::atomic<int64_t> done{0};
  pool_.run(heads_, [&](int64_t head, int thread) {
    if (!keep_going()) return;
    const std::unique_ptr<HeadMeasurement> one = measure(head);
    if (options_.training) one->judge(one->train(calls_.keep_going));
    (void)keep_going();
    const int64_t now = ++done;
    if (thread == 0 && calls_.on_progress) calls_.on_progress(now, heads_);
  });
}

Status HeadsMeasurement::run_groups(DeviceTraining& device) {
  HashTraining training = *options_.training;
  training.keep_going = calls_.keep_going;
  // What is kept of measured heads is bounded by the group, and a group keeps all threads busy.
  int64_t size = std::max<int64_t>(64, pool_.num_threads());
  for (int64_t first = 0; first < heads_;) {
    size = std::min(size, heads_ - first);
    std::vector<std::unique_ptr<HeadMeasurement>> group(static_cast<size_t>(size));
    pool_.run(size, [&](int64_t i, int) {
      if (keep_going()) group[static_cast<size_t>(i)] = measure(first + i);
    });
    if (stopped_) return Ok{};
    const HeadShape head_shape = group[0]->head_shape();
    CLO_ASSIGN(const int64_t fit,
               device.heads_at_once(head_shape, group[0]->training_head().samples, options_.policy,
                                    training.bits));
    std::vector<std::vector<float>> trained;
    for (int64_t from = 0; from < size; from += fit) {
      std::vector<TrainingHead> heads;
      for (int64_t i = from; i < std::min(from + fit, size); ++i) {
        heads.push_back(group[static_cast<size_t>(i)]->training_head());
      }
      CLO_ASSIGN(std::vector<std::vector<float>> some,
                 device.train(head_shape, heads, options_.policy, training, pool_));
      std::move(some.begin(), some.end(), std::back_inserter(trained));
      if (!keep_going()) return Ok{};
    }
    pool_.run(size, [&](int64_t i, int) {
      if (!keep_going()) return;
      group[static_cast<size_t>(i)]->judge(std::move(trained[static_cast<size_t>(i)]));
    });
    first += size;
    if (calls_.on_progress) calls_.on_progress(first, heads_);
  }
  return Ok{};
}

}  // namespace

Result<Profile> measure_heads(const KvShape& shape, const RopeConfig& rope,
                              std::span<const WindowTrace> traces, const MeasureOptions& options,
                              ThreadPool& pool, const MeasureCalls& calls) {
  CLO_CHECK(!traces.empty());
  HeadsMeasurement all(shape, rope, traces, options, pool, calls);
  if (options.device != nullptr) {
    CLO_CHECK(options.training && options.training->recipe == HashRecipe::kBoundary);
    CLO_TRY(all.run_groups(*options.device));
  } else {
    all.run_heads();
  }
  if (all.stopped()) return Error{ErrorCode::kCancelled, "stopped: no profile was made", ""};
  Profile profile = all.take();
  if (options.importance == Importance::kNone) profile.heads.importance.clear();
  return profile;
}

}  // namespace clo
