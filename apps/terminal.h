#pragma once
// What a person sees beside the answer: progress, colours, and ctrl-C. All of it goes to standard
// error, and none of it when that is not a terminal.
#include <chrono>
#include <string>
#include <string_view>

#include "clo/engine.h"

namespace clo::app {

// The command as it was typed, for results that name how they were made.
void remember_command_line(int argc, char** argv);
const std::string& command_line();
// The processor, as /proc/cpuinfo names it; "unknown" without one.
std::string machine_name();
// Of the source that was built, as results name it.
const char* commit_name();
// Cores this process may run on.
int num_cpus();

bool stdin_is_terminal();
bool stderr_is_terminal();
// Bold, when standard output is a terminal and NO_COLOR is not set.
std::string bold(std::string_view text);
std::string coloured(std::string_view text, bool good);  // green or red

// Counts ctrl-C; the first ends the answer at hand, not the program.
void catch_interrupts();
bool interrupted();
void clear_interrupt();

// The next line of standard input without its newline; false at the end of input or at ctrl-C,
// whichever moment it comes at. Requires: catch_interrupts() was called, and std::cin is not used.
bool read_line(std::string& line);

// One line that is rewritten: what is done, and the time left.
class ProgressLine {
 public:
  explicit ProgressLine(bool enabled) : enabled_(enabled && stderr_is_terminal()) {}
  ~ProgressLine() { clear(); }
  void prefill(const Progress& progress);
  void items(std::string_view what, int64_t done, int64_t total);
  void clear();

 private:
  void show(const std::string& text);
  bool enabled_;
  bool shown_ = false;
  std::chrono::steady_clock::time_point started_ = std::chrono::steady_clock::now();
};

}  // namespace clo::app
