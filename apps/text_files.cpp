#include "text_files.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <vector>

#include "base/utf8.h"

namespace clo::app {

namespace {

constexpr size_t kMaxTextBytes = size_t{1} << 30;

Error bad_text(const std::string& where, const std::string& message) {
  return Error{ErrorCode::kBadFile, message, where};
}

// Appends what is left of `stream`, up to a NUL byte, which will be refused, and up to what the
// tokenizer would take: a device that never ends must not fill the memory.
bool read_all(std::istream& stream, std::string& text) {
  std::vector<char> block(1 << 16);
  while (stream.read(block.data(), std::ssize(block)), stream.gcount() > 0) {
    text.append(block.data(), static_cast<size_t>(stream.gcount()));
    if (text.size() > kMaxTextBytes) return false;
    if (std::memchr(block.data(), 0, static_cast<size_t>(stream.gcount())) != nullptr) break;
  }
  return true;
}

// Where the text of `path` really goes: behind links, their target, whether it is there or not.
std::string target_of(const std::string& path) {
  std::filesystem::path at = path;
  std::error_code fault;
  for (int links = 0; links < 40 && std::filesystem::is_symlink(at, fault); ++links) {
    at = at.parent_path() / std::filesystem::read_symlink(at, fault);
  }
  return at.string();
}

// A device or pipe is written to; renaming a file over it would replace it.
bool is_special(const std::string& path) {
  std::error_code fault;
  return std::filesystem::exists(path, fault) && !std::filesystem::is_regular_file(path, fault) &&
         !std::filesystem::is_directory(path, fault);
}

}  // namespace

Result<std::string> read_text(const std::string& path) {
  const std::string where = path == "-" ? "standard input" : path;
  const auto too_long = [&] { return bad_text(where, "is longer than 1 GiB"); };
  std::string text;
  if (path == "-") {
    if (!read_all(std::cin, text)) return too_long();
  } else {
    std::error_code fault;
    if (std::filesystem::is_directory(path, fault)) {
      return bad_text(where, "expected a text file, found a folder");
    }
    std::ifstream file(path, std::ios::binary);
    if (!file) return bad_text(where, std::string("cannot be read: ") + std::strerror(errno));
    if (!read_all(file, text)) return too_long();
    if (file.bad()) return bad_text(where, std::string("cannot be read: ") + std::strerror(errno));
  }
  if (text.starts_with("\xFF\xFE") || text.starts_with("\xFE\xFF")) {
    return bad_text(where, "expected UTF-8 text, found UTF-16; convert it first (iconv -t UTF-8)");
  }
  if (text.starts_with("\xEF\xBB\xBF")) text.erase(0, 3);
  const size_t nul = text.find('\0');
  if (nul != std::string::npos) {
    return bad_text(where, "expected text, found a NUL byte at offset " + std::to_string(nul) +
                               ": this is not a text file");
  }
  const size_t invalid = find_invalid_utf8(text);
  if (invalid != text.size()) {
    return bad_text(
        where, "expected UTF-8 text, found an invalid byte at offset " + std::to_string(invalid) +
                   " (line " +
                   std::to_string(
                       1 + std::count(text.begin(),
                                      text.begin() + static_cast<std::ptrdiff_t>(invalid), '\n')) +
                   "); convert it to UTF-8 first");
  }
  std::string unix;
  unix.reserve(text.size());
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '\r' && i + 1 < text.size() && text[i + 1] == '\n') continue;
    unix += text[i];
  }
  return unix;
}

Status check_writable(const std::string& path) {
  std::error_code fault;
  if (std::filesystem::is_directory(path, fault)) {
    return bad_text(path, "expected a file to write, found a folder");
  }
  const std::string target = target_of(path);
  const bool special = is_special(target);
  const std::string probe = special ? target : target + ".partial";
  if (!std::ofstream(probe, std::ios::binary | std::ios::app)) {
    return bad_text(path, std::string("cannot be written: ") + std::strerror(errno));
  }
  if (!special) std::remove(probe.c_str());
  return Ok{};
}

Status write_whole(const std::string& path, const std::string& text) {
  const std::string target = target_of(path);
  const bool special = is_special(target);
  const std::string partial = special ? target : target + ".partial";
  std::ofstream file(partial, std::ios::binary | std::ios::trunc);
  file << text;
  file.close();
  if (special) {
    if (file) return Ok{};
    return bad_text(path, std::string("cannot be written: ") + std::strerror(errno));
  }
  if (!file || std::rename(partial.c_str(), target.c_str()) != 0) {
    const std::string reason = std::strerror(errno);
    std::remove(partial.c_str());
    return bad_text(path, "cannot be written: " + reason);
  }
  return Ok{};
}

}  // namespace clo::app
