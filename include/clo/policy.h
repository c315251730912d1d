#pragma once
// The policy of a request: which token rows a decode step attends to, when a set may be kept, and
// where rows live. Each field is one flag of the command line. A preset is a named set of them.
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "clo/result.h"

namespace clo {

// What chooses the set of a head.
enum class Select : uint8_t {
  kNone,        // no choice: every row is attended (dense)
  kHash,        // smallest Hamming distance between the codes of the queries and of the keys
  kGradedHash,  // the same keys' codes, asked by a query that says how much each bit matters
  kExact,   // largest true attention weight; reads every key, so an oracle and no way to save bytes
  kRandom,  // any rows: a control that must lose
};
// Whether it reads codes.
inline bool selects_by_code(Select select) {
  return select == Select::kHash || select == Select::kGradedHash;
}

// How the cosines of a group's query heads become one decision.
enum class Aggregate : uint8_t { kMean, kWeighted, kAll };

// Which query decides, selects and fetches.
enum class Predict : uint8_t {
  kAuto,           // none on the CPU; on a GPU the previous step, corrected by the true query
  kNone,           // this layer's own, on the critical path
  kPreviousLayer,  // this step's, foreseen from the input of the layer before
  kPreviousStep,   // the true query of the step before
};

enum class Correction : uint8_t {
  kAuto,  // the true query where the backend chose the prediction, none where it was asked for
  kNone,
  kTrueQuery,
};
// What else must hold, beside the cosine, for a set to be kept.
enum class HitTest : uint8_t {
  kCosine,   // nothing
  kEntropy,  // attention over the set has not become flatter than when the set was chosen
  kDrift,    // the scores of keys have not moved apart: the query's way times the keys' spread
};

enum class Fetch : uint8_t { kWhole, kDelta };

struct PolicyOptions {
  std::string preset = "default";
  Select select = Select::kGradedHash;
  double kv_ratio = 0.1;       // share of the context that is the set; at least 256 tokens
  int64_t set_tokens = 0;      // the set's size itself; 0: from kv_ratio
  int32_t sink = 4;            // first tokens, always attended
  int32_t recent = 64;         // latest tokens, always attended
  int32_t max_label_age = 64;  // steps a set may be kept; 0: no limit
  int32_t dense_layers = 0;    // first layers that keep and attend every row; -1: all

  // tau of a head with importance s: cos(s^p acos(eta) + (1 - s^p) pi). A plain threshold wins.
  std::optional<double> threshold;
  double eta = 0.90;
  double importance_exponent = 0.5;
  Aggregate aggregate = Aggregate::kWeighted;

  Predict predict = Predict::kAuto;
  Correction correction = Correction::kAuto;
  HitTest hit_test = HitTest::kCosine;
  double entropy_rise = 1.0;  // kEntropy: nats of min-entropy, -log of the largest weight
  double drift_limit = 1.0;   // kDrift: nats that a typical key's score may have moved

  // The dial: share of the attention mass to keep, by sampling it and moving set size, thresholds
  // and label age. Absent: they stay.
  std::optional<double> quality;

  // With a correction, a prediction chooses again this much earlier than the true query would: at
  // (1 - margin) of the angle that the threshold allows. Drift is then caught off the critical path
  // and only jumps are left for the true query.
  double prefetch_margin = 0.5;
  Fetch fetch = Fetch::kDelta;

  // Persistent heads keep all rows on the device and never fetch.
  enum class Persistent : uint8_t { kFillBudget, kPerLayer, kList, kAll };
  Persistent persistent = Persistent::kFillBudget;
  int32_t persistent_per_layer = 0;
  std::vector<std::pair<int32_t, int32_t>> persistent_heads;  // (layer, KV head)
};

// Fails: kBadFlag, naming the presets there are.
Result<PolicyOptions> preset(std::string_view name);
std::vector<std::string> preset_names();

// Fails: kBadFlag for values out of range and for options that contradict each other.
Status validate(const PolicyOptions& options);

// The flags that reproduce these options, for reports and --help.
std::string describe(const PolicyOptions& options);

}  // namespace clo
