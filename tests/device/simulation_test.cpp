#include "device/sim/simulation.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/index_put.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/zeros.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <map>
#include <regex>
#include <string>

#include "base/errors.h"
#include "base/files.h"
#include "device/device.h"
#include "device/require.h"
#include "device/sim/rules.h"
#include "testing/message_of.h"
#include "testing/paths.h"

namespace heddle::device::sim {
namespace {

using heddle::testing::message_of;
using ::testing::AllOf;
using ::testing::HasSubstr;

const c10::Device kNpu(c10::DeviceType::PrivateUse1, 0);

class Simulation : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { start(); }
};

TEST_F(Simulation, ComputesWhatTheCpuComputes) {
  const at::Tensor a = at::randn({29, 63}), b = at::randn({63, 17});
  const at::Tensor c = at::mm(a.to(kNpu), b.to(kNpu));
  EXPECT_EQ(c.device(), kNpu);
  EXPECT_TRUE(at::equal(c.cpu(), at::mm(a, b)));
  EXPECT_EQ(c.device().str(), "npu:0");
}

TEST_F(Simulation, ViewsShareTheMemoryOfTheirBase) {
  at::Tensor base = at::zeros({4, 6}, kNpu);
  base.select(0, 1).fill_(3);
  base.t().slice(0, 2, 4).add_(1);
  base.view({24}).unfold(0, 2, 2).select(1, 0).mul_(2);
  at::Tensor expected = at::zeros({4, 6});
  expected.select(0, 1).fill_(3);
  expected.t().slice(0, 2, 4).add_(1);
  expected.view({24}).unfold(0, 2, 2).select(1, 0).mul_(2);
  EXPECT_TRUE(at::equal(base.cpu(), expected));
  EXPECT_TRUE(base.t().is_alias_of(base));
}

TEST_F(Simulation, ResizesTheOutputItIsGiven) {
  at::Tensor out = at::empty({0}, at::TensorOptions(kNpu).dtype(at::kFloat));
  at::arange_out(out, 7);
  EXPECT_TRUE(at::equal(out.cpu(), at::arange(7, at::kFloat)));
  const at::Tensor same = out.resize_({3, 5});
  EXPECT_TRUE(same.is_same(out));
  EXPECT_EQ(out.fill_(2).sum().item<float>(), 30);
}

TEST_F(Simulation, RunsListsIndicesAndSeveralResults) {
  std::vector<at::Tensor> list = {at::ones({3}, kNpu), at::zeros({2, 2}, kNpu)};
  at::_foreach_add_(list, 1);
  EXPECT_EQ(list[0].sum().item<float>() + list[1].sum().item<float>(), 10);
  const at::Tensor values = at::randn({65});
  const auto [sorted, order] = at::sort(values.to(kNpu));
  EXPECT_TRUE(at::equal(values.index_select(0, order.cpu()), sorted.cpu()));
  at::Tensor table = at::zeros({5}, kNpu);
  table.index_put_({at::arange(2, kNpu)}, at::ones({2}, kNpu));
  EXPECT_EQ(table.sum().item<float>(), 2);
}

TEST_F(Simulation, GivesTheGradientsOfTheCpu) {
  const at::Tensor x = at::randn({5, 7}), w = at::randn({3, 7});
  const auto gradient = [&](c10::Device device) {
    const at::Tensor input = x.clone().to(device).set_requires_grad(true);
    const at::Tensor loss = (input.matmul(w.to(device).t()).tanh() * 0.5).sum();
    loss.backward();
    return input.grad().cpu();
  };
  EXPECT_TRUE(at::equal(gradient(kNpu), gradient(c10::Device(c10::kCPU))));
}

TEST_F(Simulation, DrawsRandomNumbersFromItsOwnGenerator) {
  const at::Tensor a = at::randn({129}, kNpu).cpu(), b = at::randn({129}, kNpu).cpu();
  EXPECT_FALSE(at::equal(a, b));
}

TEST_F(Simulation, CountsMemory) {
  auto* const memory = c10::getDeviceAllocator(c10::DeviceType::PrivateUse1);
  const auto held = [&] { return memory->getDeviceStats(0).allocated_bytes[0].current; };
  const auto before = held();
  {
    const at::Tensor a = at::zeros({1000}, kNpu), b = a + 1, view = b.view({10, 100});
    EXPECT_EQ(held() - before, 8000);
  }
  EXPECT_EQ(held(), before);
  EXPECT_GE(memory->getDeviceStats(0).allocated_bytes[0].peak, before + 8000);
}

TEST_F(Simulation, HasDevicesAndStreams) {
  const c10::impl::VirtualGuardImpl guard(c10::DeviceType::PrivateUse1);
  EXPECT_EQ(guard.deviceCount(), kDevices);
  {
    const c10::DeviceGuard on_third(c10::Device(c10::DeviceType::PrivateUse1, 3));
    EXPECT_EQ(at::zeros({2}, at::TensorOptions(c10::DeviceType::PrivateUse1)).device().index(), 3);
  }
  const c10::Stream side = guard.getNewStream(kNpu), main = guard.exchangeStream(side);
  EXPECT_NE(side, main);
  EXPECT_EQ(guard.getStream(kNpu), side);
  guard.exchangeStream(main);
}

TEST_F(Simulation, CountsWaitsOfTheHost) {
  const at::Tensor x = at::ones({3}, kNpu);
  const Counts before = waits();
  const at::Tensor y = (x + 1).to(at::kBFloat16).view({3, 1});
  EXPECT_EQ(waits_since(before), Counts());
  (void)at::ones({2}).pin_memory().to(kNpu, /*non_blocking=*/true);
  EXPECT_EQ(waits_since(before), Counts());
  (void)at::ones({2}).to(kNpu, /*non_blocking=*/true);  // not pinned: read before it returns
  y.sum().item();
  (void)y.cpu();
  at::equal(x, x);
  EXPECT_EQ(
      waits_since(before),
      (Counts{{"aten::_local_scalar_dense", 1}, {"aten::_copy_from", 2}, {"aten::equal", 1}}));
}

TEST_F(Simulation, RecordsCalls) {
  const at::Tensor a = at::ones({2, 3}, kNpu), b = at::ones({3, 4}, kNpu);
  const Recording recording;
  (void)at::mm(a, b);
  const auto calls = recording.calls();
  ASSERT_EQ(calls.size(), 1);
  EXPECT_EQ(calls[0].op, "aten::mm");
  EXPECT_EQ(calls[0].sizes, (std::vector<std::vector<std::int64_t>>{{2, 3}, {3, 4}}));
}

TEST(SimulationOptions, AreReadFromTheVariable) {
  EXPECT_EQ(parse_options("1"), Options());
  EXPECT_EQ(parse_options("float64,deferred"),
            (Options{.allow_float64 = true, .defers_streams = true}));
  EXPECT_EQ(parse_options("fp8"), Options{.has_fp8 = true});
  for (const char* wrong : {"", "0", "true", "float64,", "1,float64", "float32"})
    EXPECT_FALSE(parse_options(wrong)) << wrong;
}

using SimulationRule = Simulation;

TEST_F(SimulationRule, HostAccess) {
  const at::Tensor x = at::ones({3}, kNpu);
  EXPECT_THAT(message_of([&] { (void)x.const_data_ptr<float>(); }), HasSubstr("rule host-access"));
  EXPECT_THAT(message_of([&] { (void)(x + 1).mutable_data_ptr(); }), HasSubstr("rule host-access"));
  EXPECT_THAT(message_of([&] { (void)x.view({1, 3}).data_ptr(); }), HasSubstr("rule host-access"));
  EXPECT_EQ(x.cpu().const_data_ptr<float>()[2], 1);
}

TEST_F(SimulationRule, MixedDevices) {
  const at::Tensor x = at::ones({3}, kNpu);
  EXPECT_THAT(message_of([&] { (void)(x + at::ones({3})); }), HasSubstr("rule mixed-devices"));
  EXPECT_THAT(message_of([&] { (void)x.index({at::arange(2)}); }), HasSubstr("rule mixed-devices"));
  EXPECT_EQ((x + at::ones({})).sum().item<float>(), 6);
}

TEST_F(SimulationRule, Dtype) {
  EXPECT_THAT(message_of([] { require_dtype(kNpu, at::kDouble, "model.dtype"); }),
              HasSubstr("model.dtype: float64 is not available on device npu"));
  EXPECT_EQ(message_of([] { require_dtype(kNpu, at::kFloat, "model.dtype"); }), "(no error)");
  EXPECT_THAT(message_of([] { (void)at::ones({3}, at::TensorOptions(kNpu).dtype(at::kDouble)); }),
              HasSubstr("rule dtype"));
  EXPECT_THAT(message_of([] { (void)at::ones({3}, kNpu).to(at::kDouble); }),
              HasSubstr("rule dtype"));
  EXPECT_THAT(message_of([] { (void)at::ones({3}, kNpu).to(at::kFloat8_e4m3fn); }),
              HasSubstr("rule dtype"));
  EXPECT_EQ(at::ones({3}, kNpu).to(at::kBFloat16).scalar_type(), at::kBFloat16);
}

TEST_F(SimulationRule, Tile) {
  // A known failure asked for 1,840,384 bits where 1,572,864 were available.
  EXPECT_THAT(message_of([] { require_on_chip(kNpu, "causal_conv1d", 1840384 / 8); }),
              AllOf(HasSubstr("rule tile"), HasSubstr("230048"), HasSubstr("196608")));
  EXPECT_EQ(message_of([] { require_on_chip(kNpu, "causal_conv1d", 196608); }), "(no error)");
}

// P12: the platform starts once; the same start again changes nothing, and another device is taken
// over once.
TEST_F(Simulation, P12StartsOnceAndTakesAnotherDevice) {
  const at::Tensor before = at::ones({3}, kNpu);
  const auto current = [] { return c10::impl::VirtualGuardImpl(kNpu.type()).getDevice(); };
  device::start(kNpu);
  EXPECT_EQ(current(), kNpu);
  EXPECT_EQ((before + 1).sum().item<float>(), 6);
  const c10::Device other(kNpu.type(), 1);
  device::start(other);
  device::start(other);
  EXPECT_EQ(current(), other);
  EXPECT_EQ((before + 1).sum().item<float>(), 6);
  device::start(kNpu);
  EXPECT_EQ(current(), kNpu);
}

TEST_F(SimulationRule, StartOrder) {
  start();
  EXPECT_THAT(message_of([] { start({.allow_float64 = true}); }), HasSubstr("rule start-order"));
  EXPECT_EQ(message_of([] { require_started(kNpu, "a model"); }), "(no error)");
}

// In a process of its own: a chip of another kind.
TEST(SimulationRuleDeathTest, DtypeOfAChipWithFp8) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        start({.has_fp8 = true});
        const at::Tensor x = at::ones({3}, kNpu).to(at::kFloat8_e4m3fn);
        std::exit(x.to(at::kFloat).sum().item<float>() == 3 ? 0 : 1);
      },
      ::testing::ExitedWithCode(0), "");
}

