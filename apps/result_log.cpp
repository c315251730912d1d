#include "result_log.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>

#include "base/try.h"
#include "text_files.h"

namespace clo::app {

namespace {

Error bad_log(const std::string& path, int64_t line, const std::string& what) {
  return Error{ErrorCode::kBadFile,
               what + "; give another file to -o, or remove this one to start anew",
               path + (line > 0 ? ":" + std::to_string(line) : "")};
}

// Fails: kBadFile, naming the first field that differs.
Status check_same_run(const std::string& path, const nlohmann::ordered_json& found,
                      const nlohmann::ordered_json& wanted) {
  if (!found.is_object() || found.value("kind", "") != "run" || !found.contains("identity")) {
    return bad_log(path, 1, "expected a run of clo eval to go on with, found something else");
  }
  for (const auto& [name, value] : wanted.at("identity").items()) {
    const auto& identity = found.at("identity");
    if (identity.contains(name) && identity.at(name) == value) continue;
    return bad_log(path, 1,
                   "is of another run: " + name + " is " +
                       (identity.contains(name) ? identity.at(name).dump() : "not given") +
                       " there and " + value.dump() + " here");
  }
  return Ok{};
}

}  // namespace

ResultLog::~ResultLog() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

Status ResultLog::open(const std::string& path, const nlohmann::ordered_json& run,
                       std::vector<ItemRecord>& finished) {
  if (path.empty()) return Ok{};
  path_ = path;
  std::string kept = run.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
  std::error_code fault;
  const bool regular = std::filesystem::is_regular_file(path, fault);
  if (regular && std::filesystem::file_size(path, fault) > 0) {
    std::ifstream file(path, std::ios::binary);
    const std::string text((std::istreambuf_iterator<char>(file)), {});
    std::set<std::string> ids;
    int64_t number = 0;
    for (size_t at = 0; at < text.size(); ++number) {
      const size_t end = text.find('\n', at);
      if (end == std::string::npos) {
        // Cut off in writing. Of a run line nothing can be told, so the file is not ours to take.
        if (number == 0) return bad_log(path, 1, "expected a run of clo eval, found half a line");
        break;
      }
      const std::string line = text.substr(at, end - at);
      at = end + 1;
      // What lies deeper than anything we write is dropped: it is shown in no message.
      const auto json = nlohmann::ordered_json::parse(
          line, [](int depth, auto, auto&) { return depth <= 8; }, false);
      if (number == 0) {
        CLO_TRY(check_same_run(path, json, run));
        kept = line + "\n";
        continue;
      }
      if (!json.is_object() || !json.contains("kind")) {
        return bad_log(path, number + 1, "expected a JSON object with \"kind\"");
      }
      if (json.at("kind") != "item") continue;  // summaries are made anew
      CLO_ASSIGN(ItemRecord record, from_line(line, path + ":" + std::to_string(number + 1)));
      if (!ids.insert(record.id).second) {
        return bad_log(path, number + 1, "the item " + record.id + " stands here a second time");
      }
      finished.push_back(std::move(record));
      kept += line + "\n";
    }
  }
  CLO_TRY(check_writable(path));
  // Without old summaries and a cut line; the file is whole at every moment.
  CLO_TRY(write_whole(path, kept));
  descriptor_ = ::open(path.c_str(), O_WRONLY | O_APPEND | O_CLOEXEC);
  if (descriptor_ < 0) {
    return Error{ErrorCode::kBadFile, std::string("cannot be written: ") + std::strerror(errno),
                 path};
  }
  return Ok{};
}

Status ResultLog::append(const std::string& line) {
  if (descriptor_ < 0) return Ok{};
  const std::string whole = line + "\n";
  for (size_t done = 0; done < whole.size();) {
    const ssize_t count = ::write(descriptor_, whole.data() + done, whole.size() - done);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) {
      return Error{ErrorCode::kBadFile, std::string("cannot be written: ") + std::strerror(errno),
                   path_};
    }
    done += static_cast<size_t>(count);
  }
  return Ok{};
}

}  // namespace clo::app
