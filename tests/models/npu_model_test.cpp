// The whole model on the simulated NPU against the CPU.
#include <ATen/TensorOperators.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "device/sim/simulation.h"
#include "models/gradients.h"
#include "models/tiny_model.h"
#include "testing/device.h"

namespace heddle {
namespace {

using testing::differentiate;
using testing::Gradients;

/// Of one packed batch of ragged sequences, every kernel the reference, so that the devices run the
/// same algorithms.
Gradients gradients_on(c10::Device device, c10::ScalarType dtype, bool moe,
                       parallel::Recompute recompute) {
  ops::KernelPolicy references;
  references.allow_fallback = true;
  const auto config = testing::tiny_model(dtype, moe, c10::Device(at::kCPU));
  for (const auto& request : models::qwen3_5::kernel_requests(config->config()))
    references.chosen_by_user[request.op] = "reference";
  const auto model = testing::tiny_model(dtype, moe, device, references);
  Gradients result =
      differentiate(*model, {testing::batch_of({{1, 70}, {2, 1}, {3, 64}, {4, 29}})}, recompute,
                    /*auxiliary_scale=*/moe ? 0.01 : 0);
  for (auto& [name, gradient] : result.by_name) gradient = gradient.cpu();
  return result;
}

void expect_equal(const Gradients& found, const Gradients& expected, double tolerance) {
  EXPECT_NEAR(found.loss, expected.loss, tolerance * expected.loss);
  for (const auto& [name, gradient] : expected.by_name) {
    const at::Tensor exact = gradient.to(at::kDouble);
    const double error = (found.by_name.at(name).to(at::kDouble) - exact).norm().item<double>();
    EXPECT_LE(error, tolerance * exact.norm().item<double>()) << name;
  }
}

class SimulatedModel : public ::testing::TestWithParam<bool> {};

TEST_P(SimulatedModel, GradientsEqualTheCpus) {
  const c10::Device npu = testing::simulated_npu(), cpu(at::kCPU);
  for (const auto& [dtype, tolerance] : {std::pair{at::kDouble, 1e-9}, {at::kFloat, 1e-5}}) {
    for (const auto recompute : {parallel::Recompute::kOff, parallel::Recompute::kFull}) {
      expect_equal(gradients_on(npu, dtype, GetParam(), recompute),
                   gradients_on(cpu, dtype, GetParam(), recompute), tolerance);
    }
  }
}

// What a step of training waits for is written down here: another wait in the hot path is an
// accident.
TEST_P(SimulatedModel, WaitsOnlyWhereItMust) {
  ops::KernelPolicy policy;
  policy.allow_fallback = true;
  const auto model = testing::tiny_model(at::kFloat, GetParam(), testing::simulated_npu(), policy);
  const std::vector<data::Batch> batches = {testing::batch_of({{1, 70}, {3, 64}})};
  const auto step = [&] { differentiate(*model, batches, parallel::Recompute::kOff); };
  step();
  const auto before = device::sim::waits();
  step();
  device::sim::Counts expected = {{"aten::_local_scalar_dense", 1}};  // the loss
  if (GetParam()) {
    // In fp32 the host sorts the experts of each of the four layers, forward and backward.
    expected["aten::_copy_from"] = 8;
  }
  EXPECT_EQ(device::sim::waits_since(before), expected);
}

/// What building a model for a device throws.
std::string message_of_building(c10::Device device) {
  try {
    ops::KernelPolicy policy;
    policy.allow_fallback = true;
    testing::tiny_model(at::kFloat, false, device, policy);
  } catch (const std::exception& error) {
    return error.what();
  }
  return "(no error)";
}

// In a process of its own: the platform has not started.
TEST(SimulatedModelRuleDeathTest, StartOrder) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        setenv(device::sim::kVariable, "1", /*overwrite=*/1);
        const c10::Device npu = device::parse("npu:0");
        std::string text = message_of_building(npu);
        device::start(npu);
        text += message_of_building(npu);
        std::fputs(text.c_str(), stderr);
        std::exit(0);
      },
      ::testing::ExitedWithCode(0), "rule start-order: a model is made before.*\\(no error\\)");
}

INSTANTIATE_TEST_SUITE_P(DenseAndMoe, SimulatedModel, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "moe" : "dense"; });

}  // namespace
}  // namespace heddle
