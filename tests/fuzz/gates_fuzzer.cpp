// Any text as the gates of a small model, whose shape the first byte says: what is accepted has
// that shape and values in [0, 1], and means the same written as lines and as JSON.
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <random>
#include <string>
#include <string_view>

#include "base/check.h"
#include "json_mutation.h"
#include "profile/gates.h"

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

namespace {

// Nine digits tell every float from every other.
std::string as_text(const std::vector<float>& gates, int64_t heads, bool json) {
  std::string text = json ? "[" : "";
  for (size_t i = 0; i < gates.size(); ++i) {
    const bool first = static_cast<int64_t>(i) % heads == 0;
    const bool last = static_cast<int64_t>(i + 1) % heads == 0;
    char number[32];
    std::snprintf(number, sizeof number, "%.9g", static_cast<double>(gates[i]));
    if (json) {
      text += (first ? (i > 0 ? ",[" : "[") : ",") + std::string(number) + (last ? "]" : "");
    } else {
      text += std::string(number) + (last ? "\n" : "\t");
    }
  }
  return json ? text + "]" : text;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const int64_t layers = 1 + data[0] % 3, heads = 1 + data[0] / 3 % 3;
  const std::string_view text(reinterpret_cast<const char*>(data) + 1, size - 1);
  const auto gates = clo::parse_gates(text, layers, heads, "input");
  if (!gates) {
    CLO_CHECK(!gates.error().message.empty() && gates.error().where == "input");
    return 0;
  }
  CLO_CHECK(std::ssize(*gates) == layers * heads, gates->size());
  for (const float gate : *gates) CLO_CHECK(gate >= 0 && gate <= 1, gate);
  for (const bool json : {false, true}) {
    const auto again = clo::parse_gates(as_text(*gates, heads, json), layers, heads, "again");
    CLO_CHECK(again.has_value() && *again == *gates, json);
  }
  return 0;
}

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size,
                                          unsigned seed) {
  constexpr std::array<std::string_view, 7> kFragments = {"[0.5,0.25],", "[1],", "0.5,", "1e-3,",
                                                          "1e-400,",     "[],",  "null,"};
  std::minstd_rand random(seed);
  if (random() % 3 != 0) return LLVMFuzzerMutate(data, size, max_size);
  return clo::insert_json_fragment(data, 1, size, max_size, kFragments, random);
}
