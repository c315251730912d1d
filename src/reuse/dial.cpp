#include "reuse/dial.h"

#include <algorithm>
#include <cmath>

namespace clo {

namespace {

// A knob moves by the root of the ratio of allowed to measured loss (which falls about as fast as
// a knob's square, or slower), and no further than by the factor `widest`.
double step(double ratio, double widest) {
  return std::clamp(std::sqrt(ratio), 1 / widest, widest);
}

// A window of samples is a rough measure; a look at every head a good one.
constexpr double kWidestTurn = 1.25, kWidestStart = 2;

}  // namespace

void Dial::add(double kept, bool fresh) {
  if (!std::isfinite(kept)) return;
  ++samples_;
  sum_ += kept;
  square_sum_ += kept * kept;
  ++(fresh ? fresh_ : kept_);
  (fresh ? fresh_loss_ : kept_loss_) += 1 - kept;
  if (fresh_ + kept_ >= kWindow) turn(kWidestTurn);
}

void Dial::add_first(double kept) {
  if (!std::isfinite(kept)) return;
  ++fresh_;
  fresh_loss_ += 1 - kept;
}

void Dial::start() {
  if (fresh_ > 0) turn(kWidestStart);
}

void Dial::turn(double widest) {
  const double allowed = 1 - quality_;
  const double all = static_cast<double>(fresh_ + kept_);
  const double kept_share = static_cast<double>(kept_) / all;
  const double mean_kept_loss = kept_ == 0 ? 0 : kept_loss_ / static_cast<double>(kept_);
  // Without fresh sets in the window: as if the kept ones had lost all of it by their size.
  const double fresh_loss = fresh_ == 0 ? std::min(mean_kept_loss, kFreshShare * allowed)
                                        : fresh_loss_ / static_cast<double>(fresh_);
  const double stale_loss = kept_share * std::max(0.0, mean_kept_loss - fresh_loss);
  // What one cause leaves, or takes in excess, because its knob is at an end, is the other's.
  double fresh_allowed = kept_ == 0 ? allowed : kFreshShare * allowed;
  double stale_allowed = allowed - fresh_allowed;
  const auto rest = [&](double loss) { return std::max(allowed - loss, 0.05 * allowed); };
  const bool angle_at_end =
      stale_loss < stale_allowed ? setting_.angle >= kMostAngle : setting_.angle <= kLeastAngle;
  const bool sets_at_end = fresh_loss < fresh_allowed ? setting_.set_scale <= kLeastSetScale
                                                      : setting_.set_scale >= most_set_scale_;
  if (angle_at_end && kept_ > 0) fresh_allowed = rest(stale_loss);
  if (sets_at_end) stale_allowed = rest(fresh_loss);
  constexpr double kNoLoss = 1e-9;
  setting_.set_scale =
      std::clamp(setting_.set_scale * step(std::max(fresh_loss, kNoLoss) / fresh_allowed, widest),
                 kLeastSetScale, most_set_scale_);
  if (kept_ > 0) {
    setting_.angle =
        std::clamp(setting_.angle * step(stale_allowed / std::max(stale_loss, kNoLoss), widest),
                   kLeastAngle, kMostAngle);
  }
  fresh_ = kept_ = 0;
  fresh_loss_ = kept_loss_ = 0;
}

MassEstimate Dial::estimate() const {
  MassEstimate e;
  e.samples = samples_;
  if (samples_ == 0) return e;
  const auto n = static_cast<double>(samples_);
  e.mean = sum_ / n;
  const double variance =
      samples_ < 2 ? 1 : std::max(0.0, (square_sum_ - n * e.mean * e.mean) / (n - 1));
  const double half = 1.96 * std::sqrt(variance / n);
  e.low = std::max(0.0, e.mean - half);
  e.high = std::min(1.0, e.mean + half);
  return e;
}

}  // namespace clo
