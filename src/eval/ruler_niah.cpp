// RULER's eight needle tasks: facts of a key and a value in noise, prose or other needles.
#include <algorithm>
#include <cmath>
#include <set>

#include "eval/prose.h"
#include "eval/suites.h"
#include "eval/text_pieces.h"

namespace clo {

namespace {

enum class Haystack : uint8_t { kNoise, kProse, kNeedles };
enum class Form : uint8_t { kWords, kNumber, kUuid };

struct NeedleTask {
  std::string_view name;
  Haystack haystack;
  Form key, value;
  int num_keys, values_per_key, num_queried;
};

constexpr NeedleTask kTasks[] = {
    {"niah_single_1", Haystack::kNoise, Form::kWords, Form::kNumber, 1, 1, 1},
    {"niah_single_2", Haystack::kProse, Form::kWords, Form::kNumber, 1, 1, 1},
    {"niah_single_3", Haystack::kProse, Form::kWords, Form::kUuid, 1, 1, 1},
    {"niah_multikey_1", Haystack::kProse, Form::kWords, Form::kNumber, 4, 1, 1},
    {"niah_multikey_2", Haystack::kNeedles, Form::kWords, Form::kNumber, 1, 1, 1},
    {"niah_multikey_3", Haystack::kNeedles, Form::kUuid, Form::kUuid, 1, 1, 1},
    {"niah_multivalue", Haystack::kProse, Form::kWords, Form::kNumber, 1, 4, 1},
    {"niah_multiquery", Haystack::kProse, Form::kWords, Form::kNumber, 4, 1, 4},
};

std::string draw(Form form, ItemRandom& random) {
  switch (form) {
    case Form::kWords:
      return word_pair(random);
    case Form::kNumber:
      return digits(random, 7);
    case Form::kUuid:
      return uuid4(random);
  }
  return "";
}

std::string noun(Form form) { return form == Form::kUuid ? "uuid" : "number"; }

std::string needle(const NeedleTask& task, const std::string& key, const std::string& value) {
  return "The special magic " + noun(task.value) + " for " + key + " is: " + value + ".";
}

struct Needles {
  std::vector<std::string> keys;                 // the queried ones come first
  std::vector<std::vector<std::string>> values;  // of each key
  std::vector<Piece> lines;                      // shuffled
};

Needles draw_needles(const NeedleTask& task, ItemRandom& random) {
  Needles needles;
  std::set<std::string> taken;
  const auto fresh = [&](Form form) {
    for (;;) {
      std::string text = draw(form, random);
      if (taken.insert(text).second) return text;
    }
  };
  for (int k = 0; k < task.num_keys; ++k) {
    needles.keys.push_back(fresh(task.key));
    auto& values = needles.values.emplace_back();
    for (int v = 0; v < task.values_per_key; ++v) {
      values.push_back(fresh(task.value));
      needles.lines.push_back(
          {needle(task, needles.keys.back(), values.back()), k < task.num_queried});
    }
  }
  shuffle(needles.lines, random);
  return needles;
}

// Needles at some of 40 depths evenly spaced from 0 to 100, as whole percents.
std::vector<Piece> in_prose(std::vector<Piece> needles, int64_t sentences, uint64_t filler_seed,
                            ItemRandom& random) {
  ItemRandom filler(filler_seed);
  std::vector<Piece> pieces;
  for (int64_t i = 0; i < sentences; ++i) pieces.push_back({prose_sentence(filler), false});
  const std::vector<int64_t> steps = distinct_below(std::ssize(needles), 40, random);
  for (size_t i = needles.size(); i-- > 0;) {
    const auto percent =
        static_cast<int64_t>(std::lround(static_cast<double>(steps[i]) * 100 / 39));
    pieces.insert(pieces.begin() + percent * sentences / 100, needles[i]);
  }
  return pieces;
}

std::vector<Piece> in_lines(const NeedleTask& task, const Needles& needles, int64_t lines,
                            uint64_t filler_seed, ItemRandom& random) {
  ItemRandom filler(filler_seed);
  std::vector<Piece> pieces;
  while (std::ssize(pieces) < lines) {
    if (task.haystack == Haystack::kNoise) {
      pieces.push_back({std::string(noise_line()), false});
      continue;
    }
    std::string key = draw(task.key, filler), value = draw(task.value, filler);
    const bool taken =
        std::find(needles.keys.begin(), needles.keys.end(), key) != needles.keys.end();
    if (!taken) pieces.push_back({needle(task, key, value), false});
  }
  const int64_t count = std::ssize(needles.lines);
  const std::vector<int64_t> places = distinct_below(count, std::max(count, lines), random);
  for (size_t i = places.size(); i-- > 0;) {
    pieces.insert(pieces.begin() + std::min(places[i], lines), needles.lines[i]);
  }
  return pieces;
}

}  // namespace

Result<EvalItem> make_ruler_niah(const SuiteRequest& request) {
  const NeedleTask& task = *std::find_if(std::begin(kTasks), std::end(kTasks),
                                         [&](const auto& t) { return t.name == request.task; });
  return request.fit([&](int64_t units) {
    EvalItem item = request.start();
    ItemRandom random(item.seed);
    const Needles needles = draw_needles(task, random);
    const uint64_t filler_seed = random.next();
    const bool one = task.num_queried * task.values_per_key == 1;
    const std::string kind = "special magic " + noun(task.value) + (one ? "" : "s");
    item.text = one ? "A " + kind +
                          " is hidden in the following text. Keep it in mind: you will "
                          "be asked for it.\n"
                    : "Some " + kind +
                          " are hidden in the following text. Keep them in mind: you "
                          "will be asked for them.\n";
    if (task.haystack == Haystack::kProse) {
      append_pieces(item, in_prose(needles.lines, units, filler_seed, random), " ");
    } else {
      append_pieces(item, in_lines(task, needles, units, filler_seed, random), "\n");
    }
    std::vector<std::string> queried(needles.keys.begin(), needles.keys.begin() + task.num_queried);
    const std::string keys = joined_with_and(queried);
    item.text += one ? "\nWhat is the " + kind + " for " + keys + "?"
                     : "\nWhat are all the " + kind + " for " + keys + "?";
    item.answer_prefix = "The " + kind + " for " + keys + (one ? " is:" : " are:");
    for (int k = 0; k < task.num_queried; ++k) {
      const auto& values = needles.values[static_cast<size_t>(k)];
      item.answers.insert(item.answers.end(), values.begin(), values.end());
    }
    if (one) {
      item.numbers["depth"] =
          static_cast<double>(item.gold.front().begin) / static_cast<double>(item.text.size());
    }
    return item;
  });
}

}  // namespace clo
