#include "text_files.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>

#include "base/utf8.h"

namespace clo::app {

namespace {

Error bad_text(const std::string& where, const std::string& message) {
  return Error{ErrorCode::kBadFile, message, where};
}

}  // namespace

Result<std::string> read_text(const std::string& path) {
  const std::string where = path == "-" ? "standard input" : path;
  std::string text;
  if (path == "-") {
    text.assign(std::istreambuf_iterator<char>(std::cin), {});
  } else {
    std::error_code fault;
    if (std::filesystem::is_directory(path, fault)) {
      return bad_text(where, "expected a text file, found a folder");
    }
    std::ifstream file(path, std::ios::binary);
    if (!file) return bad_text(where, std::string("cannot be read: ") + std::strerror(errno));
    text.assign(std::istreambuf_iterator<char>(file), {});
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
    return bad_text(where, "expected UTF-8 text, found an invalid byte at offset " +
                               std::to_string(invalid) + " (line " +
                               std::to_string(1 + std::count(text.begin(),
                                                             text.begin() + static_cast<std::ptrdiff_t>(invalid),
                                                             '\n')) +
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

Status write_whole(const std::string& path, const std::string& text) {
  const std::string partial = path + ".partial";
  std::ofstream file(partial, std::ios::binary | std::ios::trunc);
  file << text;
  file.close();
  if (!file || std::rename(partial.c_str(), path.c_str()) != 0) {
    const std::string reason = std::strerror(errno);
    std::remove(partial.c_str());
    return bad_text(path, "cannot be written: " + reason);
  }
  return Ok{};
}

}  // namespace clo::app
