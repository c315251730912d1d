// How values of a template are written: Python's str, repr and json.dumps.
#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>

#include "base/try.h"
#include "base/utf8.h"
#include "text/jinja/value.h"
#include "text/unicode.h"

namespace clo::jinja {

namespace {

std::string hex(const char* format, unsigned value) {
  char text[16];
  std::snprintf(text, sizeof text, format, value);
  return text;
}

void append_text_repr(std::string_view text, std::string& out) {
  const bool double_quotes =
      text.find('\'') != std::string_view::npos && text.find('"') == std::string_view::npos;
  const char quote = double_quotes ? '"' : '\'';
  out += quote;
  while (!text.empty()) {
    const Utf8Step step = decode_utf8(text);
    const char32_t c = step.code_point;
    if (c == static_cast<unsigned char>(quote) || c == '\\') {
      out += '\\';
      out += static_cast<char>(c);
    } else if (c == '\n' || c == '\r' || c == '\t') {
      out += c == '\n' ? "\\n" : (c == '\r' ? "\\r" : "\\t");
    } else if (is_printable(c)) {
      out += text.substr(0, step.length);
    } else {
      out += c < 0x100 ? hex("\\x%02x", c) : (c < 0x10000 ? hex("\\u%04x", c) : hex("\\U%08x", c));
    }
    text.remove_prefix(step.length);
  }
  out += quote;
}

void append_text_json(std::string_view text, bool ensure_ascii, std::string& out) {
  out += '"';
  while (!text.empty()) {
    const Utf8Step step = decode_utf8(text);
    const char32_t c = step.code_point;
    constexpr std::string_view kShort = "\"\\\n\r\t\f\b";
    constexpr std::string_view kLetters = "\"\\nrtfb";
    const size_t place = c < 0x80 ? kShort.find(static_cast<char>(c)) : std::string_view::npos;
    if (place != std::string_view::npos) {
      out += '\\';
      out += kLetters[place];
    } else if (c < 0x20) {
      out += hex("\\u%04x", c);
    } else if (c < 0x80 || !ensure_ascii) {
      out += text.substr(0, step.length);
    } else if (c < 0x10000) {
      out += hex("\\u%04x", c);
    } else {
      out += hex("\\u%04x", 0xD800 + ((c - 0x10000) >> 10));
      out += hex("\\u%04x", 0xDC00 + ((c - 0x10000) & 0x3FF));
    }
    text.remove_prefix(step.length);
  }
  out += '"';
}

class JsonWriter {
 public:
  JsonWriter(const JsonStyle& style, std::string& out, Work& work)
      : style_(style), out_(out), work_(work) {}

  Status write(const Value& value) {
    CLO_TRY(work_.spend(1));
    if (value.is_none()) {
      out_ += "null";
    } else if (const bool* flag = value.as_bool()) {
      out_ += *flag ? "true" : "false";
    } else if (const int64_t* number = value.as_int()) {
      out_ += std::to_string(*number);
    } else if (const double* real = value.as_float()) {
      out_ += json_float(*real);
    } else if (const std::string* text = value.as_text()) {
      CLO_TRY(work_.spend_bytes(text->size()));
      append_text_json(*text, style_.ensure_ascii, out_);
    } else if (const List* list = value.as_list()) {
      return write_list(*list);
    } else if (const Dict* dict = value.as_dict()) {
      return write_dict(*dict);
    } else {
      return work_.fail("a " + std::string(type_name(value)) + " cannot be written as JSON");
    }
    return Ok{};
  }

 private:
  static std::string json_float(double value) {
    if (std::isnan(value)) return "NaN";
    if (std::isinf(value)) return value > 0 ? "Infinity" : "-Infinity";
    return format_float(value);
  }

  // Between two items: a comma and a space, or a new line.
  Status separate(bool first) {
    if (!first) out_ += style_.indent < 0 ? ", " : ",";
    return new_line();
  }
  Status new_line() {
    if (style_.indent < 0) return Ok{};
    const int64_t width = style_.indent * level_;  // both are bounded: no overflow
    CLO_TRY(work_.spend(width + 1));
    out_ += '\n';
    out_.append(static_cast<size_t>(width), ' ');
    return Ok{};
  }

  Status write_list(const List& list) {
    if (list.items.empty()) {
      out_ += "[]";
      return Ok{};
    }
    out_ += '[';
    ++level_;
    for (size_t i = 0; i < list.items.size(); ++i) {
      CLO_TRY(separate(i == 0));
      CLO_TRY(write(list.items[i]));
    }
    --level_;
    CLO_TRY(new_line());
    out_ += ']';
    return Ok{};
  }

