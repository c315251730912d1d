// clo run: one prompt, several questions about one document, or a conversation.
#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>

#include "base/try.h"
#include "base/utf8.h"
#include "chat.h"
#include "commands.h"
#include "engine/sampler.h"
#include "flags.h"
#include "io/model_files.h"
#include "terminal.h"
#include "text_files.h"

namespace clo::app {

namespace {

struct RunFlags {
  EngineFlags engine;
  PolicyFlags policy;
  std::optional<std::string> prompt, file, context_file, system;
  std::vector<std::string> questions, stop;
  bool chat = false, raw = false, json = false, quiet = false, ignore_eos = false;
  int64_t max_new_tokens = 256;
  std::optional<float> temperature, top_p, min_p, repetition_penalty;
  std::optional<int32_t> top_k;
  std::optional<uint64_t> seed;

  std::optional<SamplingOptions> sampling() const {
    if (!temperature && !top_p && !min_p && !repetition_penalty && !top_k && !seed) {
      return std::nullopt;
    }
    SamplingOptions s;
    // A sampling flag without a temperature means sampling at 1, not a silent argmax.
    const bool samples = top_p || min_p || top_k || seed;
    s.temperature = temperature.value_or(samples ? 1.0f : 0.0f);
    s.top_p = top_p.value_or(1.0f);
    s.min_p = min_p.value_or(0.0f);
    s.top_k = top_k.value_or(0);
    s.repetition_penalty = repetition_penalty.value_or(1.0f);
    s.seed = seed.value_or(0);
    return s;
  }
};

Error contradiction(const std::string& flags, const std::string& why) {
  return Error{ErrorCode::kBadFlag, "contradict each other: " + why, flags};
}

// Text of the command line goes to the tokenizer as it is.
Status check_text(const char* flag, const std::string& text) {
  const size_t invalid = find_invalid_utf8(text);
  if (invalid != text.size()) {
    return Error{ErrorCode::kBadFlag,
                 "expected UTF-8 text, found an invalid byte at offset " + std::to_string(invalid),
                 flag};
  }
  if (text.empty()) return Error{ErrorCode::kBadFlag, "is empty", flag};
  return Ok{};
}

Status check_flags(const RunFlags& f) {
  const int sources = f.prompt.has_value() + f.file.has_value() + f.context_file.has_value();
  if (sources > 1) {
    return contradiction(f.prompt && f.file ? "--prompt and --file"
                         : f.prompt         ? "--prompt and --context-file"
                                            : "--file and --context-file",
                         "give the prompt once");
  }
  if (!f.questions.empty() && !f.context_file) {
    return Error{ErrorCode::kBadFlag, "needs --context-file: the document it is about",
                 "--question"};
  }
  if (f.context_file && f.questions.empty()) {
    return Error{ErrorCode::kBadFlag, "needs at least one --question", "--context-file"};
  }
  if (f.chat && f.raw) {
    return contradiction("--chat and --raw", "a conversation needs the template");
  }
  if (f.chat && f.json) return contradiction("--chat and --json", "a conversation is for people");
  if (f.chat && sources > 0) {
    return contradiction(std::string("--chat and ") + (f.prompt ? "--prompt"
                                                       : f.file ? "--file"
                                                                : "--context-file"),
                         "a conversation reads its lines from standard input");
  }
  if (f.raw && f.system) {
    return contradiction("--raw and --system", "a raw prompt has no turns");
  }
  if (f.max_new_tokens < 1) {
    return Error{ErrorCode::kBadFlag,
                 "expected at least 1, found " + std::to_string(f.max_new_tokens),
                 "--max-new-tokens"};
  }
  if (f.prompt) CLO_TRY(check_text("--prompt", *f.prompt));
  if (f.system) CLO_TRY(check_text("--system", *f.system));
  for (const std::string& question : f.questions) CLO_TRY(check_text("--question", question));
  for (const std::string& stop : f.stop) CLO_TRY(check_text("--stop", stop));
  if (const auto sampling = f.sampling()) CLO_TRY(validate(*sampling));
  return Ok{};
}

class Runner {
 public:
  Runner(const RunFlags& flags, Engine& engine, bool raw, double load_seconds)
      : flags_(flags), engine_(engine), raw_(raw), load_seconds_(load_seconds) {}

  // Asks, streams the answer to standard output, and prints the report.
  Result<Response> ask(Request request, const std::string& question) {
    request.max_new_tokens = flags_.max_new_tokens;
    request.ignore_eos = flags_.ignore_eos;
    request.sampling = flags_.sampling();
    request.stop = flags_.stop;
    ProgressLine progress(!flags_.quiet);
    request.on_progress = [&](const Progress& p) { progress.prefill(p); };
    request.keep_going = [] { return !interrupted(); };
    if (!flags_.json) {
      request.on_text = [&](std::string_view text) {
        progress.clear();
        std::cout << text << std::flush;
      };
    }
    CLO_ASSIGN(Response response, engine_.generate(std::move(request)));
    progress.clear();
    const char* how = flags_.raw ? "as it is (--raw)"
                      : raw_     ? "as it is (the model has no chat template)"
                                 : "through the model's chat template";
    if (flags_.json) {
      nlohmann::json json = {{"text", response.text},
                             {"tokens", response.tokens},
                             {"finish_reason", finish_reason_name(response.finish)},
                             {"chat_template", !raw_},
                             {"load_seconds", load_seconds_},
                             {"report", nlohmann::json::parse(report_json(response.report))}};
      if (!question.empty()) json["question"] = question;
      if (response.error) {
        json["error"] = {{"code", code_name(response.error->code)},
                         {"message", response.error->to_string()}};
      }
      std::cout << json.dump() << std::endl;
    } else {
      if (!response.text.ends_with('\n')) std::cout << '\n';
      std::cout << std::flush;
      if (!flags_.quiet) {
        std::cerr << "  prompt                " << how << '\n'
                  << "  finish reason         " << finish_reason_name(response.finish) << '\n'
                  << report_text(response.report);
      }
    }
    if (response.error) return *response.error;
    return response;
  }

