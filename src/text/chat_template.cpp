#include "text/chat_template.h"

#include "base/try.h"
#include "base/utf8.h"
#include "text/gguf_tokenizer.h"
#include "text/jinja/evaluator.h"
#include "text/jinja/parser.h"
#include "text/tokenizer_config.h"

namespace clo {

namespace {

constexpr size_t kMaxTemplateBytes = 1 << 20;
// A template of a real model spends well under a million units on a chat of a few messages; the
// share that grows with the chat covers some fifty passes over every byte.
constexpr int64_t kBaseWork = 20'000'000;
constexpr int64_t kWorkPerByte = 200;

std::tm local_time() {
  const std::time_t seconds = std::time(nullptr);
  std::tm now{};
  localtime_r(&seconds, &now);
  return now;
}

Status check_utf8(const std::string& text, const std::string& what) {
  const size_t invalid = find_invalid_utf8(text);
  if (invalid == text.size()) return Ok{};
  return Error{ErrorCode::kBadRequest,
               "expected UTF-8, found an invalid sequence at byte " + std::to_string(invalid),
               what};
}

}  // namespace

struct ChatTemplate::Program {
  jinja::Body body;
  std::string where;
  std::map<std::string, std::string> special_tokens;
};

ChatTemplate::ChatTemplate(std::unique_ptr<Program> program) : program_(std::move(program)) {}
ChatTemplate::ChatTemplate(ChatTemplate&&) noexcept = default;
ChatTemplate& ChatTemplate::operator=(ChatTemplate&&) noexcept = default;
ChatTemplate::~ChatTemplate() = default;

Result<ChatTemplate> ChatTemplate::parse(std::string source, std::string where) {
  if (source.size() > kMaxTemplateBytes) {
    return Error{
        ErrorCode::kUnsupported,
        "a chat template of " + std::to_string(source.size()) + " bytes; at most 1 MiB is read",
        where};
  }
  const size_t invalid = find_invalid_utf8(source);
  if (invalid < source.size()) {
    return Error{ErrorCode::kBadFile,
                 "expected UTF-8, found an invalid sequence at byte " + std::to_string(invalid),
                 where};
  }
  auto program = std::make_unique<Program>();
  CLO_ASSIGN(program->body, jinja::parse_template(source, where));
  program->where = std::move(where);
  return ChatTemplate(std::move(program));
}

Result<std::optional<ChatTemplate>> ChatTemplate::load(const ModelFiles& model) {
  if (!model.gguf()) return load(model.path());
  CLO_ASSIGN(TokenizerConfig config, gguf_tokenizer_config(*model.gguf()));
  return make(std::move(config));
}

Result<std::optional<ChatTemplate>> ChatTemplate::load(const std::filesystem::path& directory) {
  CLO_ASSIGN(TokenizerConfig config, load_tokenizer_config(directory));
  return make(std::move(config));
}

Result<std::optional<ChatTemplate>> ChatTemplate::make(TokenizerConfig config) {
  if (!config.chat_template) return std::optional<ChatTemplate>();
  CLO_ASSIGN(ChatTemplate made,
             parse(std::move(*config.chat_template), std::move(config.chat_template_where)));
  made.program_->special_tokens = std::move(config.special_tokens);
  return std::optional<ChatTemplate>(std::move(made));
}

Result<std::string> ChatTemplate::render(std::span<const ChatMessage> messages,
                                         const Variables& variables) const {
  jinja::Inputs inputs;
  inputs.now = variables.now ? *variables.now : local_time();
  size_t bytes = 0;
  // Building the input is not the template's work.
  jinja::Work building(program_->where, int64_t{1} << 40);
  jinja::Values list;
  for (size_t i = 0; i < messages.size(); ++i) {
    const std::string what = "messages[" + std::to_string(i) + "]";
    CLO_TRY(check_utf8(messages[i].role, what + ".role"));
    CLO_TRY(check_utf8(messages[i].content, what + ".content"));
    bytes += messages[i].role.size() + messages[i].content.size() + 64;
    CLO_ASSIGN(jinja::Value message,
               jinja::make_dict(
                   {{jinja::Value(std::string("role")), jinja::Value(messages[i].role)},
                    {jinja::Value(std::string("content")), jinja::Value(messages[i].content)}},
                   building));
    list.push_back(std::move(message));
  }
  CLO_ASSIGN(inputs.variables["messages"], jinja::make_list(std::move(list), false, building));
  inputs.variables["tools"] = jinja::Value();
  inputs.variables["documents"] = jinja::Value();
  inputs.variables["add_generation_prompt"] = jinja::Value(variables.add_generation_prompt);
  for (const auto& [name, text] : program_->special_tokens)
    inputs.variables[name] = jinja::Value(text);
  for (const auto& [name, text] : variables.strings) {
    CLO_TRY(check_utf8(text, name));
    bytes += text.size();
    inputs.variables[name] = jinja::Value(text);
  }
  for (const auto& [name, flag] : variables.flags) inputs.variables[name] = jinja::Value(flag);

  jinja::Work work(program_->where, kBaseWork + kWorkPerByte * static_cast<int64_t>(bytes));
  return jinja::run_template(program_->body, std::move(inputs), work);
}

}  // namespace clo
