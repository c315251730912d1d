#pragma once
// A conversation on standard input: lines go to the model, lines that begin with '/' are commands.
// Every turn sends the whole history; the engine keeps the rows of its full pages, so only what is
// new is computed. An answer that is stopped stays in the history as far as it came; a message that
// got no answer at all is forgotten.
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "clo/engine.h"

namespace clo::app {

class Chat {
 public:
  // Sends a request and shows its answer.
  using Ask = std::function<Result<Response>(Request)>;

  Chat(const Engine& engine, std::optional<std::string> system, bool quiet, Ask ask);

  // Until the end of input, or ctrl-C at the prompt. Fails: as the engine does, when it cannot go
  // on; a message that it refuses is said, and the conversation goes on without it.
  Result<int> run();

 private:
  Status answer(std::string line);
  void obey(const std::string& line);
  void reset();
  void show_stats() const;
  void save(const std::string& path) const;
  void note(const std::string& text) const;  // to standard error, unless it is to be quiet

  const Engine& engine_;
  const std::optional<std::string> system_;
  const bool quiet_;
  const Ask ask_;
  std::vector<Message> messages_;
  std::optional<Report> last_;
};

}  // namespace clo::app
