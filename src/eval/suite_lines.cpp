// Item records as JSON lines: what a run writes is what a resumed run reads.
#include <nlohmann/json.hpp>

#include "eval/suite_run.h"

namespace clo {

namespace {

struct Field {
  const char* name;
  int64_t KvCounters::*member;
};

constexpr Field kFields[] = {
    {"hits", &KvCounters::hits},
    {"misses", &KvCounters::misses},
    {"aged", &KvCounters::aged},
    {"incomplete", &KvCounters::incomplete},
    {"corrections", &KvCounters::corrections},
    {"rows_requested", &KvCounters::rows_requested},
    {"rows_fetched", &KvCounters::rows_fetched},
    {"rows_attended", &KvCounters::rows_attended},
    {"rows_in_context", &KvCounters::rows_in_context},
    {"mass_samples", &KvCounters::mass_samples},
    {"query_cosine_samples", &KvCounters::query_cosine_samples},
    {"gold_rows", &KvCounters::watched_rows},
    {"gold_rows_attended", &KvCounters::watched_rows_attended},
};

nlohmann::json result_json(const PolicyRecord& result) {
  nlohmann::json json = {{"score", result.score},
                         {"answer", result.answer},
                         {"steps", result.decode_steps},
                         {"row_bytes", result.row_bytes},
                         {"seconds", result.seconds},
                         {"mass_kept_sum", result.counters.mass_kept},
                         {"query_cosine_sum", result.counters.query_cosine}};
  for (const Field& field : kFields) json[field.name] = result.counters.*field.member;
  if (!result.layer_gold.empty()) json["gold_share_by_layer"] = result.layer_gold;
  if (result.sets) {
    json["sets"] = {{"overlap_sum", result.sets->overlap_sum},
                    {"overlaps", result.sets->overlaps},
                    {"modes_sum", result.sets->modes_sum},
                    {"modes", result.sets->modes}};
  }
  if (result.recitation) {
    json["recitation"] = {{"text", result.recitation->text},
                          {"sentences", result.recitation->sentences},
                          {"tokens", result.recitation->tokens},
                          {"exact", result.recitation->exact}};
  }
  return json;
}

PolicyRecord result_from(const nlohmann::json& json) {
  PolicyRecord result;
  result.score = json.at("score");
  result.answer = json.at("answer");
  result.decode_steps = json.at("steps");
  result.row_bytes = json.at("row_bytes");
  result.seconds = json.at("seconds");
  result.counters.mass_kept = json.at("mass_kept_sum");
  result.counters.query_cosine = json.at("query_cosine_sum");
  for (const Field& field : kFields) result.counters.*field.member = json.at(field.name);
  if (json.contains("gold_share_by_layer")) {
    result.layer_gold = json.at("gold_share_by_layer").get<std::vector<double>>();
  }
  if (json.contains("sets")) {
    const nlohmann::json& sets = json.at("sets");
    result.sets = SetFigures{sets.at("overlap_sum"), sets.at("overlaps"), sets.at("modes_sum"),
                             sets.at("modes")};
  }
  if (json.contains("recitation")) {
    const nlohmann::json& recitation = json.at("recitation");
    result.recitation = Recitation{recitation.at("text"), recitation.at("sentences"),
                                   recitation.at("tokens"), recitation.at("exact")};
  }
  return result;
}

}  // namespace

std::string to_line(const ItemRecord& record) {
  nlohmann::json json = {{"kind", "item"},
                         {"id", record.id},
                         {"task", record.task},
                         {"metric", record.metric},
                         {"context", record.context},
                         {"index", record.index},
                         {"seed", record.seed},
                         {"prompt_tokens", record.prompt_tokens},
                         {"gold_tokens", record.gold_tokens},
                         {"masked_tokens", record.masked_tokens},
                         {"answers", record.answers},
                         {"numbers", record.numbers},
                         {"labels", record.labels}};
  for (const auto& [name, result] : record.results) json["results"][name] = result_json(result);
  return json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

Result<ItemRecord> from_line(const std::string& line, const std::string& where) {
  try {
    const nlohmann::json json = nlohmann::json::parse(line);
    ItemRecord record;
    record.id = json.at("id");
    record.task = json.at("task");
    record.metric = json.at("metric");
    record.context = json.at("context");
    record.index = json.at("index");
    record.seed = json.at("seed");
    record.prompt_tokens = json.at("prompt_tokens");
    record.gold_tokens = json.at("gold_tokens");
    record.masked_tokens = json.at("masked_tokens");
    record.answers = json.at("answers").get<std::vector<std::string>>();
    record.numbers = json.at("numbers").get<std::map<std::string, double>>();
    record.labels = json.at("labels").get<std::map<std::string, std::string>>();
    for (const auto& [name, result] : json.at("results").items()) {
      record.results[name] = result_from(result);
    }
    record.results.at(kDenseName);
    return record;
  } catch (const std::exception& fault) {  // of the parser, or a missing field
    return Error{ErrorCode::kBadFile,
                 std::string("expected an item as this program writes it, found: ") + fault.what(),
                 where};
  }
}

}  // namespace clo
