// The whole model in bf16 on a GPU, with the kernels it would choose, against fp64 on the CPU.
#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <gtest/gtest.h>

#include <cmath>

#include "models/gradients.h"
#include "models/tiny_model.h"

namespace heddle {
namespace {

using models::qwen3_5::Model;

std::unique_ptr<Model> model_on(c10::Device device, c10::ScalarType dtype,
                                const ops::KernelPolicy& policy = {}) {
  // The heads' sizes are those of the published models.
  const nlohmann::ordered_json json = {
      {"model_type", "qwen3_5_text"}, {"vocab_size", 512},
      {"hidden_size", 256},           {"intermediate_size", 640},
      {"num_hidden_layers", 4},       {"num_attention_heads", 4},
      {"num_key_value_heads", 2},     {"head_dim", 256},
      {"linear_num_key_heads", 2},    {"linear_num_value_heads", 4},
      {"linear_key_head_dim", 128},   {"linear_value_head_dim", 128},
      {"initializer_range", 0.05},    {"tie_word_embeddings", true}};
  runtime::Context context;
  context.device = device;
  context.dtype = dtype;
  models::qwen3_5::ModelOptions options;
  options.kernel_policy = policy;
  auto model = std::make_unique<Model>(models::qwen3_5::parse_config(json, "test"), "model.",
                                       context, options);
  model->allocate();
  model->initialize(11);
  model->visit_parameters([](nn::Parameter& parameter) {
    at::Tensor data = parameter.data();
    if (parameter.name().ends_with("A_log")) data.fill_(-1.5);
    if (parameter.name().ends_with("dt_bias")) data.fill_(-0.5);
    data.copy_(data.to(at::kBFloat16));  // both see the same numbers
  });
  return model;
}

/// Root of the sum of squared differences over all parameters, relative to that of `expected`.
double relative_error(const testing::Gradients& found, const testing::Gradients& expected) {
  double error = 0, norm = 0;
  for (const auto& [name, gradient] : expected.by_name) {
    const at::Tensor difference =
        found.by_name.at(name).cpu().to(at::kDouble) - gradient.to(at::kDouble);
    const double e = difference.norm().item<double>(), n = gradient.norm().item<double>();
    EXPECT_LE(e, 0.08 * n) << name;
    error += e * e, norm += n * n;
  }
  return std::sqrt(error / norm);
}

// bf16 itself costs about 3 % at this shape: the reference kernels, which compute in fp32 between
// bf16 tensors, say how much exactly.
TEST(GpuModel, Bf16GradientsFollowFp64AsReferenceKernelsDo) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
  const c10::Device gpu(c10::DeviceType::CUDA, 0);
  const auto exact = model_on(c10::Device(c10::DeviceType::CPU), at::kDouble);
  const auto found = model_on(gpu, at::kBFloat16);
  ops::KernelPolicy references;
  for (const auto& request : models::qwen3_5::kernel_requests(exact->config()))
    references.chosen_by_user[request.op] = "reference";
  const auto reference = model_on(gpu, at::kBFloat16, references);
  // Ragged, and of one length, which attention may run otherwise.
  for (const auto& lengths : {std::vector<std::pair<int, int>>{{1, 300}, {2, 65}, {3, 190}},
                              std::vector<std::pair<int, int>>{{4, 256}, {5, 256}}}) {
    const std::vector<data::Batch> batches = {testing::batch_of(lengths)};
    const auto run = [&](Model& model, bool elementwise) {
      return testing::differentiate(model, batches, parallel::Recompute::kOff, 0, elementwise);
    };
    const auto expected = run(*exact, false);
    const double of_bf16 = relative_error(run(*reference, false), expected);
    for (const bool elementwise : {false, true}) {
      const auto actual = run(*found, elementwise);
      EXPECT_NEAR(actual.loss, expected.loss, 2e-3 * expected.loss);
      const double error = relative_error(actual, expected);
      EXPECT_LE(error, 1.1 * of_bf16);
      EXPECT_LE(error, 0.04);
      std::printf("relative RMS of all gradients: %.4f, reference kernels %.4f\n", error, of_bf16);
    }
  }
}

}  // namespace
}  // namespace heddle