  Status write_dict(const Dict& dict) {
    if (dict.entries.empty()) {
      out_ += "{}";
      return Ok{};
    }
    std::vector<const std::pair<Value, Value>*> entries;
    for (const auto& entry : dict.entries) {
      if (style_.sort_keys && entry.first.as_text() == nullptr)
        return work_.unsupported("tojson(sort_keys=true) with keys that are not strings");
      entries.push_back(&entry);
    }
    CLO_TRY(work_.spend(static_cast<int64_t>(entries.size())));
    if (style_.sort_keys) {
      std::sort(entries.begin(), entries.end(), [](const auto* a, const auto* b) {
        return *a->first.as_text() < *b->first.as_text();
      });
    }
    out_ += '{';
    ++level_;
    for (size_t i = 0; i < entries.size(); ++i) {
      CLO_TRY(separate(i == 0));
      CLO_TRY(write_key(entries[i]->first));
      out_ += ": ";
      CLO_TRY(write(entries[i]->second));
    }
    --level_;
    CLO_TRY(new_line());
    out_ += '}';
    return Ok{};
  }

  Status write_key(const Value& key) {
    if (key.as_text() != nullptr) return write(key);
    if (!is_number(key) && !key.is_none())
      return work_.fail("a " + std::string(type_name(key)) + " cannot be a key in JSON");
    out_ += '"';
    CLO_TRY(write(key));
    out_ += '"';
    return Ok{};
  }

  const JsonStyle& style_;
  std::string& out_;
  Work& work_;
  int64_t level_ = 0;
};

}  // namespace

std::string format_float(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  char text[64];
  // Python writes an exponent below 1e-4 and from 1e16 on, with at least two digits.
  const double size = std::fabs(value);
  const bool exponent = size != 0 && (size < 1e-4 || size >= 1e16);
  const auto format = exponent ? std::chars_format::scientific : std::chars_format::fixed;
  const auto end = std::to_chars(text, text + sizeof text, value, format).ptr;
  std::string made(text, end);
  if (!exponent && made.find('.') == std::string::npos) made += ".0";
  return made;
}

Status append_repr(const Value& value, std::string& out, Work& work) {
  CLO_TRY(work.spend(1));
  if (const std::string* text = value.as_text()) {
    CLO_TRY(work.spend_bytes(text->size()));
    append_text_repr(*text, out);
    return Ok{};
  }
  if (const List* list = value.as_list()) {
    out += list->is_tuple ? '(' : '[';
    for (size_t i = 0; i < list->items.size(); ++i) {
      if (i > 0) out += ", ";
      CLO_TRY(append_repr(list->items[i], out, work));
    }
    if (list->is_tuple && list->items.size() == 1) out += ',';
    out += list->is_tuple ? ')' : ']';
    return Ok{};
  }
  if (const Dict* dict = value.as_dict()) {
    out += '{';
    for (size_t i = 0; i < dict->entries.size(); ++i) {
      if (i > 0) out += ", ";
      CLO_TRY(append_repr(dict->entries[i].first, out, work));
      out += ": ";
      CLO_TRY(append_repr(dict->entries[i].second, out, work));
    }
    out += '}';
    return Ok{};
  }
  if (value.is_undefined()) {
    out += "Undefined";
    return Ok{};
  }
  CLO_ASSIGN(const std::string text, to_text(value, work));
  out += text;
  return Ok{};
}

Result<std::string> to_text(const Value& value, Work& work) {
  if (const std::string* text = value.as_text()) {
    CLO_TRY(work.spend_bytes(text->size()));
    return *text;
  }
  if (value.is_none()) return std::string("None");
  if (value.is_undefined()) return std::string();
  if (const bool* flag = value.as_bool()) return std::string(*flag ? "True" : "False");
  if (const int64_t* number = value.as_int()) return std::to_string(*number);
  if (const double* number = value.as_float()) return format_float(*number);
  if (value.as_list() != nullptr || value.as_dict() != nullptr) {
    std::string out;
    CLO_TRY(append_repr(value, out, work));
    return out;
  }
  return work.unsupported("printing a " + std::string(type_name(value)));
}

Status append_json(const Value& value, const JsonStyle& style, std::string& out, Work& work) {
  if (style.indent > 1000) return work.unsupported("tojson with an indent above 1000");
  return JsonWriter(style, out, work).write(value);
}

}  // namespace clo::jinja
