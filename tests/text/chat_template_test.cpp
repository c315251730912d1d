#include "text/chat_template.h"

#include <chrono>

#include "golden_files.h"

namespace clo {
namespace {

using Json = nlohmann::json;

std::vector<ChatMessage> chat_of(const Json& pairs) {
  std::vector<ChatMessage> chat;
  for (const Json& pair : pairs) chat.push_back({pair[0], pair[1]});
  return chat;
}

ChatTemplate::Variables variables_of(const Json& object) {
  ChatTemplate::Variables variables;
  for (const auto& [name, value] : object.items()) {
    if (name == "add_generation_prompt") {
      variables.add_generation_prompt = value;
    } else if (value.is_boolean()) {
      variables.flags[name] = value;
    } else {
      variables.strings[name] = value;
    }
  }
  return variables;
}

TEST(ChatTemplate, RendersTheTemplatesOfModelFamiliesAsJinja2) {
  const Json golden = Json::parse(read_file(golden_dir() / "template_cases.json"));
  std::tm now{};
  now.tm_year = golden["now"][0].get<int>() - 1900;
  now.tm_mon = golden["now"][1].get<int>() - 1;
  now.tm_mday = golden["now"][2];
  ASSERT_GT(golden["cases"].size(), 50u);
  for (const Json& wanted : golden["cases"]) {
    const std::string name = wanted["template"];
    auto program = ChatTemplate::parse(golden["templates"][name], name);
    ASSERT_TRUE(program) << program.error().to_string();
    auto variables = variables_of(wanted["variables"]);
    variables.now = now;
    const auto text = program->render(chat_of(wanted["chat"]), variables);
    if (wanted["text"].is_null()) {
      ASSERT_FALSE(text) << name;
      EXPECT_EQ(text.error().code, ErrorCode::kBadRequest);
      EXPECT_EQ(text.error().message, wanted["error"].get<std::string>());
    } else {
      ASSERT_TRUE(text) << name << ": " << text.error().to_string();
      EXPECT_EQ(*text, wanted["text"].get<std::string>()) << name << wanted["chat"].dump();
    }
  }
}

TEST(ChatTemplate, RunsRandomProgramsAsJinja2) {
  const Json golden = Json::parse(read_file(golden_dir() / "template_programs.json"));
  const auto chat = chat_of(golden["chat"]);
  const auto variables = variables_of(golden["variables"]);
  ASSERT_EQ(golden["programs"].size(), 500u);
  size_t failing = 0;
  for (const Json& pair : golden["programs"]) {
    const std::string source = pair[0];
    const auto program =
        ChatTemplate::parse(golden["preamble"].get<std::string>() + source, "program");
    if (pair[1].is_null()) {
      ++failing;
      EXPECT_FALSE(program && program->render(chat, variables)) << source;
      continue;
    }
    ASSERT_TRUE(program) << program.error().to_string() << "\n" << source;
    const auto text = program->render(chat, variables);
    ASSERT_TRUE(text) << text.error().to_string() << "\n" << source;
    EXPECT_EQ(*text, pair[1].get<std::string>()) << source;
  }
  EXPECT_GT(failing, 10u);
}

TEST(ChatTemplate, LoadsTheTemplateOfTheDemoModel) {
  const auto loaded = ChatTemplate::load(source_dir() / "models" / "recall-7m");
  ASSERT_TRUE(loaded) << loaded.error().to_string();
  ASSERT_TRUE(loaded->has_value());
  const std::vector<ChatMessage> chat = {{"user", "DOCUMENT\nWhat?"}};
  EXPECT_EQ(*(*loaded)->render(chat, {}),
            "<|endoftext|><|im_start|>user\nDOCUMENT\nWhat?<|im_end|>\n<|im_start|>assistant\n");
}

class TemplateFiles : public testing::Test {
 protected:
  TemplateFiles() : dir_(std::filesystem::path(testing::TempDir()) / "clo_template_files") {
    std::filesystem::remove_all(dir_);
    std::filesystem::create_directories(dir_);
  }
  void write(const std::string& name, const std::string& text) {
    std::ofstream(dir_ / name) << text;
  }
  std::string rendered() {
    const auto loaded = ChatTemplate::load(dir_);
    if (!loaded) return "error: " + loaded.error().to_string();
    if (!loaded->has_value()) return "none";
    return *(*loaded)->render({}, {});
  }
  std::filesystem::path dir_;
};

TEST_F(TemplateFiles, JinjaFileWinsOverJsonFileOverConfig) {
  EXPECT_EQ(rendered(), "none");
  write("tokenizer_config.json", R"({"bos_token":{"content":"<s>"},"chat_template":null})");
  EXPECT_EQ(rendered(), "none");
  write("tokenizer_config.json",
        R"({"bos_token":{"content":"<s>"},"eos_token":"</s>","unk_token":null,
            "chat_template":[{"name":"tool_use","template":"no"},
                             {"name":"default","template":"{{bos_token}}list{{eos_token}}"}]})");
  EXPECT_EQ(rendered(), "<s>list</s>");
  write("chat_template.json", R"({"chat_template":"json"})");
  EXPECT_EQ(rendered(), "json");
  write("chat_template.jinja", "jinja {{ bos_token }}\n");
  EXPECT_EQ(rendered(), "jinja <s>");
}

TEST_F(TemplateFiles, MalformedFilesAreNamed) {
  write("tokenizer_config.json", R"({"chat_template":[{"name":"rag","template":"x"}]})");
  EXPECT_NE(rendered().find("rag"), std::string::npos);
  write("tokenizer_config.json", R"({"chat_template":7})");
  EXPECT_NE(rendered().find("expected a string or a list, found number"), std::string::npos);
  write("tokenizer_config.json", "<!DOCTYPE html>");
  EXPECT_NE(rendered().find("HTML page"), std::string::npos);
  write("tokenizer_config.json", "version https://git-lfs.github.com/spec/v1");
  EXPECT_NE(rendered().find("Git LFS pointer"), std::string::npos);
}

struct Refusal {
  const char* source;
  ErrorCode code;
  const char* named;
};

TEST(ChatTemplate, RefusesWhatItDoesNotKnowByNameAndLine) {
  const Refusal refusals[] = {
      {"a\n\n{{ x | sort }}", ErrorCode::kUnsupported, "line 3: the filter \"sort\""},
      {"{{ x is escaped }}", ErrorCode::kUnsupported, "the test \"escaped\""},
      {"{{ x.format(1) }}", ErrorCode::kUnsupported, "the method \"format\""},
      {"\n{% if false %}{{ lipsum(3) }}{% endif %}", ErrorCode::kUnsupported,
       "line 2: the function \"lipsum\""},
      {"{% include 'x' %}", ErrorCode::kUnsupported, "{% include %}"},
      {"{% call f() %}{% endcall %}", ErrorCode::kUnsupported, "{% call %}"},
      {"{% for x in y recursive %}{% endfor %}", ErrorCode::kUnsupported, "recursive"},
      {"{{ f(*x) }}", ErrorCode::kUnsupported, "\"*\" in the arguments"},
      {"{{ x | tojson(cls=1) }}", ErrorCode::kUnsupported, "an argument named \"cls\""},
      {"{{ x | map(n) | list }}", ErrorCode::kUnsupported, "computed name"},
      {"{{ x | select('escaped') | list }}", ErrorCode::kUnsupported, "the test \"escaped\""},
      {"{{ loop.cycle(1) }}", ErrorCode::kUnsupported, "loop.cycle"},
      {"{{ x.__class__ }}", ErrorCode::kUnsupported, "__class__"},
      {"{% if x %}", ErrorCode::kBadFile, "not closed with {% endif %}"},
      {"x{% endfor %}", ErrorCode::kBadFile, "unexpected tag {% endfor %}"},
      {"{% break %}", ErrorCode::kBadFile, "outside of a loop"},
      {"{{ 'x }}", ErrorCode::kBadFile, "a string is not closed"},
      {"{{ x", ErrorCode::kBadFile, "not closed with }}"},
      {"\n\n{# x", ErrorCode::kBadFile, "line 3: the comment"},
      {"{{ (1] }}", ErrorCode::kBadFile, "unexpected \"]\""},
      {"{{ 1 $ 2 }}", ErrorCode::kBadFile, "unexpected character \"$\""},
      {"{{ 99999999999999999999 }}", ErrorCode::kBadFile, "a decimal number"},
      {"{{ '\\xZZ' }}", ErrorCode::kBadFile, "malformed escape"},
      {"{{ \xFF }}", ErrorCode::kBadFile, "byte 3"},
  };
  for (const Refusal& refusal : refusals) {
    const auto made = ChatTemplate::parse(refusal.source, "here");
    ASSERT_FALSE(made) << refusal.source;
    EXPECT_EQ(made.error().code, refusal.code) << made.error().to_string();
    EXPECT_NE(made.error().message.find(refusal.named), std::string::npos)
        << made.error().to_string();
    EXPECT_EQ(made.error().where, "here");
  }
}

TEST(ChatTemplate, FaultsOfARenderingAreNamed) {
  const Refusal faults[] = {
      {"{{ raise_exception('only ' ~ 2) }}", ErrorCode::kBadRequest, "only 2"},
      {"\n{{ missing.x }}", ErrorCode::kBadRequest, "line 2: 'missing' is undefined"},
      {"{{ 1 + 'a' }}", ErrorCode::kBadRequest, "'+' has no meaning between int and str"},
      {"{{ 1 // 0 }}", ErrorCode::kBadRequest, "division by zero"},
      {"{{ 9223372036854775807 + 1 }}", ErrorCode::kBadRequest, "64 bits"},
      {"{{ '%s' % 1 }}", ErrorCode::kUnsupported, "formatting a string with %"},
      {"{{ {}.items }}", ErrorCode::kUnsupported, "items without a call"},
      {"{{ strftime_now('%Q') }}", ErrorCode::kUnsupported, "%Q"},
      {"{% set x.y = 1 %}", ErrorCode::kBadRequest, "\"x\" is not a namespace"},
      {"{% set n = namespace() %}{% set n.n = n %}", ErrorCode::kUnsupported, "inside a namespace"},
      {"{{ range }}", ErrorCode::kUnsupported, "printing a function"},
      {"{% for a, b in [1] %}{% endfor %}", ErrorCode::kBadRequest, "iterated over"},
  };
  for (const Refusal& fault : faults) {
    const auto made = ChatTemplate::parse(fault.source, "here");
    ASSERT_TRUE(made) << made.error().to_string();
    const auto text = made->render({}, {});
    ASSERT_FALSE(text) << fault.source << *text;
    EXPECT_EQ(text.error().code, fault.code) << text.error().to_string();
    EXPECT_NE(text.error().message.find(fault.named), std::string::npos)
        << text.error().to_string();
  }
  const auto made = ChatTemplate::parse("{{ messages[0].content }}", "here");
  const std::vector<ChatMessage> bad = {{"user", "\xFF"}};
  const auto text = made->render(bad, {});
  ASSERT_FALSE(text);
  EXPECT_EQ(text.error().where, "messages[0].content");
}

std::string repeat(const std::string& unit, int count) {
  std::string made;
  for (int i = 0; i < count; ++i) made += unit;
  return made;
}

// Each of these would run for ages, eat all memory or all stack if nothing bounded it.
TEST(ChatTemplate, HostileTemplatesEndWithAnError) {
  const std::string loops = "{% for a in range(100000) %}";
  const std::string hostile[] = {
      repeat(loops, 5) + "x" + repeat("{% endfor %}", 5),
      "{% set n = namespace(s='xxxxxxxx') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}"
      "{% endfor %}",
      "{% set n = namespace(l=[1]) %}{% for i in range(99) %}{% set n.l = n.l + n.l %}{% endfor %}",
      "{% set n = namespace(l=[1]) %}{% for i in range(50) %}{% set n.l = [n.l, n.l] %}{% endfor %}"
      "{{ n.l }}",
      "{% set n = namespace(l=[1]) %}{% for i in range(50) %}{% set n.l = [n.l, n.l] %}{% endfor %}"
      "{{ n.l == n.l[:] + [] }}{{ n.l | tojson }}",
      "{% set n = namespace(l=[]) %}{% for i in range(9999) %}{% set n.l = [n.l] %}{% endfor %}",
      "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
      "{{ 'x' * 999999999999 }}",
      "{{ [1] * 999999999999 }}",
      "{{ range(999999999) | list }}",
      "{{ [1] | tojson(indent=999999999) }}",
      "{% set s = 'a' * 1000000 %}{{ (s ~ s).count(s[1:] ~ 'b') }}",
      "{% set s = 'a' * 9000 %}{{ s.replace('', s) | length }}{{ s.replace('a', s) }}",
      "{{ " + repeat("(", 5000) + "1" + repeat(")", 5000) + " }}",
      "{{ " + repeat("[", 5000) + repeat("]", 5000) + " }}",
      "{{ " + repeat("not ", 5000) + "1 }}",
      "{{ " + repeat("-", 5000) + "1 }}",
      "{{ 1" + repeat(" + 1", 5000) + " }}",
      "{{ 1" + repeat(" if 1 else 2", 5000) + " }}",
      "{{ x" + repeat(".x", 5000) + " }}",
      "{{ x" + repeat("|list", 5000) + " }}",
      repeat("{% if 1 %}", 5000) + repeat("{% endif %}", 5000),
      repeat("{% for x in y %}", 5000),
  };
  for (const std::string& source : hostile) {
    const auto start = std::chrono::steady_clock::now();
    const auto made = ChatTemplate::parse(source, "hostile");
    EXPECT_FALSE(made && made->render({}, {})) << source.substr(0, 100);
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
    EXPECT_LT(taken.count(), 20) << source.substr(0, 100);
  }
}

TEST(ChatTemplate, LongChatsFitTheWorkLimit) {
  const Json golden = Json::parse(read_file(golden_dir() / "template_cases.json"));
  std::vector<ChatMessage> chat;
  for (int i = 0; i < 400; ++i)
    chat.push_back({i % 2 == 0 ? "user" : "assistant", repeat("long text ", 2000)});
  for (const auto& [name, source] : golden["templates"].items()) {
    const auto made = ChatTemplate::parse(source, name);
    const auto text =
        made->render(chat, {.strings = {{"bos_token", "<s>"}, {"eos_token", "</s>"}}});
    ASSERT_TRUE(text) << name << text.error().to_string();
    EXPECT_GT(text->size(), 7'900'000u);
  }
}

}  // namespace
}  // namespace clo
