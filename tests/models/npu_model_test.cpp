// The whole model on the simulated NPU against the CPU.
#include <ATen/TensorOperators.h>
#include <ATen/ops/equal.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "device/graph.h"
#include "device/sim/simulation.h"
#include "models/gradients.h"
#include "models/tiny_model.h"
#include "testing/device.h"
#include "testing/message_of.h"

namespace heddle {
namespace {

using testing::differentiate;
using testing::Gradients;

/// Every kernel the reference, or the device's own.
enum class Kernels { kReference, kOwn };

/// Gradients of one packed batch of ragged sequences.
Gradients gradients_on(c10::Device device, c10::ScalarType dtype, bool moe,
                       parallel::Recompute recompute, Kernels kernels = Kernels::kReference) {
  ops::KernelPolicy policy;
  policy.allow_fallback = true;
  const auto config = testing::tiny_model(dtype, moe, c10::Device(at::kCPU));
  for (const auto& request : models::kernel_requests(config->config())) {
    if (kernels == Kernels::kReference) policy.named[request.op] = "reference";
  }
  const auto model = testing::tiny_model(dtype, moe, device, policy);
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
      const Gradients expected = gradients_on(cpu, dtype, GetParam(), recompute);
      for (const Kernels kernels : {Kernels::kReference, Kernels::kOwn})
        expect_equal(gradients_on(npu, dtype, GetParam(), recompute, kernels), expected, tolerance);
    }
  }
}

// Waits of a training step are written down here: another wait in the hot path is an
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

TEST(SimulatedModelGraph, HoldsTheForwardAndBackwardPassOfAStep) {
  const c10::Device npu = testing::simulated_npu();
  ops::KernelPolicy policy;
  policy.allow_fallback = true;
  const auto model = testing::tiny_model(at::kFloat, false, npu, policy);
  const std::vector<data::Batch> batches = {testing::batch_of({{1, 70}, {3, 64}})};
  const Gradients expected = differentiate(*model, batches, parallel::Recompute::kOff);
  parallel::Pipeline pipeline(assembly::block_entries(*model), true);
  const std::vector<objective::HeadFunction> heads(1, objective::language_model_head(*model, 1));
  train::MicroBatchLoss loss;
  const auto graph = device::record(npu, [&] {
    loss = train::run_micro_batches(*model, nullptr, pipeline, model->parameters(), batches, heads,
                                    {});
  });
  EXPECT_TRUE(std::isnan(loss.loss_sum.item<double>())) << "it has run";
  graph->replay();
  EXPECT_EQ(loss.loss_sum.item<double>(), expected.loss);
  model->visit_parameters([&](nn::Parameter& parameter) {
    const at::Tensor exact = expected.by_name.at(parameter.name());
    EXPECT_TRUE(at::equal(parameter.gradient(), exact)) << parameter.name();
  });
}

/// Error of building a model for a device.
std::string message_of_building(c10::Device device) {
  return testing::message_of([&] {
    ops::KernelPolicy policy;
    policy.allow_fallback = true;
    testing::tiny_model(at::kFloat, false, device, policy);
  });
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
