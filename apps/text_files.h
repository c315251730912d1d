#pragma once
// Text that people hand in: files and standard input, checked before it reaches a model.
#include <string>

#include "clo/result.h"

namespace clo::app {

// Reads a text file ("-": standard input). A UTF-8 byte-order mark is dropped and CRLF becomes LF.
// Fails: kBadFile for an unreadable path, a folder, UTF-16, NUL bytes or invalid UTF-8 (with the
// place).
Result<std::string> read_text(const std::string& path);

// Whether write_whole can work, asked before hours of measuring. Leaves nothing behind.
// Fails: kBadFile.
Status check_writable(const std::string& path);

// Writes a file whole or not at all: the text goes to PATH.partial, then takes its place. (A device
// or pipe is written to as it is.) Fails: kBadFile.
Status write_whole(const std::string& path, const std::string& text);

}  // namespace clo::app
