#include "clo/report.h"

#include <cstdio>
#include <nlohmann/json.hpp>

#include "base/units.h"
#include "engine/impl.h"
#include "select/set_rule.h"

namespace clo {

void Engine::Impl::fill_report(Sequence& sequence) {
  Report& r = sequence.response.report;
  const auto now = Clock::now();
  r.backend = runner->description() + (backend_note.empty() ? "" : "; " + backend_note);
  r.policy = describe(sequence.policy);
  r.prompt_tokens = sequence.prompt_tokens;
  r.new_tokens = std::ssize(sequence.response.tokens);
  r.kv_type = kv_type_name(shape);
  r.row_bytes = shape.stored_row_bytes();
  r.full_row_bytes = shape.row_bytes();
  r.num_heads = shape.num_layers * shape.num_kv_heads;
  r.decode_steps = sequence.decode_steps;
  if (sequence.state == Sequence::State::kQueued) {
    r.queue_seconds = seconds_since(sequence.submitted, now);
    return;
  }
  r.queue_seconds = seconds_since(sequence.submitted, sequence.admitted);
  const bool decoding = sequence.state == Sequence::State::kDecode;
  r.prefill_seconds = seconds_since(sequence.admitted, decoding ? sequence.prefilled : now);
  if (decoding) {
    r.first_token_seconds = seconds_since(sequence.submitted, sequence.first_token);
    r.decode_seconds = seconds_since(sequence.first_token, now);
    if (r.decode_steps > 0 && r.decode_seconds > 0) {
      r.decode_tokens_per_second = static_cast<double>(r.decode_steps) / r.decode_seconds;
    }
  }
  if (!sequence.kv) return;
  if (!fault) runner->read_counters(*sequence.kv);
  r.reused_tokens = sequence.kv->reused_tokens();
  r.masked_tokens = r.prompt_tokens - sequence.kv->num_visible(0, r.prompt_tokens);
  r.device_kv_bytes = sequence.kv->device_kv_bytes();
  r.host_kv_bytes = sequence.kv->host_kv_bytes();
  r.num_resident_heads = sequence.kv->num_resident_heads();
  r.num_demoted_heads = static_cast<int32_t>(sequence.kv->num_demoted_heads());
  r.num_swapped_heads = static_cast<int32_t>(sequence.kv->num_swapped_heads());
  r.resident_by_profile = !system->profile.difficulty.empty();
  r.mass_is_drawn = cuda != nullptr;
  if (selects_by_code(sequence.kv->policy().select)) r.hash_tokens = system->profile.hash_tokens;
  if (const Dial* dial = sequence.kv->dial()) {
    const MassEstimate e = dial->estimate();
    const DialSetting& s = dial->setting();
    r.quality = {dial->quality(), e.mean, e.low, e.high, e.samples, s.set_scale, s.angle};
  }
  const auto layers = sequence.kv->layer_counters();
  r.layers.assign(layers.begin(), layers.end());
  for (const KvCounters& layer : layers) r.total += layer;
  const KvCounters& t = r.total;
  const auto ratio = [](int64_t part, int64_t whole) {
    return whole == 0 ? 0.0 : static_cast<double>(part) / static_cast<double>(whole);
  };
  r.hit_rate = t.hit_rate();
  r.share_attended = t.rows_in_context == 0 ? 1 : ratio(t.rows_attended, t.rows_in_context);
  r.bytes_fetched_per_token = ratio(t.rows_fetched * r.row_bytes, r.decode_steps);
  r.bytes_attended_per_token =
      ratio(t.bytes_attended(r.row_bytes, r.full_row_bytes), r.decode_steps);
  r.wait_seconds_per_token = ratio(t.wait_ns, r.decode_steps) * 1e-9;
}

std::string report_text(const Report& r) {
  std::string out;
  const auto line = [&](const char* name, const std::string& value) {
    char text[64];
    std::snprintf(text, sizeof text, "  %-22s", name);
    out += text + value + "\n";
  };
  const auto fixed = [](double value, int decimals) {
    char text[48];
    std::snprintf(text, sizeof text, "%.*f", decimals, value);
    return std::string(text);
  };
  const auto percent = [&](double share) { return fixed(100 * share, 1) + " %"; };
  line("backend", r.backend);
  line("policy", r.policy);
  line("tokens",
       std::to_string(r.prompt_tokens) + " prompt (" + std::to_string(r.reused_tokens) + " reused" +
           (r.masked_tokens > 0 ? ", " + std::to_string(r.masked_tokens) + " masked" : "") + "), " +
           std::to_string(r.new_tokens) + " new");
  line("time to first token", fixed(r.first_token_seconds, 2) + " s");
  line("decode", fixed(r.decode_tokens_per_second, 1) + " tokens/s");
  line("KV rows", r.kv_type + ", " + std::to_string(r.row_bytes) + " bytes" +
                      (r.row_bytes == r.full_row_bytes
                           ? ""
                           : "; sink and recent " + std::to_string(r.full_row_bytes)));
  line("KV on the device", format_bytes(r.device_kv_bytes));
  line("KV in the host store", format_bytes(r.host_kv_bytes));
  line("bytes moved per token", format_bytes(static_cast<int64_t>(r.bytes_fetched_per_token)));
  line("waiting for rows", fixed(r.wait_seconds_per_token * 1e3, 3) + " ms per token");
  if (r.num_resident_heads == r.num_heads) {
    line("hit rate", "- (all " + std::to_string(r.num_heads) + " heads are resident)");
  } else {
    std::string resident;
    if (r.num_resident_heads > 0) {
      resident = " (" + std::to_string(r.num_resident_heads) + " of " +
                 std::to_string(r.num_heads) + " heads resident, chosen " +
                 (r.resident_by_profile ? "by profile" : "in layer order: no profile") +
                 (r.num_swapped_heads == 0 ? ")"
                                           : "; " + std::to_string(r.num_swapped_heads) +
                                                 " of them by the prompt's last queries)");
    }
    line("hit rate", percent(r.hit_rate) + resident);
  }
  if (r.num_demoted_heads > 0) {
    line("heads given up", std::to_string(r.num_demoted_heads) + ", for other requests");
  }
  line("share attended", percent(r.share_attended));
  if (const int64_t tokens = r.prompt_tokens + r.new_tokens;
      r.hash_tokens > 0 && tokens > r.hash_tokens) {
    line("hash weights", "trained on contexts of up to " + std::to_string(r.hash_tokens) +
                             " tokens, this one had " + std::to_string(tokens) +
                             ": a profile of longer windows would choose better");
  }
  if (r.total.mass_samples > 0) {
    line("attention mass kept",
         percent(r.total.mean_mass_kept()) + (r.mass_is_drawn ? " (by rows drawn)" : ""));
  }
  if (r.quality) {
    const QualityReport& q = *r.quality;
    line("quality",
         percent(q.wanted) + " wanted, " +
             (q.samples == 0
                  ? "not estimated: no step was sampled"
                  : percent(q.estimated) + " estimated (" + percent(q.low) + " to " +
                        percent(q.high) + ", " + std::to_string(q.samples) + " samples); sets x " +
                        fixed(q.set_scale, 2) + ", angle x " + fixed(q.angle, 2)));
    if (q.high < q.wanted && q.set_scale >= kMostSetScale) {
      line("", "sets are as large as slots allow: a larger --kv-ratio would keep more");
    }
  }
  return out;
}

namespace {

nlohmann::json counters_json(const KvCounters& c) {
  return {{"hits", c.hits},
          {"misses", c.misses},
          {"aged", c.aged},
          {"incomplete", c.incomplete},
          {"corrections", c.corrections},
          {"resident_selections", c.resident_selections},
          {"rows_requested", c.rows_requested},
          {"rows_fetched", c.rows_fetched},
          {"rows_saved_by_delta", c.rows_saved_by_delta},
          {"rows_saved_by_hits", c.rows_saved_by_hits},
          {"rows_primed", c.rows_primed},
          {"rows_restored", c.rows_restored},
          {"rows_offloaded", c.rows_offloaded},
          {"rows_attended", c.rows_attended},
          {"full_rows_attended", c.full_rows_attended},
          {"rows_in_context", c.rows_in_context},
          {"oracle_rows", c.oracle_rows},
          {"wait_ns", c.wait_ns}};
}

}  // namespace

std::string report_json(const Report& r) {
  nlohmann::json json = {{"backend", r.backend},
                         {"policy", r.policy},
                         {"prompt_tokens", r.prompt_tokens},
                         {"reused_tokens", r.reused_tokens},
                         {"new_tokens", r.new_tokens},
                         {"queue_seconds", r.queue_seconds},
                         {"prefill_seconds", r.prefill_seconds},
                         {"first_token_seconds", r.first_token_seconds},
                         {"decode_seconds", r.decode_seconds},
                         {"decode_steps", r.decode_steps},
                         {"decode_tokens_per_second", r.decode_tokens_per_second},
                         {"kv_type", r.kv_type},
                         {"row_bytes", r.row_bytes},
                         {"full_row_bytes", r.full_row_bytes},
                         {"device_kv_bytes", r.device_kv_bytes},
                         {"host_kv_bytes", r.host_kv_bytes},
                         {"bytes_fetched_per_token", r.bytes_fetched_per_token},
                         {"bytes_attended_per_token", r.bytes_attended_per_token},
                         {"wait_seconds_per_token", r.wait_seconds_per_token},
                         {"hit_rate", r.hit_rate},
                         {"share_attended", r.share_attended},
                         {"num_heads", r.num_heads},
                         {"num_resident_heads", r.num_resident_heads},
                         {"num_demoted_heads", r.num_demoted_heads},
                         {"resident_by_profile", r.resident_by_profile},
                         {"hash_tokens", r.hash_tokens},
                         {"num_swapped_heads", r.num_swapped_heads},
                         {"total", counters_json(r.total)}};
  if (r.masked_tokens > 0) json["masked_tokens"] = r.masked_tokens;
  if (r.total.mass_samples > 0) {
    json["mass_kept"] = r.total.mean_mass_kept();
    json["mass_is_drawn"] = r.mass_is_drawn;
  }
  if (r.quality) {
    const QualityReport& q = *r.quality;
    json["quality"] = {{"wanted", q.wanted}, {"estimated", q.estimated}, {"low", q.low},
                       {"high", q.high},     {"samples", q.samples},     {"set_scale", q.set_scale},
                       {"angle", q.angle}};
  }
  for (const KvCounters& layer : r.layers) json["layers"].push_back(counters_json(layer));
  return json.dump();
}

}  // namespace clo
