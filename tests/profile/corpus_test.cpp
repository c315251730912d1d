// Every seed of the profile and gates fuzzers as a plain test: valid_* are accepted, bad_* refused,
// the rest (inputs that a fuzzer once found) only must not crash.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "fuzz/profile_model.h"
#include "profile/gates.h"
#include "profile/profile_file.h"

namespace clo {
namespace {

namespace fs = std::filesystem;

// Calls `read` with each file's content; `read` says whether it was accepted.
template <typename Read>
void run_corpus(const std::string& target, const Read& read) {
  int num_files = 0;
  std::error_code fault;
  for (const auto& entry :
       fs::directory_iterator(fs::path(CLO_SOURCE_DIR "/tests/fuzz/corpus") / target, fault)) {
    std::ifstream file(entry.path(), std::ios::binary);
    std::stringstream content;
    content << file.rdbuf();
    const std::string name = entry.path().filename().string();
    const bool is_accepted = read(content.str());
    if (name.starts_with("valid_")) {
      EXPECT_TRUE(is_accepted) << name;
    }
    if (name.starts_with("bad_")) {
      EXPECT_FALSE(is_accepted) << name;
    }
    ++num_files;
  }
  EXPECT_GE(num_files, 5) << target << " " << fault.message();
}

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
