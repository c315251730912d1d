#pragma once
// Chat templates: the Jinja programs by which a model turns messages into one prompt. They are run,
// never recognised: any template in the supported subset works, any other is refused when it is
// parsed, with the construct and its line. Rendered as transformers does (trim_blocks,
// lstrip_blocks, tojson without HTML escapes, `tools` and `documents` none).
// Immutable after parse; render() may run on several threads. Makes text, not ids: a template
// writes its own BOS, so its text is encoded with add_special_tokens off.
#include <ctime>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "clo/result.h"
#include "io/model_files.h"

namespace clo {

struct TokenizerConfig;

struct ChatMessage {
  std::string role, content;
};

class ChatTemplate {
 public:
  // `where` names the template in errors.
  // Fails: kBadFile for malformed templates, kUnsupported for constructs outside the subset.
  static Result<ChatTemplate> parse(std::string source, std::string where);
  // The template of a model directory: chat_template.jinja wins over chat_template.json over
  // "chat_template" of tokenizer_config.json (of a list, the entry "default"); of a GGUF file that
  // of its metadata; nothing when the model has none. bos_token, eos_token and the like become
  // variables. Fails: as parse, and kBadFile for unreadable files.
  static Result<std::optional<ChatTemplate>> load(const ModelFiles& model);
  static Result<std::optional<ChatTemplate>> load(const std::filesystem::path& directory);

  ChatTemplate(ChatTemplate&&) noexcept;
  ChatTemplate& operator=(ChatTemplate&&) noexcept;
  ~ChatTemplate();

  struct Variables {
    bool add_generation_prompt = true;
    std::map<std::string, std::string> strings = {};  // date_string, ...; win over the model's
    std::map<std::string, bool> flags = {};           // enable_thinking, ...
    std::optional<std::tm> now =
        std::nullopt;  // what strftime_now() shows; the local time when absent
  };
  // The prompt. Fails: kBadRequest with the message of the template's raise_exception, for values
  // used against their types (with the line), for text that is not UTF-8, and for templates that
  // do not end; kUnsupported for the little that only shows while it runs.
  Result<std::string> render(std::span<const ChatMessage> messages,
                             const Variables& variables) const;

 private:
  struct Program;
  explicit ChatTemplate(std::unique_ptr<Program> program);
  static Result<std::optional<ChatTemplate>> make(TokenizerConfig config);
  std::unique_ptr<Program> program_;
};

}  // namespace clo
