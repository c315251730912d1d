#include "clo/policy.h"

#include <cmath>
#include <cstdio>

namespace clo {

namespace {

PolicyOptions dense() {
  PolicyOptions p;
  p.preset = "dense";
  p.select = Select::kNone;
  p.dense_layers = -1;
  p.persistent = PolicyOptions::Persistent::kAll;
  return p;
}

PolicyOptions hata() {
  PolicyOptions p;
  p.preset = "hata";
  p.select = Select::kHash;
  p.threshold = 2.0;  // above 1: always choose again
  p.persistent = PolicyOptions::Persistent::kAll;
  return p;
}

PolicyOptions clo_paper() {
  PolicyOptions p;
  p.preset = "clo-paper";
  p.select = Select::kHash;
  p.predict = Predict::kPreviousLayer;
  p.correction = Correction::kNone;
  p.fetch = Fetch::kWhole;
  p.max_label_age = 0;
  return p;
}

Error bad_flag(std::string flag, std::string message) {
  return Error{ErrorCode::kBadFlag, std::move(message), std::move(flag)};
}

std::string number(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%g", value);
  return text;
}

}  // namespace

std::vector<std::string> preset_names() { return {"default", "clo-paper", "hata", "dense"}; }

Result<PolicyOptions> preset(std::string_view name) {
  if (name == "default") return PolicyOptions{};
  if (name == "clo-paper") return clo_paper();
  if (name == "hata") return hata();
  if (name == "dense") return dense();
  return bad_flag("--preset", "expected default, clo-paper, hata or dense, found \"" +
                                  std::string(name) + "\"");
}

Status validate(const PolicyOptions& p) {
  if (!(p.kv_ratio > 0 && p.kv_ratio <= 1)) {
    return bad_flag("--kv-ratio",
                    "expected a share above 0 and at most 1, found " + number(p.kv_ratio));
  }
  if (p.set_tokens < 0 || p.set_tokens > (int64_t{1} << 30)) {
    return bad_flag("--set-tokens", "expected a number of tokens from 1 to 2^30, found " +
                                        std::to_string(p.set_tokens));
  }
  if (p.sink < 0 || p.sink > 4096) {
    return bad_flag("--sink", "expected 0 to 4096, found " + std::to_string(p.sink));
  }
  if (p.recent < 1 || p.recent > (1 << 20)) {
    return bad_flag("--recent", "expected 1 to 1048576, found " + std::to_string(p.recent));
  }
  if (p.max_label_age < 0 || p.max_label_age > (1 << 20)) {
    return bad_flag("--max-label-age",
                    "expected 0 (no limit) to 1048576, found " + std::to_string(p.max_label_age));
  }
  if (p.threshold && std::isnan(*p.threshold)) {
    return bad_flag("--threshold", "expected a number, found nan");
  }
  if (!(p.eta >= -1 && p.eta <= 2)) {
    return bad_flag("--eta",
                    "expected -1 to 1 (above 1: always choose again), found " + number(p.eta));
  }
  if (!(p.importance_exponent > 0 && p.importance_exponent <= 100)) {
    return bad_flag("--importance-exponent", "expected a number above 0 and at most 100, found " +
                                                 number(p.importance_exponent));
  }
  if (p.dense_layers < -1) {
    return bad_flag("--dense-layers", "expected a number of layers, or -1 for all, found " +
                                          std::to_string(p.dense_layers));
  }
  if (p.persistent == PolicyOptions::Persistent::kPerLayer && p.persistent_per_layer < 0) {
    return bad_flag("--persistent-heads", "expected a count of at least 0, found " +
                                              std::to_string(p.persistent_per_layer));
  }
  if (!(p.prefetch_margin >= 0 && p.prefetch_margin <= 1)) {
    return bad_flag("--prefetch-margin",
                    "expected a share from 0 to 1, found " + number(p.prefetch_margin));
  }
  if (!(p.entropy_rise > 0)) {
    return bad_flag("--entropy-rise", "expected nats above 0, found " + number(p.entropy_rise));
  }
  if (!(p.drift_limit > 0)) {
    return bad_flag("--drift-limit", "expected nats above 0, found " + number(p.drift_limit));
  }
  if (p.quality && !(*p.quality > 0 && *p.quality < 1)) {
    return bad_flag("--quality",
                    "expected a share of the attention mass above 0 and below 1, such as 0.99; "
                    "found " +
                        number(*p.quality));
  }
  if (p.quality && p.select == Select::kNone) {
    return bad_flag("--quality and --select none",
                    "contradict each other: dense attention keeps all of the mass; drop one");
  }
  if (p.predict == Predict::kNone && p.correction == Correction::kTrueQuery) {
    return bad_flag("--correction true_query and --predict none",
                    "contradict each other: without a prediction the true query already decides; "
                    "drop one of them");
  }
  return Ok{};
}

std::string describe(const PolicyOptions& p) {
  std::string text = "--preset " + p.preset;
  const auto add = [&](const char* flag, const std::string& value) {
    text += std::string(" ") + flag + " " + value;
  };
  static constexpr const char* kSelect[] = {"none", "hash", "graded-hash", "exact", "random"};
  static constexpr const char* kAggregate[] = {"mean", "weighted", "all"};
  static constexpr const char* kPredict[] = {"auto", "none", "previous-layer", "previous-step"};
  add("--select", kSelect[static_cast<int>(p.select)]);
  if (p.select == Select::kNone) return text;
  if (p.set_tokens > 0) {
    add("--set-tokens", std::to_string(p.set_tokens));
  } else {
    add("--kv-ratio", number(p.kv_ratio));
  }
  if (p.threshold) {
    add("--threshold", number(*p.threshold));
  } else {
    add("--eta", number(p.eta));
    add("--importance-exponent", number(p.importance_exponent));
  }
  add("--aggregate", kAggregate[static_cast<int>(p.aggregate)]);
  add("--predict", kPredict[static_cast<int>(p.predict)]);
  static constexpr const char* kCorrection[] = {"auto", "none", "true_query"};
  add("--correction", kCorrection[static_cast<int>(p.correction)]);
  if (p.correction == Correction::kTrueQuery) add("--prefetch-margin", number(p.prefetch_margin));
  if (p.hit_test == HitTest::kEntropy) {
    add("--hit-test", "cosine+entropy");
    add("--entropy-rise", number(p.entropy_rise));
  } else if (p.hit_test == HitTest::kDrift) {
    add("--hit-test", "cosine+drift");
    add("--drift-limit", number(p.drift_limit));
  }
  if (p.quality) add("--quality", number(*p.quality));
  add("--fetch", p.fetch == Fetch::kWhole ? "whole" : "delta");
  add("--max-label-age", p.max_label_age == 0 ? "none" : std::to_string(p.max_label_age));
  add("--sink", std::to_string(p.sink));
  add("--recent", std::to_string(p.recent));
  add("--dense-layers", p.dense_layers < 0 ? "all" : std::to_string(p.dense_layers));
  switch (p.persistent) {
    case PolicyOptions::Persistent::kFillBudget:
      add("--persistent-heads", "fill");
      break;
    case PolicyOptions::Persistent::kAll:
      add("--persistent-heads", "all");
      break;
    case PolicyOptions::Persistent::kPerLayer:
      add("--persistent-heads", std::to_string(p.persistent_per_layer));
      break;
    case PolicyOptions::Persistent::kList: {
      std::string list;
      for (const auto& [layer, head] : p.persistent_heads) {
        list += (list.empty() ? "" : ",") + std::to_string(layer) + ":" + std::to_string(head);
      }
      add("--persistent-heads", list);
      break;
    }
  }
  return text;
}

}  // namespace clo
