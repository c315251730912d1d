// Load a model, ask, stream the answer, read the report.
// Usage: minimal MODEL_DIR "PROMPT"
#include <iostream>

#include "clo/engine.h"

int main(int argc, char** argv) {
  if (argc != 3) {
    std::cerr << "usage: minimal MODEL_DIR PROMPT\n";
    return 2;
  }
  clo::EngineOptions options;
  options.model_dir = argv[1];
  options.policy.kv_ratio = 0.1;
  auto engine = clo::Engine::load(options);
  if (!engine) {
    std::cerr << engine.error().to_string() << '\n';
    return clo::exit_status(engine.error().code);
  }

  clo::Request request;
  request.messages = {{"user", argv[2]}};
  request.max_new_tokens = 32;
  request.on_text = [](std::string_view text) { std::cout << text << std::flush; };
  const auto answer = (*engine)->generate(std::move(request));
  if (!answer) {
    std::cerr << answer.error().to_string() << '\n';
    return clo::exit_status(answer.error().code);
  }
  std::cout << '\n' << clo::report_text(answer->report);
  return 0;
}
