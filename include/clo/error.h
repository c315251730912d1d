#pragma once
// What can go wrong because of the world or the caller: bad files, bad requests, no room.
// Faults of the program itself abort through CLO_CHECK (base/check.h) and never become an Error.
#include <string>
#include <string_view>

namespace clo {

// Each code carries one exit status for the command line; see exit_status().
enum class ErrorCode {
  kBadFlag,       // a flag or option value that cannot be used
  kBadFile,       // a file that is missing, unreadable, truncated or malformed
  kUnsupported,   // well-formed input that asks for a feature this program does not have
  kBadRequest,    // a prompt or request that cannot be served as asked
  kTooLong,       // a prompt beyond the model's or the store's limit
  kHostMemory,    // the host budget is too small
  kDeviceMemory,  // the device budget is too small
  kModelFault,    // the model produced NaN or infinite logits
  kCancelled,     // the caller cancelled the request
  kDeviceFault,   // the device or its driver failed
};

struct Error {
  ErrorCode code = ErrorCode::kBadRequest;
  // What was expected, what was found and what to do, in one or two sentences.
  std::string message;
  // File, tensor, flag or field the message is about; may be empty.
  std::string where;

  std::string to_string() const { return where.empty() ? message : where + ": " + message; }
};

// Stable lower-case name of a code, as printed in JSON reports.
constexpr std::string_view code_name(ErrorCode code) {
  switch (code) {
    case ErrorCode::kBadFlag:
      return "bad_flag";
    case ErrorCode::kBadFile:
      return "bad_file";
    case ErrorCode::kUnsupported:
      return "unsupported";
    case ErrorCode::kBadRequest:
      return "bad_request";
    case ErrorCode::kTooLong:
      return "too_long";
    case ErrorCode::kHostMemory:
      return "host_memory";
    case ErrorCode::kDeviceMemory:
      return "device_memory";
    case ErrorCode::kModelFault:
      return "model_fault";
    case ErrorCode::kCancelled:
      return "cancelled";
    case ErrorCode::kDeviceFault:
      return "device_fault";
  }
  return "unknown";
}

// Exit status of the command line: 2 flags, 3 a bad file or request, 4 not enough memory,
// 5 device fault.
constexpr int exit_status(ErrorCode code) {
  switch (code) {
    case ErrorCode::kBadFlag:
      return 2;
    case ErrorCode::kHostMemory:
    case ErrorCode::kDeviceMemory:
      return 4;
    case ErrorCode::kDeviceFault:
      return 5;
    default:
      return 3;
  }
}

}  // namespace clo
