#include "kernels/linear/matmul.h"

#include <gtest/gtest.h>

#include <cmath>

#include "kernels/gpu_test.h"

namespace clo::kernels {
namespace {

class MatmulTest : public GpuTest {
 protected:
  // out = x weight^T + bias (+ what was there) against the same in f64.
  static void expect_matches_reference(Matmul& matmul, const MatmulShape& shape) {
    const auto weight_bits =
        to_bits(shape.type, random_floats(shape.num_outputs * shape.num_inputs, 1,
                                          1 / std::sqrt(static_cast<float>(shape.num_inputs))));
    const auto x_bits = to_bits(shape.type, random_floats(shape.rows * shape.num_inputs, 2));
    const auto bias_bits = to_bits(shape.type, random_floats(shape.num_outputs, 3));
    const std::vector<float> weight = from_bits(shape.type, weight_bits),
                             x = from_bits(shape.type, x_bits),
                             bias = from_bits(shape.type, bias_bits);
    const std::vector<float> before = random_floats(shape.rows * shape.num_outputs, 4);

    const DeviceArray<uint16_t> device_weight(weight_bits), device_x(x_bits), bias_16(bias_bits);
    const DeviceArray<float> bias_f32(bias);
    const bool f32 = shape.out_type == DType::kF32;
    const void* device_bias = f32 ? static_cast<const void*>(bias_f32.data()) : bias_16.data();
    std::vector<float> actual;
    if (f32) {
      const DeviceArray<float> out(before);
      matmul.run(shape, device_x.data(), device_weight.data(), shape.bias ? device_bias : nullptr,
                 out.data(), nullptr);
      CLO_CUDA(cudaDeviceSynchronize());
      actual = out.download();
    } else {
      const DeviceArray<uint16_t> out(shape.rows * shape.num_outputs);
      matmul.run(shape, device_x.data(), device_weight.data(), shape.bias ? device_bias : nullptr,
                 out.data(), nullptr);
      CLO_CUDA(cudaDeviceSynchronize());
      actual = from_bits(shape.type, out.download());
    }
    const double tolerance = f32 ? 5e-5 : 1.0 / 128;
    for (int64_t r = 0; r < shape.rows; ++r) {
      for (int64_t n = 0; n < shape.num_outputs; ++n) {
        const auto i = static_cast<size_t>(r * shape.num_outputs + n);
        double sum = shape.bias ? static_cast<double>(bias[static_cast<size_t>(n)]) : 0;
        if (shape.accumulate) sum += static_cast<double>(before[i]);
        for (int64_t k = 0; k < shape.num_inputs; ++k) {
          sum += static_cast<double>(weight[static_cast<size_t>(n * shape.num_inputs + k)]) *
                 static_cast<double>(x[static_cast<size_t>(r * shape.num_inputs + k)]);
        }
        ASSERT_NEAR(static_cast<double>(actual[i]), sum, tolerance * (1 + std::abs(sum)))
            << shape.rows << " x " << shape.num_outputs << " x " << shape.num_inputs << ", at "
            << i;
      }
    }
  }
};

TEST_F(MatmulTest, MatchesReference) {
  const DeviceArray<std::byte> workspace(kMatmulWorkspaceBytes);
  Matmul matmul(workspace.data(), kMatmulWorkspaceBytes);
  const int64_t sizes[][3] = {{17, 512, 256}, {33, 1408, 256}, {64, 256, 704}, {300, 101, 264}};
  for (const auto& [rows, outputs, inputs] : sizes) {
    for (const auto& [type, bias] : {std::pair(DType::kBF16, false), std::pair(DType::kBF16, true),
                                     std::pair(DType::kF16, false), std::pair(DType::kF16, true)}) {
      if (outputs % 8 == 0) {  // odd rows of 16 bits are not aligned; no model has them
        expect_matches_reference(matmul, {rows, outputs, inputs, type, bias, false, type});
      }
      expect_matches_reference(matmul, {rows, outputs, inputs, DType::kF32, bias, false, type});
      expect_matches_reference(matmul, {rows, outputs, inputs, DType::kF32, bias, true, type});
    }
  }
  // A shape that is known already.
  expect_matches_reference(matmul, {17, 512, 256, DType::kF32, false, false});
}

TEST_F(MatmulTest, RunsInsideAGraphOncePrepared) {
  const DeviceArray<std::byte> workspace(kMatmulWorkspaceBytes);
  Matmul matmul(workspace.data(), kMatmulWorkspaceBytes);
  const MatmulShape shape{32, 512, 256, DType::kF32, false, false};
  matmul.prepare(shape);
  const DeviceArray<uint16_t> weight(to_bits(shape.type, random_floats(512 * 256, 1)));
  const DeviceArray<uint16_t> x(to_bits(shape.type, random_floats(32 * 256, 2)));
  const DeviceArray<float> direct(32 * 512), replayed(32 * 512);
  matmul.run(shape, x.data(), weight.data(), nullptr, direct.data(), nullptr);
  CLO_CUDA(cudaDeviceSynchronize());

  cudaStream_t stream = nullptr;
  CLO_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  CLO_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  matmul.run(shape, x.data(), weight.data(), nullptr, replayed.data(), stream);
  cudaGraph_t graph = nullptr;
  CLO_CUDA(cudaStreamEndCapture(stream, &graph));
  cudaGraphExec_t executable = nullptr;
  CLO_CUDA(cudaGraphInstantiate(&executable, graph, 0));
  CLO_CUDA(cudaGraphLaunch(executable, stream));
  CLO_CUDA(cudaStreamSynchronize(stream));
  EXPECT_EQ(direct.download(), replayed.download());
  (void)cudaGraphExecDestroy(executable);
  (void)cudaGraphDestroy(graph);
  (void)cudaStreamDestroy(stream);
}

}  // namespace
}  // namespace clo::kernels
