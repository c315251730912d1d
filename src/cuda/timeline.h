#pragma once
// When pieces of work on several streams began and ended on the device, for a picture of what hides
// behind what. Measurement only: without a Timeline nothing is recorded.
#include <cstdint>
#include <vector>

#include "device/stream.h"

namespace clo {

// One piece of work. Times in seconds since the timeline's start.
struct TimelineSpan {
  const char* lane = "";  // which stream, in words
  const char* work = "";
  int32_t layer = 0;
  double begin_s = 0, end_s = 0;
};

class Timeline {
 public:
  explicit Timeline(const Stream& stream) : start_(true) { start_.record(stream); }

  // What `launch()` launches into `stream` is one span. Lane and work are literals.
  template <typename Launch>
  void record(const Stream& stream, const char* lane, const char* work, int32_t layer,
              const Launch& launch) {
    marks_.push_back({lane, work, layer, Event(true), Event(true)});
    marks_.back().begin.record(stream);
    launch();
    marks_.back().end.record(stream);
  }

  // Requires: everything launched has finished.
  std::vector<TimelineSpan> spans() const {
    std::vector<TimelineSpan> all;
    for (const Mark& mark : marks_) {
      all.push_back({mark.lane, mark.work, mark.layer, double{mark.begin.elapsed_ms(start_)} / 1e3,
                     double{mark.end.elapsed_ms(start_)} / 1e3});
    }
    return all;
  }

 private:
  struct Mark {
    const char* lane;
    const char* work;
    int32_t layer;
    Event begin, end;
  };
  Event start_;
  std::vector<Mark> marks_;
};

}  // namespace clo
