// clo demo: the main job in one command. A long document is read once; questions about it are
// answered densely and with a tenth of the KV on the device, side by side.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <iostream>
#include <memory>
#include <random>

#include "base/try.h"
#include "base/units.h"
#include "base/utf8.h"
#include "commands.h"
#include "eval/documents.h"
#include "flags.h"
#include "terminal.h"
#include "text_files.h"

namespace clo::app {

namespace {

struct DemoFlags {
  EngineFlags engine;
  PolicyFlags policy;
  std::optional<std::string> file;
  std::vector<std::string> questions;
  std::optional<uint64_t> seed;
  std::optional<int64_t> tokens;
  bool quiet = false;
};

constexpr int64_t kTokens = 24000;  // of the document made without FILE
constexpr int64_t kAnswerTokens = 32;
constexpr int64_t kClearTokens = 256;

struct Question {
  std::string text;
  std::optional<Fact> fact;
};

// Answers and figures of one policy.
struct Column {
  std::string title;
  PolicyOptions policy;
  std::vector<Response> answers;
};

std::string fixed(double value, int decimals) {
  char text[48];
  std::snprintf(text, sizeof text, "%.*f", decimals, value);
  return text;
}

std::string percent(double share) {
  char text[48];
  std::snprintf(text, sizeof text, "%g %%", 100 * share);
  return text;
}

// The start of the UTF-8 character that holds byte `at`.
size_t start_of_character(const std::string& text, size_t at) {
  while (at > 0 && (static_cast<unsigned char>(text[at]) & 0xC0) == 0x80) --at;
  return at;
}

// The text, or as many of its first lines as fit in `room` tokens.
Result<std::string> cut_to_fit(const Engine& engine, std::string text, int64_t room, bool& cut) {
  // Tokens of text are far shorter than this, and a gigabyte need not be encoded to be cut.
  constexpr int64_t kMostBytesPerToken = 64;
  cut = std::ssize(text) > room * kMostBytesPerToken;
  if (cut) text.resize(start_of_character(text, static_cast<size_t>(room * kMostBytesPerToken)));
  CLO_ASSIGN(const auto all, engine.encode(text));
  cut = cut || std::ssize(all) > room;
  if (std::ssize(all) <= room) return text;
  // Whole lines from the start, as many as fit; lines' tokens add up only nearly.
  const TokenCounter count = [&](std::string_view piece) -> Result<int64_t> {
    CLO_ASSIGN(const auto ids, engine.encode(piece));
    return std::ssize(ids);
  };
  CLO_ASSIGN(std::string lines, plant_facts({}, FillerText::lines_of(text), room, 0, count));
  if (!lines.empty()) return lines;
  // One endless line: cut it at a character.
  size_t bytes = text.size();
  while (true) {
    bytes = start_of_character(text, bytes * 9 / 10);
    CLO_ASSIGN(const int64_t tokens, count(std::string_view(text).substr(0, bytes)));
    if (tokens <= room) return text.substr(0, bytes);
  }
}

std::string first_line(const std::string& answer) { return answer.substr(0, answer.find('\n')); }

void print_answers(const std::vector<Question>& questions, const std::vector<Column>& columns) {
  for (size_t q = 0; q < questions.size(); ++q) {
    std::printf("\n%s\n", bold(questions[q].text).c_str());
    if (questions[q].fact) {
      std::printf("  planted at %2.0f %%       %s\n", 100 * questions[q].fact->depth,
                  questions[q].fact->value.c_str());
    }
    for (const Column& column : columns) {
      const Response& answer = column.answers[q];
      std::string verdict;
      if (questions[q].fact) {
        const bool right = is_right(*questions[q].fact, answer.text);
        verdict = "  " + coloured(right ? "right" : "wrong", right);
      }
      std::printf("  %-20s%s%s\n", column.title.c_str(), first_line(answer.text).c_str(),
                  verdict.c_str());
    }
  }
}

void print_figures(const std::vector<Column>& columns) {
  const auto row = [&](const char* name, auto value) {
    std::printf("  %-34s", name);
    for (const Column& column : columns) std::printf("%16s", value(column).c_str());
    std::printf("\n");
  };
  const auto mean = [](const Column& column, auto figure) {
    double sum = 0;
    for (const Response& answer : column.answers) sum += static_cast<double>(figure(answer.report));
    return sum / static_cast<double>(column.answers.size());
  };
  const auto bytes = [&](auto figure) {
    return [&, figure](const Column& c) {
      return format_bytes(static_cast<int64_t>(mean(c, figure)));
    };
  };
  std::printf("\n");
  row("", [](const Column& c) { return c.title; });
  // The first request read the document; the later ones say what a question costs after that.
  row("time to first token, document read", [](const Column& c) {
    std::vector<double> times;
    for (const Response& answer : c.answers) {
      if (answer.report.reused_tokens > 0) {
        times.push_back(answer.report.first_token_seconds);
      }
    }
    if (times.empty()) return std::string("-");
    std::sort(times.begin(), times.end());
    return fixed(times[times.size() / 2], 2) + " s";
  });
  row("decode", [&](const Column& c) {
    return fixed(mean(c, [](const Report& r) { return r.decode_tokens_per_second; }), 1) + " tok/s";
  });
  row("KV bytes on the device", bytes([](const Report& r) { return r.device_kv_bytes; }));
  row("KV bytes in the host store", bytes([](const Report& r) { return r.host_kv_bytes; }));
  row("bytes moved per token", bytes([](const Report& r) { return r.bytes_fetched_per_token; }));
  row("hit rate", [&](const Column& c) {
    const Report& r = c.answers.front().report;
    if (r.num_resident_heads == r.num_heads) return std::string("-");
    return fixed(100 * mean(c, [](const Report& x) { return x.hit_rate; }), 1) + " %";
  });
  row("share of the context attended", [&](const Column& c) {
    return fixed(100 * mean(c, [](const Report& r) { return r.share_attended; }), 1) + " %";
  });
}

Status check_flags(const DemoFlags& flags) {
  if (flags.file && flags.tokens) {
    return Error{ErrorCode::kBadFlag, "contradict each other: FILE is read as long as it is",
                 "FILE and --tokens"};
  }
  if (flags.tokens && (*flags.tokens < 600 || *flags.tokens > (1 << 24))) {
    return Error{ErrorCode::kBadFlag,
                 "expected 600 to 16777216, found " + std::to_string(*flags.tokens), "--tokens"};
  }
  for (const std::string& question : flags.questions) {
    if (question.find_first_not_of(" \t\r\n") == std::string::npos) {
      return Error{ErrorCode::kBadFlag, "is empty", "--question"};
    }
    if (find_invalid_utf8(question) != question.size()) {
      return Error{ErrorCode::kBadFlag,
                   "expected UTF-8 text, found an invalid byte at offset " +
                       std::to_string(find_invalid_utf8(question)),
                   "--question"};
    }
  }
  return Ok{};
}

Result<int> demo(const DemoFlags& flags) {
  CLO_TRY(check_flags(flags));
  CLO_ASSIGN(EngineOptions options, flags.engine.resolve());
  CLO_ASSIGN(options.policy, flags.policy.resolve());
  if (options.policy.select == Select::kNone) {
    return Error{ErrorCode::kBadFlag,
                 "the demo answers densely in any case, beside the policy that is given: choose "
                 "another one",
                 "--preset dense or --select none"};
  }
  options.max_batch = 1;
  const uint64_t seed = flags.seed.value_or(std::random_device{}() % 1'000'000);
  std::string text;
  if (flags.file) {
    CLO_ASSIGN(text, read_text(*flags.file));
    if (text.find_first_not_of(" \t\r\n") == std::string::npos) {
      return Error{ErrorCode::kBadRequest, "the file is empty: give a text to ask about",
                   *flags.file};
    }
  }
  CLO_ASSIGN(const std::unique_ptr<Engine> engine, Engine::load(options));
  const TokenCounter count = [&](std::string_view piece) -> Result<int64_t> {
    CLO_ASSIGN(const auto ids, engine->encode(piece));
    return std::ssize(ids);
  };

  std::vector<Question> questions;
  std::vector<Fact> facts;
  ItemRandom random(seed);
  if (flags.questions.empty()) {
    for (const FactForm form : {FactForm::kNumber, FactForm::kWord, FactForm::kNumber}) {
      Fact fact = make_fact(form, random);
      while (std::any_of(facts.begin(), facts.end(),
                         [&](const Fact& other) { return other.key == fact.key; })) {
        fact = make_fact(form, random);
      }
      facts.push_back(fact);
      questions.push_back({fact.question(), fact});
    }
  }
  for (const std::string& question : flags.questions) questions.push_back({question, std::nullopt});

  int64_t frame = 0;
  for (const Question& question : questions) {
    Request request;
    request.messages = {{"user", "\n" + question.text}};
    CLO_ASSIGN(const auto ids, engine->tokenize(request));
    frame = std::max<int64_t>(frame, std::ssize(ids));
  }
  // Room for the facts' own lines is kept by plant_facts; here it is only bounded.
  const int64_t most = engine->max_context_tokens() - frame - kAnswerTokens;
  const int64_t wanted = flags.tokens.value_or(kTokens);
  const int64_t room = flags.file ? most : std::min(wanted, most);
  if (room < 1) {
    return Error{ErrorCode::kTooLong, "the questions leave no room for a document", "--question"};
  }
  bool cut = !flags.file && wanted > most;
  std::string document;
  if (facts.empty() && !flags.file) {
    CLO_ASSIGN(FillerText filler, FillerText::licences(seed, kLicenceFolder));
    CLO_ASSIGN(document, plant_facts({}, std::move(filler), room, 0, count));
  } else if (facts.empty()) {
    CLO_ASSIGN(document, cut_to_fit(*engine, text, room, cut));
  } else {
    FillerText filler = FillerText::prose(seed);
    if (flags.file) {
      constexpr int64_t kFactTokens = 64;  // a planted line is shorter than this
      CLO_ASSIGN(const std::string body,
                 cut_to_fit(*engine, text, std::max<int64_t>(1, room - 3 * kFactTokens), cut));
      filler = FillerText::lines_of(body);
    } else {
      CLO_ASSIGN(filler, FillerText::licences(seed, kLicenceFolder));
    }
    int64_t clear = kClearTokens;
    if (flags.file) {
      CLO_ASSIGN(const int64_t tokens, count(text));
      clear = std::min(clear, tokens / 4);  // a short text has no 256 tokens to spare
    }
    CLO_ASSIGN(document, plant_facts(facts, std::move(filler), room, clear, count));
  }
  CLO_ASSIGN(const int64_t tokens, count(document));
  std::printf("%s %s, %ld tokens%s%s\n", bold("Document:").c_str(),
              flags.file ? flags.file->c_str() : kLicenceFolder, static_cast<long>(tokens),
              cut ? " (cut to what the model can hold)" : "",
              facts.empty() ? "" : ", three facts planted");
  if (!facts.empty()) {
    std::printf("%s %lu   (--seed %lu repeats it)\n", bold("Seed:").c_str(),
                static_cast<unsigned long>(seed), static_cast<unsigned long>(seed));
  } else if (std::filesystem::path(options.model_dir).filename() == "recall-7m") {
    std::printf(
        "recall-7m only finds facts of its own form (models/recall-7m/MODEL_CARD.md); for "
        "questions in plain words give another model with -m\n");
  }
  std::fflush(stdout);

  std::vector<Column> columns(2);
  CLO_ASSIGN(columns[0].policy, preset("dense"));
  columns[0].title = "dense";
  columns[1].policy = options.policy;
  columns[1].title = options.policy.set_tokens > 0
                         ? std::to_string(options.policy.set_tokens) + " tokens of KV"
                         : percent(options.policy.kv_ratio) + " of the KV";
  catch_interrupts();
  double reading = 0;
  for (Column& column : columns) {
    for (const Question& question : questions) {
      ProgressLine progress(!flags.quiet);
      Request request;
      request.messages = {
          {"user", document + (document.ends_with('\n') ? "" : "\n") + question.text}};
      request.policy = column.policy;
      request.sampling = SamplingOptions{};
      request.max_new_tokens = kAnswerTokens;
      request.stop = {"\n"};
      request.on_progress = [&](const Progress& p) { progress.prefill(p); };
      request.keep_going = [] { return !interrupted(); };
      CLO_ASSIGN(Response response, engine->generate(std::move(request)));
      if (response.error) return *response.error;
      if (response.finish == FinishReason::kCancelled) return 130;
      if (reading == 0) reading = response.report.first_token_seconds;
      column.answers.push_back(std::move(response));
    }
  }
  print_answers(questions, columns);
  std::printf("\n%s %s s to the first token, the document read once for all %zu answers; %s\n",
              bold("Time:").c_str(), fixed(reading, 1).c_str(), 2 * questions.size(),
              columns[0].answers[0].report.backend.c_str());
  print_figures(columns);
  if (columns[1].answers.front().report.share_attended > 0.999) {
    std::printf(
        "\nThe text is short: a set of at least 256 tokens covers it, so both columns attend "
        "to everything.\n");
  }
  std::printf("\npolicy: %s\n", columns[1].answers.front().report.policy.c_str());
  return 0;
}

}  // namespace

Command add_demo(CLI::App& app) {
  auto flags = std::make_shared<DemoFlags>();
  DemoFlags& f = *flags;
  f.engine.add_to(app, false);
  app.add_option("FILE", f.file, "Your own text; without it the licence texts of a Debian system")
      ->type_name("");
  app.add_option("--question", f.questions,
                 "Your own question; without one, three facts are planted and asked for")
      ->allow_extra_args(false);
  add_value(app, "--seed", f.seed, "Facts, depths and text (random)");
  add_value(app, "--tokens", f.tokens, "Length of the document without FILE (24000)");
  app.add_flag("--quiet", f.quiet, "No progress line");
  f.policy.add_to(app);
  app.footer("Dense attention misses some facts too: the model is small, and the seed is random.");
  return [flags] { return demo(*flags); };
}

}  // namespace clo::app
