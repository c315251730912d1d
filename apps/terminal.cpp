#include "terminal.h"

#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <fstream>

namespace clo::app {

namespace {

volatile std::sig_atomic_t interrupts = 0;
std::string typed_command;

// Written to by the handler: an interrupt that comes just before a read for the next line must end
// it too, and may be delivered to any thread.
int wake_pipe[2] = {-1, -1};
std::string unread;  // of standard input

void count_interrupt(int) {
  const int before = errno;
  interrupts = interrupts + 1;
  // Full: it wakes as it is.
  [[maybe_unused]] const ssize_t written = write(wake_pipe[1], "", 1);
  errno = before;
}

bool colours() {
  const char* no_color = std::getenv("NO_COLOR");
  return isatty(STDOUT_FILENO) != 0 && (no_color == nullptr || *no_color == '\0');
}

std::string duration(double seconds) {
  char text[32];
  if (seconds < 90) {
    std::snprintf(text, sizeof text, "%.0f s", seconds);
  } else {
    std::snprintf(text, sizeof text, "%.0f min", seconds / 60);
  }
  return text;
}

}  // namespace

void remember_command_line(int argc, char** argv) {
  typed_command = "clo";
  for (int i = 1; i < argc; ++i) {
    std::string word = argv[i];
    // Results travel: the folder they were written to says nothing to who reads them.
    const std::string before = argv[i - 1];
    if (before == "-o" || before == "--output") word = word.substr(word.find_last_of('/') + 1);
    const bool plain = !word.empty() && word.find_first_not_of(
                                            "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
                                            "0123456789-_=+./:,@%") == std::string::npos;
    typed_command += ' ';
    if (plain) {
      typed_command += word;
      continue;
    }
    // As a shell reads it back: single quotes, and a quote inside them closed and escaped.
    typed_command += '\'';
    for (const char c : word) typed_command += c == '\'' ? std::string("'\\''") : std::string(1, c);
    typed_command += '\'';
  }
}

const std::string& command_line() { return typed_command; }

const char* commit_name() { return CLO_COMMIT; }

int num_cpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) != 0) return 1;
  return CPU_COUNT(&set);
}

std::string machine_name() {
  std::ifstream cpus("/proc/cpuinfo");
  for (std::string line; std::getline(cpus, line);) {
    const size_t colon = line.find(": ");
    if (line.starts_with("model name") && colon != std::string::npos) return line.substr(colon + 2);
  }
  return "unknown";
}

bool stdin_is_terminal() { return isatty(STDIN_FILENO) != 0; }
bool stderr_is_terminal() { return isatty(STDERR_FILENO) != 0; }

std::string bold(std::string_view text) {
  return colours() ? "\033[1m" + std::string(text) + "\033[0m" : std::string(text);
}

std::string coloured(std::string_view text, bool good) {
  if (!colours()) return std::string(text);
  return (good ? "\033[32m" : "\033[31m") + std::string(text) + "\033[0m";
}

void catch_interrupts() {
  if (wake_pipe[0] < 0 && pipe2(wake_pipe, O_NONBLOCK | O_CLOEXEC) != 0) return;
  struct sigaction action = {};
  action.sa_handler = count_interrupt;
  action.sa_flags = SA_RESTART;
  sigaction(SIGINT, &action, nullptr);
}

bool interrupted() { return interrupts > 0; }
void clear_interrupt() {
  char bytes[64];
  while (read(wake_pipe[0], bytes, sizeof bytes) > 0) {
  }
  interrupts = 0;
}

bool read_line(std::string& line) {
  while (true) {
    if (const size_t end = unread.find('\n'); end != std::string::npos) {
      line = unread.substr(0, end);
      unread.erase(0, end + 1);
      return true;
    }
    pollfd sources[2] = {{STDIN_FILENO, POLLIN, 0}, {wake_pipe[0], POLLIN, 0}};
    if (poll(sources, 2, -1) < 0) {
      if (errno == EINTR) continue;
      return false;
    }
    if (sources[1].revents != 0) return false;
    char block[4096];
    const ssize_t count = read(STDIN_FILENO, block, sizeof block);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) {
      line = std::move(unread);
      unread.clear();
      return !line.empty();
    }
    unread.append(block, static_cast<size_t>(count));
  }
}

void ProgressLine::prefill(const Progress& progress) {
  // A chunk costs a part that is constant and one that grows with the context before it; about
  // 8,192 tokens is where they are equal for small models.
  const auto work = [](int64_t tokens) {
    const auto t = static_cast<double>(tokens);
    return t * (8192 + t);
  };
  const double left = progress.seconds *
                      (work(progress.prompt_tokens) - work(progress.done_tokens)) /
                      work(progress.done_tokens);
  show("reading the prompt: " + std::to_string(progress.done_tokens) + " of " +
       std::to_string(progress.prompt_tokens) + " tokens, " + duration(left) + " left");
  if (progress.done_tokens >= progress.prompt_tokens) clear();
}

void ProgressLine::items(std::string_view what, int64_t done, int64_t total) {
  const double elapsed =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - started_).count();
  std::string text =
      std::string(what) + ": " + std::to_string(done) + " of " + std::to_string(total);
  if (done > 0) {
    text += ", " +
            duration(elapsed / static_cast<double>(done) * static_cast<double>(total - done)) +
            " left";
  }
  show(text);
}

void ProgressLine::show(const std::string& text) {
  if (!enabled_) return;
  std::fprintf(stderr, "\r\033[K%s", text.c_str());
  std::fflush(stderr);
  shown_ = true;
}

void ProgressLine::clear() {
  if (shown_) std::fputs("\r\033[K", stderr);
  shown_ = false;
}

}  // namespace clo::app
