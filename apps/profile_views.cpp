#include "profile_views.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>

#include "base/try.h"
#include "base/units.h"
#include "flags.h"
#include "heat_map.h"
#include "text_files.h"

namespace clo::app {

namespace {

// The mean of a figure over some layers' or heads' values: count of them from `first` on, each
// `stride` apart.
double mean(const std::vector<float>& values, int64_t first, int64_t count, int64_t stride = 1) {
  double sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += values[static_cast<size_t>((first + i) * stride)];
  return count == 0 ? 0 : sum / static_cast<double>(count);
}

void print_row(const char* name, const Profile& profile, int64_t group, int64_t first,
               int64_t heads) {
  const HeadStatistics& s = profile.statistics;
  constexpr int64_t kFigures = int64_t{kMaxLag} * kNumSpread;
  const int64_t queries = first * group, count = heads * group;
  // Lag 16's mean stands kMaxLag - 1 lags behind lag 1's.
  const std::vector<float> last(s.cosine.begin() + (kMaxLag - 1) * kNumSpread, s.cosine.end());
  std::printf("%-7s %7.3f %7.3f %7.3f %7.3f %6.1f%% %7.3f %7.2f %6.2f %7.3f", name,
              mean(s.cosine, queries, count, kFigures), mean(last, queries, count, kFigures),
              mean(s.cosine_unrotated, queries, count, kFigures), mean(s.overlap, first, heads),
              100 * mean(s.new_on_miss, first, heads), mean(s.mass_outside, queries, count),
              mean(s.entropy, queries, count), mean(s.modes, queries, count),
              mean(profile.heads.difficulty, first, heads));
  if (!s.recall_trained.empty()) {
    std::printf(" %7.3f %7.3f %7.3f %7.3f %7.3f", mean(s.recall_random, first, heads),
                mean(s.recall_trained, first, heads), mean(s.recall_products, first, heads),
                mean(s.weight_random, first, heads), mean(s.weight_trained, first, heads));
  }
  std::printf("\n");
}

}  // namespace

void print_statistics(const Profile& profile, const KvShape& shape, bool per_head) {
  std::printf("\n");
  for (const auto& [name, value] : profile.facts) {
    std::printf("  %-18s%s\n", name.c_str(), value.c_str());
  }
  if (!profile.statistics.measured()) {
    std::printf("  no statistics: made before clo-profile-2, or by hand\n");
    return;
  }
  std::printf("\n%-7s %7s %7s %7s %7s %7s %7s %7s %6s %7s", "layer", "cos 1", "cos 16", "no rope",
              "overlap", "new", "outside", "entropy", "modes", "diffic");
  if (!profile.statistics.recall_trained.empty()) {
    std::printf(" %7s %7s %7s %7s %7s", "random", "trained", "product", "w rand", "w train");
  }
  std::printf("\n");
  const int64_t heads = shape.num_kv_heads, group = shape.group_size();
  for (int64_t layer = 0; layer < shape.num_layers; ++layer) {
    if (!per_head) {
      print_row(std::to_string(layer).c_str(), profile, group, layer * heads, heads);
      continue;
    }
    for (int64_t head = 0; head < heads; ++head) {
      const std::string name = std::to_string(layer) + ":" + std::to_string(head);
      print_row(name.c_str(), profile, group, layer * heads + head, 1);
    }
  }
  print_row("all", profile, group, 0, shape.num_layers * heads);
}

void PlanFlags::add_to(CLI::App& app) {
  const std::string group = "Plan: what the profile says of a machine";
  add_value(app, "--budget", budget, "Device memory for the KV of one sequence, such as 512MiB")
      ->type_name("SIZE")
      ->group(group);
  add_value(app, "--loss", loss,
            "Share of the exact sets, weighted by attention, that reuse may lose (0.05)")
      ->group(group);
  add_value(app, "--link", link, "Bytes per second from host to device (25GB)")
      ->type_name("SIZE")
      ->group(group);
  add_value(app, "--step-ms", step_ms, "Milliseconds that a decode step may take (10)")
      ->group(group);
}

Status PlanFlags::print(const Profile& profile, const KvShape& shape, const PolicyOptions& policy,
                        int64_t context_tokens) const {
  const auto size = [](const char* flag, const std::string& text) -> Result<int64_t> {
    auto bytes = parse_size(text);
    if (!bytes) return Error{ErrorCode::kBadFlag, bytes.error().message, flag};
    if (*bytes > 0) return *bytes;
    return Error{ErrorCode::kBadFlag, "expected a size above 0, found \"" + text + "\"", flag};
  };
  if (!(loss >= 0 && loss <= 1)) {
    return Error{ErrorCode::kBadFlag, "expected 0 to 1, found " + std::to_string(loss), "--loss"};
  }
  if (!(step_ms > 0)) {
    return Error{ErrorCode::kBadFlag, "expected more than 0, found " + std::to_string(step_ms),
                 "--step-ms"};
  }
  PlanRequest request;
  request.shape = shape;
  request.policy = policy;
  request.context_tokens = context_tokens;
  request.largest_loss = loss;
  request.step_seconds = step_ms / 1000;
  CLO_ASSIGN(const int64_t link_bytes, size("--link", link));
  request.link_bytes_per_second = static_cast<double>(link_bytes);
  if (budget) {
    CLO_ASSIGN(request.budget_bytes, size("--budget", *budget));
  } else {
    request.budget_bytes = int64_t{1} << 62;
    CLO_ASSIGN(const ResidencePlan everything, plan_residence(profile, request));
    request.budget_bytes = everything.least_bytes;
  }
  CLO_ASSIGN(const ResidencePlan plan, plan_residence(profile, request));

  const bool no_importance = profile.heads.importance.empty();
  std::printf("\n%6s %9s %8s %9s %9s %8s\n", "eta", "exponent", "hits", "set loss", "weighted",
              "fetched");
  for (size_t i = 0; i < plan.points.size(); ++i) {
    const ReusePoint& p = plan.points[i];
    // Without importance every exponent means the same, and the first is the one that is chosen.
    if (no_importance && p.exponent != kTriedExponents[0]) continue;
    std::printf("%6.2f %9.2f %7.1f%% %8.1f%% %8.1f%% %7.1f%%%s\n", p.eta, p.exponent,
                100 * p.hit_rate, 100 * p.set_loss, 100 * p.weighted_loss, 100 * p.fetched,
                i == plan.chosen ? "  <" : "");
  }
  const ReusePoint& chosen = plan.points[plan.chosen];
  const auto line = [](const char* name, const std::string& value) {
    std::printf("  %-24s%s\n", name, value.c_str());
  };
  char text[96];
  std::snprintf(text, sizeof text, "--eta %g", chosen.eta);
  std::string threshold = text;
  std::snprintf(text, sizeof text, " --importance-exponent %g", chosen.exponent);
  if (!no_importance) threshold += text;
  if (!plan.within_loss) threshold += " (none is within --loss: the least)";
  std::printf("\n");
  line("threshold", threshold);
  line("context", std::to_string(context_tokens) + " tokens, one sequence");
  line("device memory", format_bytes(plan.device_bytes) + " of " +
                            format_bytes(request.budget_bytes) + " (" +
                            format_bytes(plan.least_bytes) + " without persistent heads, " +
                            format_bytes(plan.most_bytes) + " with all)");
  std::string heads =
      std::to_string(plan.persistent.size()) + " of " + std::to_string(plan.num_heads);
  if (!plan.persistent.empty() && std::ssize(plan.persistent) < plan.num_heads) {
    heads += ": --persistent-heads ";
    for (size_t i = 0; i < plan.persistent.size(); ++i) {
      heads += (i == 0 ? "" : ",") + std::to_string(plan.persistent[i].layer) + ":" +
               std::to_string(plan.persistent[i].kv_head);
    }
  }
  line("persistent heads", heads);
  std::snprintf(text, sizeof text, "%.1f %%", 100 * plan.hit_rate);
  line("predicted hit rate",
       std::ssize(plan.persistent) == plan.num_heads ? "nothing fetches" : text);
  std::snprintf(text, sizeof text, "%s per step, %.3f ms over the link",
                format_bytes(static_cast<int64_t>(plan.bytes_per_step)).c_str(),
                1000 * plan.fetch_seconds);
  line("predicted fetches", text);
  line("binds", plan.binding == Binding::kNothing ? "nothing: every head is on the device"
                : plan.binding == Binding::kLink
                    ? "the link: fetches take longer than --step-ms"
                    : "device memory: the link would serve the heads that fetch in time");
  return Ok{};
}

Status write_heat_maps(const Profile& profile, const KvShape& shape, const std::string& prefix) {
  const HeadStatistics& s = profile.statistics;
  const int64_t layers = shape.num_layers, heads = shape.num_kv_heads, queries = shape.num_q_heads;
  std::vector<float> cosine;  // the mean at lag 1 of each query head
  for (size_t at = 0; at < s.cosine.size(); at += size_t{kMaxLag} * kNumSpread) {
    cosine.push_back(std::max(s.cosine[at], 0.0f));
  }
  const struct {
    const char* name;
    const char* title;
    const std::vector<float>& values;
    int64_t columns;
  } maps[] = {{"difficulty", "reuse difficulty", profile.heads.difficulty, heads},
              {"importance", "importance", profile.heads.importance, queries},
              {"cosine", "query cosine at lag 1", cosine, queries},
              {"overlap", "overlap of adjacent sets", s.overlap, heads},
              {"recall-random", "recall before training", s.recall_random, heads},
              {"recall-trained", "recall after training", s.recall_trained, heads}};
  for (const auto& map : maps) {
    if (map.values.empty()) continue;
    const HeatMap heat = {map.title, map.values, layers, map.columns, 0, 1};
    const std::string path = prefix + "-" + map.name;
    CLO_TRY(write_whole(path + ".svg", svg_of(heat)));
    CLO_TRY(write_whole(path + ".png", png_of(heat)));
  }
  return Ok{};
}

}  // namespace clo::app
