// Every seed of the profile and gates fuzzers as a plain test: valid_* are accepted, bad_* refused,
// the rest (inputs that a fuzzer once found) only must not crash.
#include <gtest/gtest.h>

#include "fuzz/profile_model.h"
#include "fuzz/run_corpus.h"
#include "profile/gates.h"
#include "profile/profile_file.h"

namespace clo {
namespace {

TEST(Corpus, Profile) {
  run_corpus("profile", [](const std::string& content) {
    const auto file = SafetensorsFile::parse(std::as_bytes(std::span(content)), "corpus");
    // Whatever is wrong with a seed is wrong with the profile, not with the file that holds it.
    EXPECT_TRUE(file) << file.error().to_string();
    return file && read_profile(*file, profile_model());
  });
}

TEST(Corpus, Gates) {
  run_corpus("gates", [](const std::string& content) {
    const auto shape = static_cast<uint8_t>(content.at(0));
    return parse_gates(std::string_view(content).substr(1), 1 + shape % 3, 1 + shape / 3 % 3,
                       "corpus")
        .has_value();
  });
}

}  // namespace
}  // namespace clo
