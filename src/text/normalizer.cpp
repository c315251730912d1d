#include "text/normalizer.h"

#include "base/check.h"

namespace clo {

std::string replace_all(std::string_view text, std::string_view pattern, std::string_view content) {
  CLO_CHECK(!pattern.empty());
  std::string replaced;
  replaced.reserve(text.size());
  for (size_t at = 0;;) {
    const size_t found = text.find(pattern, at);
    replaced += text.substr(at, found == std::string_view::npos ? found : found - at);
    if (found == std::string_view::npos) return replaced;
    replaced += content;
    at = found + pattern.size();
  }
}

Result<std::string> apply_step(const NormalizerStep& step, std::string_view text) {
  if (text.empty()) return std::string();
  switch (step.kind) {
    case NormalizerStep::Kind::kForm:
      return normalize(step.form, text);
    case NormalizerStep::Kind::kPrepend:
      return step.content + std::string(text);
    case NormalizerStep::Kind::kReplace:
      return replace_all(text, step.pattern, step.content);
  }
  return std::string(text);
}

std::string_view step_name(const NormalizerStep& step) {
  switch (step.kind) {
    case NormalizerStep::Kind::kForm:
      return normal_form_name(step.form);
    case NormalizerStep::Kind::kPrepend:
      return "Prepend";
    case NormalizerStep::Kind::kReplace:
      return "Replace";
  }
  return "";
}

}  // namespace clo
