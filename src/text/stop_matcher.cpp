#include "text/stop_matcher.h"

#include <utility>

namespace clo {

StopMatcher::StopMatcher(std::vector<std::string> stops) : states_(1) {
  for (const std::string& stop : stops) {
    size_t state = 0;
    for (const char c : stop) {
      const auto byte = static_cast<unsigned char>(c);
      const auto found = states_[state].next.find(byte);
      if (found != states_[state].next.end()) {
        state = found->second;
        continue;
      }
      const size_t fresh = states_.size();
      states_[state].next.emplace(byte, fresh);
      State made;
      made.length = states_[state].length + 1;
      states_.push_back(std::move(made));
      state = fresh;
    }
    states_[state].matched_bytes = states_[state].length;
  }
  // Shorter states first, so that a fallback is complete before it is used.
  std::vector<size_t> order = {0};
  for (size_t i = 0; i < order.size(); ++i) {
    const size_t parent = order[i];
    for (const auto& [byte, child] : states_[parent].next) {
      State& state = states_[child];
      if (parent != 0) state.fallback = advance(states_[parent].fallback, byte);
      if (state.matched_bytes == 0) state.matched_bytes = states_[state.fallback].matched_bytes;
      order.push_back(child);
    }
  }
}

size_t StopMatcher::advance(size_t state, unsigned char byte) const {
  while (true) {
    const auto found = states_[state].next.find(byte);
    if (found != states_[state].next.end()) return found->second;
    if (state == 0) return 0;
    state = states_[state].fallback;
  }
}

StopMatcher::Step StopMatcher::push(std::string_view text) {
  Step step;
  for (size_t i = 0; i < text.size() && !stopped_; ++i) {
    state_ = advance(state_, static_cast<unsigned char>(text[i]));
    held_ += text[i];
    const State& state = states_[state_];
    if (state.matched_bytes > 0) {
      matched_ = held_.substr(held_.size() - state.matched_bytes);
      held_.resize(held_.size() - state.matched_bytes);
      step.text += held_;
      held_.clear();
      stopped_ = true;
    } else if (state.length == 0) {
      step.text += held_;
      held_.clear();
    } else if (held_.size() > state.length) {
      const size_t released = held_.size() - state.length;
      step.text.append(held_, 0, released);
      held_.erase(0, released);
    }
  }
  step.stopped = stopped_;
  step.matched = matched_;
  return step;
}

std::string StopMatcher::flush() { return std::exchange(held_, {}); }

}  // namespace clo
