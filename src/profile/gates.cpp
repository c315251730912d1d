#include "profile/gates.h"

#include <charconv>
#include <nlohmann/json.hpp>

#include "base/try.h"

namespace clo {

namespace {

Error bad_gates(const std::string& where, std::string message) {
  return {ErrorCode::kBadFile, std::move(message), where};
}

using Rows = std::vector<std::vector<double>>;

Result<Rows> rows_of_json(std::string_view text, const std::string& where) {
  const nlohmann::json value = nlohmann::json::parse(text, nullptr, false);
  const char* expected = "expected a JSON array of arrays of numbers, a layer each";
  if (!value.is_array()) return bad_gates(where, expected);
  Rows rows;
  for (const nlohmann::json& layer : value) {
    if (!layer.is_array()) return bad_gates(where, expected);
    rows.emplace_back();
    for (const nlohmann::json& gate : layer) {
      if (!gate.is_number()) return bad_gates(where, expected);
      rows.back().push_back(gate.get<double>());
    }
  }
  return rows;
}

Result<Rows> rows_of_lines(std::string_view text, const std::string& where) {
  Rows rows;
  int64_t line_number = 0;
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size());
    const std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    ++line_number;
    std::vector<double> row;
    for (size_t at = 0; at < line.size();) {
      if (line[at] == ' ' || line[at] == '\t' || line[at] == '\r') {
        ++at;
        continue;
      }
      double gate = 0;
      const auto [rest, fault] = std::from_chars(line.data() + at, line.data() + line.size(), gate);
      const auto next = static_cast<size_t>(rest - line.data());
      const bool ends =
          next == line.size() || line[next] == ' ' || line[next] == '\t' || line[next] == '\r';
      if (fault != std::errc() || !ends) {
        return bad_gates(where,
                         "expected numbers, parted by tabs or spaces, found something else "
                         "in line " +
                             std::to_string(line_number));
      }
      row.push_back(gate);
      at = next;
    }
    if (!row.empty()) rows.push_back(std::move(row));
  }
  return rows;
}

}  // namespace

Result<std::vector<float>> parse_gates(std::string_view text, int64_t num_layers,
                                       int64_t num_kv_heads, const std::string& where) {
  const size_t first = text.find_first_not_of(" \t\r\n");
  const bool is_json = first != std::string_view::npos && text[first] == '[';
  CLO_ASSIGN(const Rows rows, is_json ? rows_of_json(text, where) : rows_of_lines(text, where));
  const std::string expected = "expected gates of " + std::to_string(num_layers) + " layers with " +
                               std::to_string(num_kv_heads) +
                               " KV heads each, as the model has, found ";
  if (std::ssize(rows) != num_layers) {
    return bad_gates(where, expected + std::to_string(rows.size()) + " layers");
  }
  std::vector<float> gates;
  for (size_t layer = 0; layer < rows.size(); ++layer) {
    if (std::ssize(rows[layer]) != num_kv_heads) {
      return bad_gates(where, expected + std::to_string(rows[layer].size()) + " values for layer " +
                                  std::to_string(layer));
    }
    for (size_t head = 0; head < rows[layer].size(); ++head) {
      const double gate = rows[layer][head];
      if (!(gate >= 0 && gate <= 1)) {
        return bad_gates(where, "expected gates in [0, 1], found " + std::to_string(gate) +
                                    " for layer " + std::to_string(layer) + ", KV head " +
                                    std::to_string(head));
      }
      gates.push_back(static_cast<float>(gate));
    }
  }
  return gates;
}

}  // namespace clo
