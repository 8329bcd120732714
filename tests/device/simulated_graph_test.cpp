// Work that the simulated NPU records and replays.
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <c10/core/AutogradState.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>

#include "device/graph.h"
#include "device/sim/simulation.h"
#include "testing/message_of.h"

namespace heddle::device::sim {
namespace {

using heddle::testing::message_of;
using ::testing::HasSubstr;

const c10::Device kNpu(c10::DeviceType::PrivateUse1, 0);

double first(const at::Tensor& x) { return x.cpu().view({-1})[0].item<double>(); }

class SimulatedGraph : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { start(); }
};

TEST_F(SimulatedGraph, RunsNothingUntilItIsReplayed) {
  const at::Tensor x = at::ones({3}, kNpu), sum = at::zeros({3}, kNpu);
  at::Tensor y;
  const auto graph = record(kNpu, [&] {
    y = x * 2 + 1;
    sum.add_(y);
  });
  EXPECT_EQ(first(sum), 0);
  EXPECT_TRUE(std::isnan(first(y)));
  for (int run = 1; run <= 2; ++run) {
    graph->replay();
    EXPECT_EQ(first(y), 3);
    EXPECT_EQ(first(sum), 3 * run);
  }
  x.fill_(5);
  graph->replay();
  EXPECT_EQ(first(y), 11);
  EXPECT_EQ(first(sum), 17);
}

TEST_F(SimulatedGraph, KeepsViewsCopiesAndTheHostsMemory) {
  const at::Tensor base = at::zeros({2, 4}, kNpu), host = at::full({4}, 3.0).pin_memory();
  at::Tensor joined;
  const auto graph = record(kNpu, [&] {
    const at::Tensor there = host.to(kNpu, /*non_blocking=*/true);
    base.select(0, 1).copy_(there * 2);
    base.t().narrow(0, 0, 1).add_(1);
    joined = at::cat({base, there.view({1, 4})});
  });
  host.fill_(4);
  graph->replay();
  const at::Tensor expected = at::zeros({3, 4});
  expected.select(0, 1).fill_(8);
  expected.narrow(0, 0, 2).narrow(1, 0, 1).add_(1);
  expected.select(0, 2).fill_(4);
  EXPECT_TRUE(at::equal(joined.cpu(), expected)) << joined.cpu();
}

TEST_F(SimulatedGraph, HoldsAForwardAndABackwardPass) {
  // As training does: what another thread queues is not recorded.
  c10::AutogradState& autograd = c10::AutogradState::get_tls_state();
  autograd.set_multithreading_enabled(false);
  const at::Tensor x = at::zeros({5, 7}, kNpu), w = at::randn({3, 7}).to(kNpu);
  at::Tensor gradient;
  const auto graph = record(kNpu, [&] {
    const at::Tensor leaf = w.detach().set_requires_grad(true);
    (x.matmul(leaf.t()).tanh() * 0.5).sum().backward();
    gradient = leaf.grad();
  });
  for (int run = 0; run < 2; ++run) {
    const at::Tensor input = at::randn({5, 7});
    x.copy_(input);
    graph->replay();
    const at::Tensor leaf = w.cpu().set_requires_grad(true);
    (input.matmul(leaf.t()).tanh() * 0.5).sum().backward();
    EXPECT_TRUE(at::equal(gradient.cpu(), leaf.grad()));
  }
  autograd.set_multithreading_enabled(true);
}

// On hardware the wait would end the recording, or read what has not run.
TEST_F(SimulatedGraph, RefusesToWait) {
  const at::Tensor x = at::ones({3}, kNpu);
  for (const std::function<void()>& wait : {std::function<void()>([&] { x.sum().item(); }),
                                            {[&] { (void)x.cpu(); }},
                                            {[&] { (void)at::ones({3}).to(kNpu); }},
                                            {[&] { (void)x.nonzero(); }},
                                            {[&] { record(kNpu, [] {}); }}}) {
    EXPECT_THAT(message_of([&] {
                  record(kNpu, [&] {
                    x.add_(1);
                    wait();
                  });
                }),
                HasSubstr("rule capture"));
    EXPECT_EQ(first(x), 1) << "what was recorded until then has run";
  }
  EXPECT_EQ(message_of([&] { record(kNpu, [&] { x.add_(1); })->replay(); }), "(no error)");
  EXPECT_EQ(first(x), 2);
}

}  // namespace
}  // namespace heddle::device::sim