 private:
  const RunFlags& flags_;
  Engine& engine_;
  const bool raw_;
  const double load_seconds_;
};

Result<int> run(const RunFlags& flags) {
  CLO_TRY(check_flags(flags));
  CLO_ASSIGN(EngineOptions options, flags.engine.resolve());
  CLO_ASSIGN(options.policy, flags.policy.resolve());
  options.max_batch = 1;
  options.keep_prefixes = flags.questions.size() > 1 || flags.chat;

  // Before anybody is asked to type a prompt.
  CLO_TRY(ModelFiles::find(options.model_dir));
  std::string text;
  if (flags.context_file) {
    CLO_ASSIGN(text, read_text(*flags.context_file));
  } else if (flags.prompt) {
    text = *flags.prompt;
  } else if (!flags.chat) {
    if (!flags.quiet && stdin_is_terminal()) {
      std::cerr << "Type the prompt; ctrl-D ends it. (clo run --help shows other ways.)\n";
    }
    CLO_ASSIGN(text, read_text(flags.file.value_or("-")));
  }
  if (text.empty() && !flags.chat) {
    const std::string source = flags.context_file.value_or(flags.file.value_or("-"));
    return Error{ErrorCode::kBadRequest, "is empty: there is nothing to answer",
                 source == "-" ? "standard input" : source};
  }

  const auto start = std::chrono::steady_clock::now();
  CLO_ASSIGN(const std::unique_ptr<Engine> engine, Engine::load(options));
  const double load_seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  const bool raw = flags.raw || !engine->has_chat_template();
  if (raw && (flags.chat || flags.system)) {
    return Error{ErrorCode::kUnsupported, "the model has no chat template, so there are no turns",
                 flags.chat ? "--chat" : "--system"};
  }
  catch_interrupts();
  Runner runner(flags, *engine, raw, load_seconds);
  if (flags.chat) {
    Chat chat(*engine, flags.system, flags.quiet,
              [&](Request request) { return runner.ask(std::move(request), ""); });
    return chat.run();
  }

  std::vector<std::string> questions = flags.questions;
  if (questions.empty()) questions.emplace_back();
  for (const std::string& question : questions) {
    std::string content = text;
    if (!question.empty()) content += (content.ends_with('\n') ? "" : "\n") + question;
    Request request;
    if (raw) {
      request.prompt = content;
    } else {
      if (flags.system) request.messages.push_back({"system", *flags.system});
      request.messages.push_back({"user", content});
    }
    if (questions.size() > 1 && !flags.json && !flags.quiet) std::cerr << question << '\n';
    CLO_ASSIGN(const Response response, runner.ask(std::move(request), question));
    if (response.finish == FinishReason::kCancelled) return 130;  // as a shell reports ctrl-C
  }
  return 0;
}

}  // namespace

Command add_run(CLI::App& app) {
  auto flags = std::make_shared<RunFlags>();
  RunFlags& f = *flags;
  f.engine.add_to(app);
  const std::string group = "Prompt";
  add_value(app, "-p,--prompt", f.prompt, "The prompt, as it is: \\n is a backslash and an n")
      ->group(group);
  add_value(app, "-f,--file", f.file, "File with the prompt; - or neither: standard input")
      ->group(group)
      ->type_name("FILE");
  add_value(app, "--context-file", f.context_file,
            "Document that the questions are about; - is standard input")
      ->group(group)
      ->type_name("FILE");
  app.add_option("--question", f.questions, "Question about it; several share one prefill")
      ->group(group)
      ->allow_extra_args(false);
  app.add_option("--system", f.system, "System message")->group(group);
  app.add_flag("--chat", f.chat, "A conversation, line by line; /help lists its commands")
      ->group(group);
  app.add_flag("--raw", f.raw, "Do not apply the model's chat template")->group(group);

  const std::string answer =
      "Answer (without sampling flags: as generation_config.json says, else greedy)";
  add_value(app, "--max-new-tokens", f.max_new_tokens, "Longest answer (256)")->group(answer);
  app.add_flag("--ignore-eos", f.ignore_eos, "Go on after an end-of-sequence token")->group(answer);
  app.add_option("--stop", f.stop, "Text that ends the answer; may be repeated")
      ->group(answer)
      ->allow_extra_args(false);
  add_value(app, "--temperature", f.temperature, "0: the most likely token")->group(answer);
  add_value(app, "--top-k", f.top_k, "Among the K most likely")->group(answer);
  add_value(app, "--top-p", f.top_p, "Among the most likely that hold this mass")->group(answer);
  add_value(app, "--min-p", f.min_p, "At least this share of the best one's")->group(answer);
  add_value(app, "--repetition-penalty", f.repetition_penalty,
            "Above 1: tokens of the answer become less likely")
      ->group(answer);
  add_value(app, "--seed", f.seed, "Same seed, same answer; samples, unless --temperature is 0")
      ->group(answer);
  app.add_flag("--json", f.json, "One JSON object per answer, with the report")->group(answer);
  app.add_flag("--quiet", f.quiet, "The answer alone")->group(answer);
  f.policy.add_to(app);
  app.footer(presets_help());
  return [flags] { return run(*flags); };
}

}  // namespace clo::app
