#pragma once
// StepRecorder: the kernels of a decode step, one call each, launched into the runner's stream
// while it is captured. The runner strings them together; measurements take one kind alone.
#include "cuda/runner.h"

namespace clo {

class StepRecorder {
 public:
  // `rows`: of the bucket. The runner outlives the recorder.
  StepRecorder(CudaRunner& runner, int32_t rows,
               kernels::MassLooks looks = kernels::MassLooks::kNone)
      : runner_(runner), rows_(rows), looks_(looks) {}

  void begin();
  // Adds what the last product left to the residual stream and normalises it.
  void norm(const float* weight);
  void predict_queries(int32_t layer);  // of the layer to come, from the residual stream as it is
  void qkv(int32_t layer);
  void rows(int32_t layer);
  void attend(int32_t layer);
  void mass();  // after the last layer's attention
  void output(int32_t layer);
  void gate_up(int32_t layer);
  void silu(int32_t layer);
  void down(int32_t layer);
  void head();
  void sample(const GraphKey& key);

 private:
  // out = x weight^T in parts, by the weight-streaming kernels or, for many rows of plain weights,
  // by the library. Returns the number of parts.
  int32_t product(const WeightView& weight, const void* x, float* parts,
                  int32_t max_splits = kernels::kSkinnyMaxSplits);
  const LayerWeights& weights(int32_t layer) const {
    return runner_.weights_.layers()[static_cast<size_t>(layer)];
  }

  CudaRunner& runner_;
  int32_t rows_;
  kernels::MassLooks looks_;
  int32_t parts_ = 0;                   // of the last product, waiting in the parts buffer
  bool parts_to_add_ = false;           // ... to be added to the residual stream
  const float* bias_to_add_ = nullptr;  // with them
};

}  // namespace clo
