// Measurements that need the runner's insides: one kind of kernel of a step alone, and the fetch
// path with and without products beside it.
#include "base/check.h"
#include "cuda/step_recorder.h"
#include "kernels/refresh/refresh.h"

namespace clo {

using namespace kernels;

std::vector<CudaRunner::StageWork> CudaRunner::stage_work(int32_t rows) {
  const ModelConfig& c = weights_.config();
  const KvShape& shape = system_.shape;
  const LayerWeights& first = weights_.layers().front();
  const auto layers = static_cast<double>(shape.num_layers);
  const auto matrix = [](const WeightView& w) { return static_cast<double>(matrix_bytes(w)); };
  std::vector<StageWork> work;
  // A product that is not used by anything still runs; a norm without one reads the stream alone.
  const auto every_layer = [&](std::string name, double bytes,
                               void (StepRecorder::*stage)(int32_t)) {
    work.push_back({std::move(name), bytes, [this, rows, stage] {
                      StepRecorder step(*this, rows);
                      for (int32_t layer = 0; layer < system_.shape.num_layers; ++layer) {
                        (step.*stage)(layer);
                      }
                    }});
  };
  every_layer("qkv product", layers * matrix(first.qkv), &StepRecorder::qkv);
  work.push_back({"rows and decisions", 0, [this, rows] {
                    StepRecorder step(*this, rows);
                    step.qkv(0);
                    for (int32_t l = 0; l < system_.shape.num_layers; ++l) step.rows(l);
                  }});
  every_layer("attention", 0, &StepRecorder::attend);
  every_layer("output product", layers * matrix(first.output), &StepRecorder::output);
  every_layer("gate and up product", layers * matrix(first.gate_up), &StepRecorder::gate_up);
  every_layer("down product", layers * matrix(first.down), &StepRecorder::down);
  work.push_back({"norms (two a layer)",
                  2 * layers * static_cast<double>(rows * c.hidden_size) * (4 + 2), [this, rows] {
                    StepRecorder step(*this, rows);
                    for (int32_t l = 0; l < 2 * system_.shape.num_layers; ++l) {
                      step.norm(weights_.final_norm());
                    }
                  }});
  work.push_back({"gated silu", layers * static_cast<double>(rows * c.intermediate_size) * (8 + 2),
                  [this, rows] {
                    StepRecorder step(*this, rows);
                    step.gate_up(0);
                    for (int32_t l = 0; l < system_.shape.num_layers; ++l) step.silu(l);
                  }});
  work.push_back({"head product", matrix(weights_.head()), [this, rows] {
                    StepRecorder step(*this, rows);
                    step.head();
                  }});
  return work;
}

void CudaRunner::activate_all(std::span<const std::unique_ptr<SequenceKv>> batch) {
  std::vector<int32_t> slots(static_cast<size_t>(limits_.max_batch), -1);
  rows_.clear();
  for (size_t i = 0; i < batch.size(); ++i) {
    slots_->activate(*batch[i], 1);
    find_key_spread(*batch[i], batch[i]->num_tokens());
    slots[i] = slots_->slot_of(*batch[i]);
    rows_.push_back(batch[i].get());
  }
  CLO_CUDA(cudaMemcpy(buffers_.row_slot, slots.data(), slots.size() * sizeof(int32_t),
                      cudaMemcpyHostToDevice));
}

double CudaRunner::time_fetch(int32_t rows, bool products) {
  stop_refreshes();
  main_.synchronize();
  for (int32_t layer = 0; layer < system_.shape.num_layers; ++layer) {
    DecideAhead ahead;
    ahead.tables = tables_;
    ahead.queries = buffers_.predicted;
    ahead.layer = layer;
    ahead.rows = rows;
    decide_ahead(ahead, main_.get());
  }
  main_.synchronize();
  const Event start(true), stop(true);
  start.record(refresh_);
  refresh_queue(refresh_params(true), refresh_.get());
  stop.record(refresh_);
  if (products) {
    // Layers' products until the rows are there, as they run beside a fetch in a step.
    StepRecorder step(*this, rows);
    const auto running = [&] { return cudaStreamQuery(refresh_.get()) == cudaErrorNotReady; };
    while (running()) {
      for (int32_t layer = 0; layer < system_.shape.num_layers; ++layer) {
        step.qkv(layer);
        step.output(layer);
        step.gate_up(layer);
        step.down(layer);
      }
      // A step's worth at a time, so that little is left over when the fetch has ended.
      main_.synchronize();
    }
  }
  stop.synchronize();
  main_.synchronize();
  return static_cast<double>(stop.elapsed_ms(start)) * 1e-3;
}

}  // namespace clo
