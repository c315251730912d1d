#pragma once
// The file of a long run: a line that says what was run, a line for each item as it is done, and
// summaries at the end. A run that was stopped, in whatever way, goes on where it stopped: finished
// items are read back, a line that was cut off is dropped.
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "eval/suite_run.h"

namespace clo::app {

class ResultLog {
 public:
  ResultLog() = default;
  ~ResultLog();
  ResultLog(const ResultLog&) = delete;
  ResultLog& operator=(const ResultLog&) = delete;

  // Opens `path` for a run that `run` describes; its field "identity" is what a resumed file must
  // agree with. `finished` gets the items that the file has. Nothing is opened for an empty path; a
  // device or pipe is only written to. Fails: kBadFile for a file of another run (naming what
  // differs), of something else, or damaged before its last line.
  Status open(const std::string& path, const nlohmann::ordered_json& run,
              std::vector<ItemRecord>& finished);
  // Appends a line, whole in the file when this returns. Fails: kBadFile.
  Status append(const std::string& line);

 private:
  std::string path_;
  int descriptor_ = -1;
};

}  // namespace clo::app
