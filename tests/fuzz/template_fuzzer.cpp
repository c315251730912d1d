// Fuzzes the parser and the evaluator of chat templates: any bytes end in text or in an Error, with
// bounded time and memory. Input: a template.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include "base/check.h"
#include "base/utf8.h"
#include "text/chat_template.h"

#ifdef CLO_FUZZ_PLANTED
// Its name in the trace tells this fault from a real one.
[[noreturn]] __attribute__((noinline)) static void planted_bug() { std::abort(); }
#endif

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace clo;
  const auto made =
      ChatTemplate::parse(std::string(reinterpret_cast<const char*>(data), size), "fuzz");
  if (!made) return 0;
  const std::vector<ChatMessage> chat = {
      {"system", "Be brief."}, {"user", "h\u00e9llo \u6f22"}, {"assistant", "<think>x</think>y"}};
  ChatTemplate::Variables variables;
  variables.strings = {{"bos_token", "<s>"}, {"eos_token", "</s>"}};
  variables.flags = {{"enable_thinking", false}};
  variables.now = std::tm{};
  const auto text = made->render(chat, variables);
  if (text) CLO_CHECK(find_invalid_utf8(*text) == text->size());
#ifdef CLO_FUZZ_PLANTED
  // No seed writes so much: it takes a loop in a loop, or a long product.
  if (text && text->size() > 2000) planted_bug();
#endif
  return 0;
}
