#include "chat.h"

#include <cstdio>
#include <iostream>
#include <nlohmann/json.hpp>

#include "base/try.h"
#include "base/units.h"
#include "base/utf8.h"
#include "terminal.h"
#include "text_files.h"

namespace clo::app {

namespace {

constexpr const char* kHelp =
    "  /reset       forget the history (the system message stays)\n"
    "  /stats       the report of the last answer, and the memory in use\n"
    "  /save FILE   write the conversation: a JSON array of {\"role\", \"content\"}\n"
    "  /help        these lines\n"
    "  ctrl-C       stops an answer; at the prompt it ends the program, as ctrl-D does\n"
    "A message that begins with '/' is sent with a space before it.\n";

// What the engine refuses about one request; other requests are served all the same.
bool is_about_the_request(ErrorCode code) {
  return code == ErrorCode::kTooLong || code == ErrorCode::kBadRequest ||
         code == ErrorCode::kDeviceMemory || code == ErrorCode::kHostMemory;
}

std::string count_text(size_t messages) {
  return std::to_string(messages) + (messages == 1 ? " message" : " messages");
}

void say(const Error& error) { std::cerr << "clo: " << error.to_string() << '\n'; }

}  // namespace

Chat::Chat(const Engine& engine, std::optional<std::string> system, bool quiet, Ask ask)
    : engine_(engine), system_(std::move(system)), quiet_(quiet), ask_(std::move(ask)) {
  reset();
}

Result<int> Chat::run() {
  const bool prompt = stderr_is_terminal() && !quiet_;
  if (prompt) {
    std::cerr << "Type a message; /help lists commands, ctrl-C stops an answer, ctrl-D ends.\n";
  }
  while (true) {
    if (prompt) std::cerr << "> " << std::flush;
    std::string line;
    if (!read_line(line)) {
      if (prompt) std::cerr << '\n';  // what follows begins a line of its own
      return 0;
    }
    if (line.ends_with('\r')) line.pop_back();
    if (line.empty()) continue;
    if (find_invalid_utf8(line) != line.size()) {
      std::cerr << "clo: the line is not valid UTF-8; it was not sent\n";
    } else if (line.front() == '/') {
      obey(line);
    } else {
      CLO_TRY(answer(std::move(line)));
      clear_interrupt();  // it was for this answer
    }
  }
}

Status Chat::answer(std::string line) {
  messages_.push_back({"user", std::move(line)});
  Request request;
  request.messages = messages_;
  auto response = ask_(std::move(request));
  if (!response) {
    if (!is_about_the_request(response.error().code)) return std::move(response).error();
    say(response.error());
    messages_.pop_back();
    note(response.error().code == ErrorCode::kTooLong && last_
             ? "the message was not sent; /reset forgets the history and makes room"
             : "the message was not sent");
    return Ok{};
  }
  last_ = std::move(response->report);
  const bool stopped = response->finish == FinishReason::kCancelled;
  if (stopped && response->text.empty()) {
    messages_.pop_back();
    note("stopped before the answer began: the message is forgotten");
    return Ok{};
  }
  if (stopped) note("stopped: what came so far stays in the history");
  messages_.push_back({"assistant", std::move(response->text)});
  return Ok{};
}

void Chat::obey(const std::string& line) {
  const size_t end = line.find(' ');
  const std::string command = line.substr(0, end);
  std::string argument;
  if (end != std::string::npos) {
    const size_t first = line.find_first_not_of(' ', end), last = line.find_last_not_of(' ');
    if (first != std::string::npos) argument = line.substr(first, last - first + 1);
  }
  if (command == "/save") {
    save(argument);
  } else if (!argument.empty() &&
             (command == "/reset" || command == "/stats" || command == "/help")) {
    std::cerr << "clo: " << command << " takes nothing after it, found \"" << argument << "\"\n";
  } else if (command == "/reset") {
    reset();
    note("the history is forgotten");
  } else if (command == "/stats") {
    show_stats();
  } else if (command == "/help") {
    std::cerr << kHelp;
  } else {
    std::cerr << "clo: " << command
              << " is not a command (/help lists them); to send the line as a message, put a space "
                 "before it\n";
  }
}

void Chat::reset() {
  messages_.clear();
  last_.reset();
  if (system_) messages_.push_back({"system", *system_});
}

void Chat::show_stats() const {
  const auto line = [](const char* name, const std::string& value) {
    std::fprintf(stderr, "  %-22s%s\n", name, value.c_str());
  };
  line("history", count_text(messages_.size()));
  if (last_) {
    std::cerr << report_text(*last_);
  } else {
    line("last answer", "none yet");
  }
  const Engine::MemoryUse use = engine_.memory();
  line("device memory", format_bytes(use.device_used_bytes) + " in use, " +
                            format_bytes(use.device_peak_bytes) + " at most so far, of " +
                            format_bytes(use.device_budget_bytes));
  line("host store",
       format_bytes(use.host_used_bytes) + " in use, of " + format_bytes(use.host_budget_bytes));
}

void Chat::save(const std::string& path) const {
  if (path.empty()) {
    std::cerr << "clo: /save needs the name of a file\n";
    return;
  }
  nlohmann::ordered_json all = nlohmann::ordered_json::array();
  for (const Message& message : messages_) {
    all.push_back({{"role", message.role}, {"content", message.content}});
  }
  const Status written =
      write_whole(path, all.dump(1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
  if (!written) {
    say(written.error());
    return;
  }
  note("wrote " + count_text(messages_.size()) + " to " + path);
}

void Chat::note(const std::string& text) const {
  if (!quiet_) std::cerr << text << '\n';
}

}  // namespace clo::app
