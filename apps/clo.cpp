// clo: one program, several subcommands. Answers go to standard output, all else to standard error.
// Exit status: 0 done, 2 flags, 3 a bad file or request, 4 not enough memory, 5 device fault.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>
#include <iostream>
#include <string>
#include <vector>

#include "clo/engine.h"
#include "commands.h"
#include "flags.h"
#include "terminal.h"

namespace {

int fail(const clo::Error& error) {
  std::fflush(stdout);
  std::fprintf(stderr, "clo: %s\n", error.to_string().c_str());
  return clo::exit_status(error.code);
}

// What CLI11 found wrong, in the words of the other messages: the culprit first.
std::string describe_fault(const CLI::App& app, const CLI::ParseError& fault) {
  const CLI::App* command = &app;
  std::string path = "clo";
  while (!command->get_subcommands().empty()) {
    command = command->get_subcommands().front();
    path += " " + command->get_name();
  }
  const std::string advice = "; " + path + " --help shows what there is";
  const std::vector<std::string> unknown = command->remaining();
  std::string name = fault.what();
  name = name.substr(0, name.find_first_of(": "));
  if (!unknown.empty() && !dynamic_cast<const CLI::ValidationError*>(&fault)) {
    const bool is_flag = unknown.front().starts_with('-');
    std::string commands;
    for (const CLI::App* one : command->get_subcommands({})) {
      commands += (commands.empty() ? "; expected one of " : ", ") + one->get_name();
    }
    if (!is_flag && !commands.empty()) {
      return unknown.front() + ": no command of " + path + commands + advice;
    }
    return unknown.front() + ": no " + (is_flag ? "option" : "command or argument") + " of " +
           path + advice;
  }
  if (dynamic_cast<const CLI::RequiredError*>(&fault)) {
    return (name.starts_with('-') ? name + ": is required" : "a command is expected") + advice;
  }
  if (dynamic_cast<const CLI::ArgumentMismatch*>(&fault)) {
    const bool twice = std::string_view(fault.what()).find("At Most") != std::string::npos;
    return name + (twice ? ": is given more than once" : ": needs a value") + advice;
  }
  return fault.what();
}

}  // namespace

int main(int argc, char** argv) {
  clo::app::remember_command_line(argc, argv);
  CLI::App app{
      "CLO runs Llama-3, Qwen2.5 and Qwen3 models whose KV cache outgrows the GPU: the full cache "
      "lives in\nhost memory, the device keeps a small cache of it per head, and each step attends "
      "to the tokens\nthat matter.\n\nTry: clo demo -m models/recall-7m"};
  app.name("clo");
  app.set_version_flag("--version", "clo " + std::string(clo::version()));
  app.require_subcommand(1);
  app.footer(
      "Exit status: 0 done, 2 flags, 3 a bad file or request, 4 not enough memory, 5 device "
      "fault.\nclo COMMAND --help explains a command.");

  clo::app::Command command;
  const auto add = [&](const char* name, const char* help, auto add_flags) {
    CLI::App* subcommand = app.add_subcommand(name, help);
    const clo::app::Command run = add_flags(*subcommand);
    subcommand->callback([&command, run] { command = run; });
  };
  add("demo", "Ask a long document, densely and with a tenth of the KV, side by side",
      clo::app::add_demo);
  add("run", "Answer a prompt, questions about a document, or chat", clo::app::add_run);
  add("inspect", "Show a model: architecture, RoPE, tokenizer, and the memory plan",
      clo::app::add_inspect);
  add("profile", "Measure a model's heads on a text and train its hashes", clo::app::add_profile);
  add("eval", "Measure what a policy costs in answers", clo::app::add_eval);
  add("bench", "Measure speed", clo::app::add_bench);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);  // --help, --version
    return fail({clo::ErrorCode::kBadFlag, describe_fault(app, error), ""});
  }
  try {
    const clo::Result<int> status = command();
    std::cout.flush();
    if (!status) return fail(status.error());
    // A full disk must not look like an answer.
    if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0 || !std::cout) {
      return fail({clo::ErrorCode::kBadFile, "cannot be written", "standard output"});
    }
    return *status;
  } catch (const std::bad_alloc&) {
    return fail({clo::ErrorCode::kHostMemory, "out of memory", ""});
  } catch (const std::exception& error) {
    return fail({clo::ErrorCode::kBadRequest, error.what(), ""});
  }
}
