#pragma once
// The dial of one sequence: keeps the share of attention mass that decode steps attend to near a
// wanted value (`--quality`) by two knobs, the size of sets and the angle that a query may move
// away from a label. It sees samples of the mass, never all of it. Pure.
//
// Mass is lost in two ways, and samples tell them apart: a set just chosen leaves rows out (its
// size is the remedy), and a set that was kept no longer fits (the angle is). The allowed loss, 1 -
// quality, is divided between the two; each knob follows the loss that it governs, so that neither
// pays for the other.
#include <cstdint>

namespace clo {

struct DialSetting {
  double set_scale = 1;  // of the policy's set size
  double angle = 1;      // of the angle that a threshold allows
};

// Of the mean mass kept: over the samples, with the 95 % interval of their mean.
struct MassEstimate {
  int64_t samples = 0;
  double mean = 0, low = 0, high = 0;
};

class Dial {
 public:
  static constexpr double kLeastSetScale = 0.125;
  // The policy's thresholds are the loosest: the mean mass hardly falls where they are looser, but
  // few heads lose much of theirs, and the answer shows it (docs/measurements).
  static constexpr double kMostAngle = 1, kLeastAngle = 0.0625;
  // Samples between two settings.
  static constexpr int64_t kWindow = 32;
  // Of the allowed loss: what fresh sets may take.
  static constexpr double kFreshShare = 0.7;

  // `most_set_scale`: slots are reserved for a set that is so many times the policy's.
  // Requires: 0 < quality < 1, most_set_scale >= 1.
  Dial(double quality, double most_set_scale)
      : quality_(quality), most_set_scale_(most_set_scale) {}

  // One head in one decode step: mass kept, the mean over its query heads, in [0, 1]. `fresh`: the
  // set was chosen in this step. A value that is not finite is left out.
  void add(double kept, bool fresh);
  // The same of the sets chosen at the end of a prompt: they are no decode step and no part of the
  // estimate, but every head is seen, so that one turn by all of them, start(), may be a wide one.
  void add_first(double kept);
  void start();

  double quality() const { return quality_; }
  const DialSetting& setting() const { return setting_; }
  MassEstimate estimate() const;

 private:
  void turn(double widest);

  double quality_, most_set_scale_;
  DialSetting setting_;
  int64_t samples_ = 0;
  double sum_ = 0, square_sum_ = 0;
  // Of the window: samples and their losses.
  int64_t fresh_ = 0, kept_ = 0;
  double fresh_loss_ = 0, kept_loss_ = 0;
};

}  // namespace clo
