#pragma once
// The seam between what is computed and where: one implementation per backend, chosen once at
// start. Calls come from the engine thread, in order; each has finished (or, on a device, is
// ordered after the ones before it) when the next is made.
#include <string>

#include "ops/params.h"

namespace clo {

class Ops {
 public:
  virtual ~Ops() = default;

  // One line for reports: instruction set or device, threads.
  virtual std::string description() const = 0;

  virtual void embed(const EmbedParams& params) = 0;
  virtual void rms_norm(const RmsNormParams& params) = 0;
  virtual void linear(const LinearParams& params) = 0;
  virtual void rotary_table(const RotaryTableParams& params) = 0;
  virtual void rotate(const RotateParams& params) = 0;
  virtual void gated_silu(const GatedSiluParams& params) = 0;

  virtual void append(const AppendParams& params) = 0;
  virtual void prefill_attention(const PrefillAttentionParams& params) = 0;

  virtual void cosine(const CosineParams& params) = 0;
  virtual void select(const SelectParams& params) = 0;
  virtual void attend(const AttendParams& params) = 0;
  virtual void full_scores(const FullScoreParams& params) = 0;
  virtual void key_spread(const KeySpreadParams& params) = 0;
};

}  // namespace clo
