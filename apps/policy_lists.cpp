#include "policy_lists.h"

#include <CLI/CLI.hpp>
#include <cstdlib>

#include "base/try.h"
#include "text_files.h"

namespace clo::app {

namespace {

// A list and the flag that it would override. Fails: kBadFlag when both were given.
Status check_list(const std::string& list, const char* list_flag, bool given, const char* flag) {
  if (list.empty() || !given) return Ok{};
  return Error{ErrorCode::kBadFlag, "contradict each other: the list says which to run; drop one",
               std::string(list_flag) + " and " + flag};
}

}  // namespace

void PolicyLists::add_to(CLI::App& app) {
  app.add_option("--presets", presets,
                 "Several presets, such as default,hata (as --preset takes them here)");
  app.add_option("--selects", selects, "Several selections, such as exact,graded-hash,hash");
  app.add_option("--ratios", ratios, "Several set sizes, such as 0.1,0.05,0.02");
  app.add_option("--hit-tests", hit_tests, "Several hit tests, such as cosine,cosine+drift");
  app.add_option("--qualities", qualities, "Several qualities, such as none,0.95,0.99");
  policy.add_to(app);
}

Result<std::vector<NamedPolicy>> PolicyLists::resolve() const {
  CLO_TRY(check_list(presets, "--presets", policy.preset.has_value(), "--preset"));
  CLO_TRY(check_list(selects, "--selects", policy.select.has_value(), "--select"));
  CLO_TRY(check_list(ratios, "--ratios", policy.kv_ratio.has_value(), "--kv-ratio"));
  CLO_TRY(check_list(ratios, "--ratios", policy.set_tokens.has_value(), "--set-tokens"));
  CLO_TRY(check_list(hit_tests, "--hit-tests", policy.hit_test.has_value(), "--hit-test"));
  CLO_TRY(check_list(qualities, "--qualities", policy.quality.has_value(), "--quality"));
  // A policy so far, and what tables call it.
  struct Part {
    std::string name, preset;
    PolicyFlags flags;
  };
  std::vector<Part> parts;
  // --preset takes a list as well: one habit for one preset and for several.
  for (const std::string& name :
       split_list(presets.empty() ? policy.preset.value_or("default") : presets)) {
    parts.push_back({name, name, policy});
  }
  // Every part with every word of a list.
  const auto with_each = [&](const std::string& list, const auto& apply) -> Status {
    if (list.empty()) return Ok{};
    std::vector<Part> more;
    for (const Part& part : parts) {
      for (const std::string& word : split_list(list)) {
        Part one = part;
        one.name += " " + word;
        CLO_TRY(apply(one.flags, word));
        more.push_back(std::move(one));
      }
    }
    parts = std::move(more);
    return Ok{};
  };
  const auto number = [](const char* flag, const std::string& word,
                         std::optional<double>& target) -> Status {
    char* end = nullptr;
    target = std::strtod(word.c_str(), &end);
    if (end != word.c_str() && *end == '\0') return Ok{};
    return Error{ErrorCode::kBadFlag, "expected numbers, found \"" + word + "\"", flag};
  };
  CLO_TRY(with_each(selects, [](PolicyFlags& flags, const std::string& word) -> Status {
    flags.select = word;
    return Ok{};
  }));
  CLO_TRY(with_each(ratios, [&](PolicyFlags& flags, const std::string& word) {
    return number("--ratios", word, flags.kv_ratio);
  }));
  CLO_TRY(with_each(hit_tests, [](PolicyFlags& flags, const std::string& word) -> Status {
    flags.hit_test = word;
    return Ok{};
  }));
  CLO_TRY(with_each(qualities, [&](PolicyFlags& flags, const std::string& word) -> Status {
    if (word == "none") return Ok{};
    return number("--qualities", word, flags.quality);
  }));
  std::vector<NamedPolicy> policies;
  for (const Part& part : parts) {
    CLO_ASSIGN(PolicyOptions options, part.flags.resolve(part.preset));
    for (const NamedPolicy& other : policies) {
      if (other.name == part.name) {
        return Error{ErrorCode::kBadFlag, "\"" + part.name + "\" is named twice",
                     "--presets, --selects, --ratios, --hit-tests, --qualities"};
      }
    }
    policies.push_back({part.name, options});
  }
  return policies;
}

}  // namespace clo::app
