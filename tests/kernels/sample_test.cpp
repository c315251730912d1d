#include "kernels/sample/sample.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "engine/sampler.h"
#include "kernels/gpu_test.h"

namespace clo::kernels {
namespace {

class SampleTest : public GpuTest {};

// What a row asks for and what it has answered so far.
struct Row {
  SamplingOptions options;
  std::vector<int32_t> answer;
  bool has_slot = true;
  bool active = true;
  int32_t forced = -1;
};

struct Outcome {
  std::vector<StepResult> results;
  std::vector<BatchSlot> slots;
  std::vector<std::vector<int32_t>> answers;
  RefreshQueue queue;
  uint32_t step_word = 0;
  uint32_t fault_word = 0;
};

constexpr int64_t kFirstTokens = 1000;
constexpr uint32_t kStep = 77;

// One launch on [rows, vocab_size] logits. Row r is served by slot rows - 1 - r.
Outcome sample(std::span<const float> logits, int64_t vocab_size, std::span<const Row> rows,
               bool any_sampled, int32_t launches = 1) {
  const auto num_rows = static_cast<int32_t>(rows.size());
  std::vector<BatchSlot> slots(rows.size());
  std::vector<int32_t> row_slot, forced, answers;
  int64_t room = 0;
  for (const Row& row : rows) room = std::max(room, std::ssize(row.answer) + launches);
  answers.resize(static_cast<size_t>(num_rows * room));
  for (int32_t r = 0; r < num_rows; ++r) {
    const Row& row = rows[static_cast<size_t>(r)];
    const int32_t slot = num_rows - 1 - r;
    BatchSlot& s = slots[static_cast<size_t>(slot)];
    s.num_tokens = kFirstTokens + slot;
    s.num_answered = std::ssize(row.answer);
    s.active = row.active;
    s.sampling = {.temperature = row.options.temperature,
                  .top_p = row.options.top_p,
                  .min_p = row.options.min_p,
                  .repetition_penalty = row.options.repetition_penalty,
                  .top_k = row.options.top_k,
                  .seed = row.options.seed};
    row_slot.push_back(row.has_slot ? slot : -1);
    forced.push_back(row.forced);
    std::copy(row.answer.begin(), row.answer.end(), answers.begin() + slot * room);
  }
  std::vector<RefreshQueue> queue(1);
  queue[0].step = kStep;
  queue[0].fault = 2;
  queue[0].rings[kUrgent].tail = (uint64_t{1} << 32) + 5;
  queue[0].rings[kAhead].tail = 7;

  const DeviceArray<float> device_logits(logits);
  const DeviceArray<BatchSlot> device_slots(slots);
  const DeviceArray<int32_t> device_row_slot(row_slot), device_answers(answers);
  std::vector<int32_t*> pointers;
  for (int32_t s = 0; s < num_rows; ++s) pointers.push_back(device_answers.data() + s * room);
  const DeviceArray<int32_t*> device_pointers(pointers);
  const DeviceArray<RefreshQueue> device_queue(queue);
  const PinnedArray<int32_t> pinned_forced(num_rows);
  std::copy(forced.begin(), forced.end(), pinned_forced.data());
  const PinnedArray<StepResult> results(kResultRing * num_rows);
  const PinnedArray<uint32_t> words(3);
  const std::vector<std::byte> zeros(
      static_cast<size_t>(sample_scratch_bytes(num_rows, vocab_size)));
  const DeviceArray<std::byte> scratch(zeros);

  SampleRows params;
  params.tables.max_batch = num_rows;
  params.tables.slots = device_slots.data();
  params.tables.row_slot = device_row_slot.data();
  params.tables.queue = device_queue.data();
  params.logits = device_logits.data();
  params.vocab_size = vocab_size;
  params.rows = num_rows;
  params.answers = device_pointers.data();
  params.forced = pinned_forced.data();
  params.results = results.data();
  params.words = words.data();
  params.any_sampled = any_sampled;
  params.scratch = scratch.data();
  for (int32_t i = 0; i < launches; ++i) sample_rows(params, nullptr);
  CLO_CUDA(cudaDeviceSynchronize());

  EXPECT_EQ(scratch.download(), zeros);
  Outcome outcome;
  const StepResult* const own = results.data() + kStep % kResultRing * rows.size();
  outcome.results.assign(own, own + num_rows);
  outcome.slots = device_slots.download();
  const std::vector<int32_t> all = device_answers.download();
  for (int32_t s = 0; s < num_rows; ++s) {
    outcome.answers.emplace_back(
        all.begin() + s * room,
        all.begin() + s * room + outcome.slots[static_cast<size_t>(s)].num_answered);
  }
  outcome.queue = device_queue.download()[0];
  outcome.step_word = words.data()[0];
  outcome.fault_word = words.data()[1];
  EXPECT_EQ(words.data()[2], 12u);
  return outcome;
}

// Every row against the CPU sampler, and what the kernel counts and says.
void expect_matches_sampler(std::span<const float> logits, int64_t vocab_size,
                            std::span<const Row> rows, bool any_sampled) {
  const Outcome outcome = sample(logits, vocab_size, rows, any_sampled);
  for (size_t r = 0; r < rows.size(); ++r) {
    const Row& row = rows[r];
    const auto own =
        logits.subspan(r * static_cast<size_t>(vocab_size), static_cast<size_t>(vocab_size));
    const int32_t expected = Sampler(row.options).sample(own, row.answer);
    const BatchSlot& slot = outcome.slots[rows.size() - 1 - r];
    EXPECT_EQ(outcome.results[r].finite, 1);
    EXPECT_EQ(outcome.results[r].token, expected)
        << "vocabulary " << vocab_size << ", temperature " << row.options.temperature << ", top_k "
        << row.options.top_k << ", top_p " << row.options.top_p << ", min_p " << row.options.min_p
        << ", penalty " << row.options.repetition_penalty << ", seed " << row.options.seed;
    EXPECT_EQ(slot.token, outcome.results[r].token);
    EXPECT_EQ(slot.num_answered, std::ssize(row.answer) + 1);
    EXPECT_EQ(slot.num_tokens, kFirstTokens + std::ssize(rows) - 1 - static_cast<int64_t>(r) + 1);
    EXPECT_EQ(outcome.answers[rows.size() - 1 - r].back(), slot.token);
  }
  EXPECT_EQ(outcome.step_word, kStep);
  EXPECT_EQ(outcome.fault_word, 2u);
}

const int64_t kVocabs[] = {1, 2, 33, 4096, 4097, 50257};

TEST_F(SampleTest, GreedyTakesTheBest) {
  for (const int64_t vocab_size : kVocabs) {
    const std::vector<Row> rows(5);
    const std::vector<float> logits = random_floats(std::ssize(rows) * vocab_size, 1);
    expect_matches_sampler(logits, vocab_size, rows, false);
    expect_matches_sampler(logits, vocab_size, rows, true);
  }
}

TEST_F(SampleTest, GreedyTakesTheLowestIdOnTies) {
  for (const int64_t vocab_size : kVocabs) {
    const std::vector<Row> rows(4);
    std::vector<float> logits(rows.size() * static_cast<size_t>(vocab_size));
    std::mt19937 generator(3);
    for (size_t i = 0; i < logits.size(); ++i) {
      switch (i / static_cast<size_t>(vocab_size)) {
        case 0:
          logits[i] = 0;
          break;  // all equal
        case 1:
          logits[i] = generator() % 2 == 0 ? 0.0f : -0.0f;
          break;  // equal too
        case 2:
          logits[i] = -static_cast<float>(generator() % 3);
          break;  // best is 0
        default:
          logits[i] = -1 - static_cast<float>(generator() % 3);
          break;  // below zero
      }
    }
    expect_matches_sampler(logits, vocab_size, rows, false);
  }
}

TEST_F(SampleTest, GreedyOfManyRows) {
  constexpr int64_t kVocab = 152064;
  const std::vector<Row> rows(130);
  const std::vector<float> one = random_floats(kVocab + 130, 1);
  std::vector<float> logits;
  for (int64_t r = 0; r < std::ssize(rows); ++r) {
    logits.insert(logits.end(), one.begin() + r, one.begin() + r + kVocab);
  }
  expect_matches_sampler(logits, kVocab, rows, false);
}

TEST_F(SampleTest, RowThatIsNotFiniteHarmsNoOther) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  for (const bool any_sampled : {false, true}) {
    for (const int64_t vocab_size : {33, 50257}) {
      std::vector<Row> rows(6);
      if (any_sampled) {
        for (Row& row : rows) row.options.temperature = 1;
      }
      std::vector<float> logits = random_floats(std::ssize(rows) * vocab_size, 5);
      const auto v = static_cast<size_t>(vocab_size);
      logits[1 * v + v - 1] = NAN;
      logits[2 * v] = -NAN;
      logits[3 * v + v / 2] = kInf;
      logits[4 * v + 7] = -kInf;
      const Outcome outcome = sample(logits, vocab_size, rows, any_sampled);
      for (size_t r = 0; r < rows.size(); ++r) {
        const bool finite = r == 0 || r == 5;
        EXPECT_EQ(outcome.results[r].finite, finite ? 1 : 0) << r;
        const int32_t expected =
            finite ? Sampler(rows[r].options).sample(std::span(logits).subspan(r * v, v), {}) : 0;
        EXPECT_EQ(outcome.results[r].token, expected);
      }
    }
  }
}

TEST_F(SampleTest, RowWithoutAnActiveSlotChangesNothing) {
  constexpr int64_t kVocab = 4096;
  for (const bool any_sampled : {false, true}) {
    std::vector<Row> rows(3);
    rows[0].has_slot = false;
    rows[1].active = false;
    rows[1].options.temperature = 1;
    std::vector<float> logits = random_floats(3 * kVocab, 6);
    logits[5] = NAN;
    const Outcome outcome = sample(logits, kVocab, rows, any_sampled);
    for (size_t r = 0; r < 2; ++r) {
      EXPECT_EQ(outcome.results[r].finite, 1);
      EXPECT_EQ(outcome.results[r].token, 0);
      EXPECT_EQ(outcome.slots[2 - r].num_answered, 0);
      EXPECT_EQ(outcome.slots[2 - r].num_tokens, kFirstTokens + 2 - static_cast<int64_t>(r));
    }
    EXPECT_EQ(outcome.results[2].token,
              Sampler({}).sample(std::span(logits).subspan(2 * kVocab, kVocab), {}));
    EXPECT_EQ(outcome.step_word, kStep);
  }
}

TEST_F(SampleTest, ForcedTokenIsTakenInstead) {
  constexpr int64_t kVocab = 100;
  for (const bool any_sampled : {false, true}) {
    std::vector<Row> rows(3);
    rows[1].forced = 0;
    rows[2].forced = 99;
    rows[2].options.temperature = 1;
    const std::vector<float> logits = random_floats(3 * kVocab, 7);
    const Outcome outcome = sample(logits, kVocab, rows, any_sampled);
    EXPECT_EQ(outcome.results[0].token, Sampler({}).sample(std::span(logits).first(kVocab), {}));
    EXPECT_EQ(outcome.results[1].token, 0);
    EXPECT_EQ(outcome.results[2].token, 99);
    EXPECT_EQ(outcome.slots[0].token, 99);
    EXPECT_EQ(outcome.answers[0].back(), 99);
  }
}

// Launches follow each other on the same scratch: counters go on, draws differ by position.
TEST_F(SampleTest, StepsFollowEachOther) {
  constexpr int64_t kVocab = 4096;
  constexpr int32_t kSteps = 20;
  std::vector<Row> rows(2);
  rows[0].options = {.temperature = 1, .repetition_penalty = 1.2f, .seed = 5};
  const std::vector<float> logits = random_floats(2 * kVocab, 8);
  const Outcome outcome = sample(logits, kVocab, rows, true, kSteps);
  std::vector<int32_t> expected;
  for (int32_t i = 0; i < kSteps; ++i) {
    expected.push_back(Sampler(rows[0].options).sample(std::span(logits).first(kVocab), expected));
  }
  EXPECT_EQ(outcome.answers[1], expected);
  EXPECT_EQ(outcome.slots[1].num_tokens, kFirstTokens + 1 + kSteps);
}

TEST_F(SampleTest, PenaltyOfGreedyRows) {
  for (const int64_t vocab_size : kVocabs) {
    std::vector<Row> rows(8);
    std::mt19937 generator(9);
    for (size_t r = 0; r < rows.size(); ++r) {
      rows[r].options.repetition_penalty = r % 2 == 0 ? 3.0f : 0.5f;
      for (size_t i = 0; i < r * 300; ++i) {
        rows[r].answer.push_back(
            static_cast<int32_t>(generator() % static_cast<uint32_t>(vocab_size)));
      }
    }
    expect_matches_sampler(random_floats(std::ssize(rows) * vocab_size, 10), vocab_size, rows,
                           true);
  }
}

// All combinations of filters, several seeds each; some rows greedy among them.
TEST_F(SampleTest, DrawsAsTheCpuSampler) {
  for (const int64_t vocab_size : kVocabs) {
    for (const float spread : {0.01f, 2.0f, 40.0f}) {
      std::vector<Row> rows;
      std::mt19937_64 generator(11);
      for (const float temperature : {0.0f, 0.3f, 1.0f, 100.0f}) {
        for (const int32_t top_k : {0, 1, 40, 5000}) {
          for (const float top_p : {1.0f, 0.9f, 0.2f}) {
            for (const float min_p : {0.0f, 0.05f, 1.0f}) {
              Row row;
              row.options = {.temperature = temperature,
                             .top_k = top_k,
                             .top_p = top_p,
                             .min_p = min_p,
                             .repetition_penalty = generator() % 3 == 0 ? 1.3f : 1.0f,
                             .seed = generator()};
              row.answer.resize(generator() % 50);
              for (int32_t& id : row.answer) {
                id = static_cast<int32_t>(generator() % static_cast<uint64_t>(vocab_size));
              }
              rows.push_back(row);
            }
          }
        }
      }
      const std::vector<float> one = random_floats(vocab_size, 12, spread);
      std::vector<float> logits;
      for (size_t r = 0; r < rows.size(); ++r) logits.insert(logits.end(), one.begin(), one.end());
      expect_matches_sampler(logits, vocab_size, rows, true);
    }
  }
}

TEST_F(SampleTest, ManySeeds) {
  constexpr int64_t kVocab = 4096;
  std::vector<Row> rows(512);
  for (size_t r = 0; r < rows.size(); ++r) {
    rows[r].options = {.temperature = 0.8f, .top_p = 0.95f, .seed = r};
    rows[r].answer.resize(r % 7);
  }
  const std::vector<float> one = random_floats(kVocab, 13, 2);
  std::vector<float> logits;
  for (size_t r = 0; r < rows.size(); ++r) logits.insert(logits.end(), one.begin(), one.end());
  expect_matches_sampler(logits, kVocab, rows, true);
}

// Bins that are too full to sort: equal logits, few values, an outlier that spoils the range.
TEST_F(SampleTest, DrawsFromCrowdedBins) {
  constexpr int64_t kVocab = 50257;
  constexpr size_t kCopies = 8;
  std::vector<Row> rows;
  std::vector<float> logits;
  std::mt19937 generator(14);
  for (int kind = 0; kind < 4; ++kind) {
    std::vector<float> one = random_floats(kVocab, 15);
    for (float& value : one) {
      if (kind == 0) value = 1.5f;
      if (kind == 1) value = std::round(2 * value);
      if (kind == 2) value *= 1e-4f;
    }
    if (kind == 2) one[7] = -1e30f;
    if (kind == 3) std::fill(one.begin() + 100, one.end(), -1e9f);
    for (size_t i = 0; i < kCopies; ++i) {
      Row row;
      row.options = {.temperature = i % 2 == 0 ? 1.0f : 50.0f,
                     .top_k = i % 4 == 3 ? 20000 : 0,
                     .top_p = i % 4 == 2 ? 0.7f : 1.0f,
                     .seed = generator()};
      rows.push_back(row);
      logits.insert(logits.end(), one.begin(), one.end());
    }
  }
  expect_matches_sampler(logits, kVocab, rows, true);
}

TEST_F(SampleTest, LargestVocabularies) {
  for (const int64_t vocab_size : {152064, 262144}) {
    std::vector<Row> rows(12);
    std::mt19937 generator(16);
    for (size_t r = 0; r < rows.size(); ++r) {
      rows[r].options = {.temperature = 1,
                         .top_k = r % 3 == 1 ? 1000 : 0,
                         .top_p = r % 2 == 1 ? 0.9f : 1.0f,
                         .repetition_penalty = 1.1f,
                         .seed = generator()};
      for (int i = 0; i < 3000; ++i) {
        rows[r].answer.push_back(
            static_cast<int32_t>(generator() % static_cast<uint32_t>(vocab_size)));
      }
    }
    expect_matches_sampler(random_floats(std::ssize(rows) * vocab_size, 17, 4), vocab_size, rows,
                           true);
  }
}

}  // namespace
}  // namespace clo::kernels
