// Entry points of the vendor that the back end calls, and that the simulation stands in for each.
#include <ATen/TensorOperators.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <stdexcept>

#include "device/device.h"
#include "device/graph.h"
#include "device/sim/simulation.h"
#include "testing/entry_points.h"

namespace heddle::device {
namespace {

/// All that device.h and graph.h offer, on the simulated device.
void use_everything() {
  std::string why_none;
  accelerators(why_none);
  const c10::Device npu = parse("npu:1");
  start(npu);
  platform();
  const at::Tensor x = at::ones({3}, npu);
  memory(npu);
  const auto graph = record(npu, [&] { x.add_(1); });
  graph->replay();
  try {
    record(npu, [] { throw std::runtime_error("of the work"); });
  } catch (const std::runtime_error&) {
  }
  synchronize(npu);
  finish();
}

// In a process of its own: what is finished cannot start again.
TEST(SimulatedEntryPointsDeathTest, EachOneThatTheBackEndCallsIsStoodInFor) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        setenv(sim::kVariable, "1", /*overwrite=*/1);
        use_everything();
        const auto missing = testing::print_coverage({"device/npu/npu.cpp", "device/npu/graph.cpp"},
                                                     sim::entry_calls());
        for (const std::string& entry : missing)
          std::fprintf(stderr, "not simulated: %s\n", entry.c_str());
        std::exit(missing.empty() ? 0 : 1);
      },
      ::testing::ExitedWithCode(0), "");
  EXPECT_GE(testing::entry_points_of("device/npu/npu.cpp").size(), 8u);
  EXPECT_GE(testing::entry_points_of("device/npu/graph.cpp").size(), 9u);
}

}  // namespace
}  // namespace heddle::device
