#pragma once
// The seeds of the fuzzers as plain tests: valid_* are accepted, bad_* refused, the rest (inputs
// that a fuzzer once found) only must not crash.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

namespace clo {

// Calls `read` with each file's content; `read` says whether it was accepted.
template <typename Read>
void run_corpus(const std::string& target, const Read& read) {
  int num_files = 0;
  std::error_code fault;
  for (const auto& entry : std::filesystem::directory_iterator(
           std::filesystem::path(CLO_SOURCE_DIR "/tests/fuzz/corpus") / target, fault)) {
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

}  // namespace clo
