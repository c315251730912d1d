// clo: one program, several subcommands. Answers go to standard output, all else to standard error.
// Exit status: 0 done, 2 flags, 3 a bad file or request, 4 not enough memory, 5 device fault.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>

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

}  // namespace

int main(int argc, char** argv) {
  clo::app::remember_command_line(argc, argv);
  CLI::App app{
      "CLO runs Llama-3, Qwen2.5 and Qwen3 models whose KV cache outgrows the GPU: the full cache "
      "lives in\nhost memory, the device keeps a small cache of it per head, and each step attends "
      "to the tokens\nthat matter.\n\nTry: clo run -m models/recall-7m --context-file README.md "
      "--question \"What is the special magic number for amber-falcon?\""};
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
  add("eval", "Measure what a policy costs in answers", clo::app::add_eval);
  add("bench", "Measure speed", clo::app::add_bench);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    const int status = app.exit(error);
    return status == 0 ? 0 : 2;
  }
  try {
    const clo::Result<int> status = command();
    return status ? *status : fail(status.error());
  } catch (const std::bad_alloc&) {
    return fail({clo::ErrorCode::kHostMemory, "out of memory", ""});
  } catch (const std::exception& error) {
    return fail({clo::ErrorCode::kBadRequest, error.what(), ""});
  }
}