/// The rows of the table of rules in the README: rule -> "Suite.Test".
std::map<std::string, std::string> table_of_rules() {
  const std::string text = files::read(testing::source_path("src/device/sim/README.md"));
  static const std::regex kRow(R"(\| ([a-z-]+) \| [^|]+ \| (\w+\.\w+) \|)");
  std::map<std::string, std::string> rows;
  for (std::sregex_iterator row(text.begin(), text.end(), kRow), end; row != end; ++row)
    rows[(*row)[1]] = (*row)[2];
  return rows;
}

TEST(SimulationRules, EachIsInTheTableAndHasItsTest) {
  std::string tests;
  for (const auto& entry :
       std::filesystem::recursive_directory_iterator(testing::source_path("tests"))) {
    if (entry.path().extension() == ".cpp") tests += files::read(entry.path());
  }
  const auto table = table_of_rules();
  constexpr int kRules = static_cast<int>(Rule::kBoundGroup) + 1;
  EXPECT_EQ(table.size(), kRules);
  for (int rule = 0; rule < kRules; ++rule) {
    const auto row = table.find(name(static_cast<Rule>(rule)));
    ASSERT_NE(row, table.end()) << name(static_cast<Rule>(rule));
    const auto dot = row->second.find('.');
    EXPECT_THAT(tests, HasSubstr("(" + row->second.substr(0, dot) + ", " +
                                 row->second.substr(dot + 1) + ")"));
  }
}

// In a process of its own: what is finished cannot start again.
TEST(SimulationRuleDeathTest, Lifetime) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        install();
        std::string text = message_of([] { require_started(kNpu, "a model"); });
        text += message_of([] { (void)at::ones({3}, kNpu); });
        start();
        const at::Tensor x = at::ones({3}, kNpu);
        finish();
        text += message_of([&] { (void)(x + 1); }) + message_of([&] { (void)x.cpu(); }) +
                message_of([] { start(); });
        std::fputs(text.c_str(), stderr);
        std::exit(0);
      },
      ::testing::ExitedWithCode(0),
      "rule start-order: a model.*rule lifetime.*before the start.*rule lifetime.*after the "
      "end.*rule lifetime.*rule "
      "start-order");
}

}  // namespace
}  // namespace heddle::device::sim
