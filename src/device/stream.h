#pragma once
// Owners of streams, events and graphs. A destructor never throws: by then the device may be in
// error, and the first failed call has already been reported.
#include <cuda_runtime_api.h>

#include <utility>

#include "device/cuda_error.h"

namespace clo {

class Stream {
 public:
  // Lower numbers run first; cudaDeviceGetStreamPriorityRange gives the range (0 is the lowest).
  explicit Stream(int priority = 0) {
    CLO_CUDA(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, priority));
  }
  ~Stream() {
    if (stream_ != nullptr) (void)cudaStreamDestroy(stream_);
  }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  cudaStream_t get() const { return stream_; }
  // Blocks: until everything launched so far has finished.
  void synchronize() const { CLO_CUDA(cudaStreamSynchronize(stream_)); }

 private:
  cudaStream_t stream_ = nullptr;
};

class Event {
 public:
  // `timed`: elapsed_ms may be asked; costs a little more per record.
  explicit Event(bool timed = false) {
    CLO_CUDA(cudaEventCreateWithFlags(&event_, timed ? cudaEventDefault : cudaEventDisableTiming));
  }
  ~Event() {
    if (event_ != nullptr) (void)cudaEventDestroy(event_);
  }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  Event(Event&& other) noexcept : event_(std::exchange(other.event_, nullptr)) {}

  void record(const Stream& stream) const { CLO_CUDA(cudaEventRecord(event_, stream.get())); }
  // Work launched into `stream` from now on waits for the event.
  void make_wait(const Stream& stream) const {
    CLO_CUDA(cudaStreamWaitEvent(stream.get(), event_, 0));
  }
  void synchronize() const { CLO_CUDA(cudaEventSynchronize(event_)); }
  // Milliseconds from `start` to this event. Requires: both timed and passed.
  float elapsed_ms(const Event& start) const {
    float ms = 0;
    CLO_CUDA(cudaEventElapsedTime(&ms, start.event_, event_));
    return ms;
  }

 private:
  cudaEvent_t event_ = nullptr;
};

// A captured graph, ready to launch.
class GraphExec {
 public:
  GraphExec() = default;
  // Captures what `record` launches into `stream` (and streams that join it).
  template <typename Record>
  GraphExec(const Stream& stream, const Record& record) {
    CLO_CUDA(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal));
    cudaGraph_t graph = nullptr;
    try {
      record();
    } catch (...) {
      (void)cudaStreamEndCapture(stream.get(), &graph);
      if (graph != nullptr) (void)cudaGraphDestroy(graph);
      throw;
    }
    CLO_CUDA(cudaStreamEndCapture(stream.get(), &graph));
    const cudaError_t made = cudaGraphInstantiate(&exec_, graph, 0);
    (void)cudaGraphGetNodes(graph, nullptr, &num_nodes_);
    (void)cudaGraphDestroy(graph);
    check_cuda(made, "cudaGraphInstantiate");
  }
  ~GraphExec() { release(); }
  GraphExec(const GraphExec&) = delete;
  GraphExec& operator=(const GraphExec&) = delete;
  GraphExec(GraphExec&& other) noexcept
      : exec_(std::exchange(other.exec_, nullptr)), num_nodes_(other.num_nodes_) {}
  GraphExec& operator=(GraphExec&& other) noexcept {
    release();
    exec_ = std::exchange(other.exec_, nullptr);
    num_nodes_ = other.num_nodes_;
    return *this;
  }

  explicit operator bool() const { return exec_ != nullptr; }
  size_t num_nodes() const { return num_nodes_; }
  void launch(const Stream& stream) const { CLO_CUDA(cudaGraphLaunch(exec_, stream.get())); }

 private:
  void release() {
    if (exec_ != nullptr) (void)cudaGraphExecDestroy(exec_);
    exec_ = nullptr;
  }
  cudaGraphExec_t exec_ = nullptr;
  size_t num_nodes_ = 0;
};

}  // namespace clo
