// Process groups of the simulated NPU: what they compute, and what they refuse by name.
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <thread>

#include "comm/device_backend.h"
#include "comm/group.h"
#include "comm/mesh.h"
#include "comm/ranks.h"
#include "device/graph.h"
#include "device/sim/simulation.h"
#include "testing/device.h"
#include "testing/entry_points.h"
#include "testing/message_of.h"

namespace heddle::comm {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;
using testing::message_of;
using testing::run_ranks;

/// A process group of this rank alone, without a World: for what a Group would never do.
Backend lone_group(const std::string& name) {
  static const Store store = [] {
    Listener listener(std::uint16_t{0});
    return Store::serve(std::move(listener), Seconds(30));
  }();
  static int made = 0;
  DeviceGroupOptions options;
  options.name = name;
  options.ranks = {0};
  options.device = testing::simulated_npu();
  options.timeout = Seconds(10);
  return make_hccl(store.below(std::to_string(made++)), options);
}

TEST(SimulatedHccl, GivesWhatCollectivesPromise) {
  const c10::Device npu = testing::simulated_npu();
  const auto errors = run_ranks(2, [&](const std::shared_ptr<World>& world) {
    const Group group = Mesh({1, 1, 1, 2, 1}, world).world_group();
    const auto rank = static_cast<double>(group.rank());
    for (const auto dtype : {at::kFloat, at::kBFloat16, at::kLong}) {
      const auto options = at::TensorOptions(npu).dtype(dtype);
      at::Tensor sum = at::full({5}, rank + 1, options);
      group.all_reduce_sum(sum);
      EXPECT_EQ(sum[4].item<double>(), 3);
      at::Tensor gathered = at::empty({4}, options);
      group.all_gather(gathered, at::full({2}, rank, options));
      for (int i = 0; i < 4; ++i) EXPECT_EQ(gathered[i].item<double>(), i / 2);
      at::Tensor part = at::empty({2}, options);
      group.reduce_scatter_sum(part, at::arange(4, options));
      EXPECT_EQ(part[1].item<double>(), 2 * (2 * rank + 1));
      at::Tensor exchanged = at::empty({2}, options);
      group.all_to_all(exchanged, {1, 1}, at::full({2}, rank, options), {1, 1});
      EXPECT_EQ(exchanged[1].item<double>(), 1);
      at::Tensor sent = at::full({3}, 7, options), received = at::zeros({3}, options);
      if (group.rank() == 0) group.send(sent, 1);
      if (group.rank() == 1) {
        group.receive(received, 0);
        EXPECT_EQ(received[2].item<double>(), 7);
      }
    }
    // Objects and numbers go over Gloo.
    EXPECT_EQ(group.all_gather_objects("x" + std::to_string(group.rank()))[1], "x1");
  });
  EXPECT_THAT(errors, Each(""));
}

TEST(SimulatedHccl, StandsInForEachEntryPointOfTheVendor) {
  const c10::Device npu = testing::simulated_npu();
  const Backend group = lone_group("entry points");
  std::vector<at::Tensor> tensors = {at::zeros({3}, npu)};
  group->allreduce(tensors)->wait();
  EXPECT_THAT(testing::print_coverage({"comm/npu/hccl.cpp"}, device::sim::entry_calls()),
              ::testing::IsEmpty());
  EXPECT_EQ(testing::entry_points_of("comm/npu/hccl.cpp").size(), 2u);
}

TEST(SimulatedHcclRule, Capture) {
  const c10::Device npu = testing::simulated_npu();
  const Backend group = lone_group("capture");
  std::vector<at::Tensor> tensors = {at::zeros({3}, npu)};
  EXPECT_THAT(message_of([&] { device::record(npu, [&] { group->allreduce(tensors)->wait(); }); }),
              HasSubstr("rule capture"));
  EXPECT_EQ(message_of([&] { group->allreduce(tensors)->wait(); }), "(no error)");
}

// P7: the device's fabric refuses bytes, and objects never come near it.
TEST(SimulatedHccl, P7ObjectsGoOverGlooAlone) {
  const c10::Device npu = testing::simulated_npu();
  const auto errors = run_ranks(4, [&](const std::shared_ptr<World>& world) {
    const Mesh mesh({1, 1, 2, 2, 1}, world);
    // Losses and their counts: dp x fsdp x cp (x pp), each rank once.
    const Group group = mesh.loss_group();
    EXPECT_EQ(group.size(), 4);
    const std::string mine(static_cast<std::size_t>(world->rank()), 'x');
    const auto objects = group.all_gather_objects(mine);
    for (std::size_t r = 0; r < 4; ++r) EXPECT_EQ(objects[r].size(), r);
    at::Tensor bytes = at::zeros({3}, at::TensorOptions(npu).dtype(at::kByte));
    EXPECT_THAT(message_of([&] { group.all_reduce_sum(bytes); }),
                HasSubstr("objects go over Gloo"));
    group.barrier();
  });
  EXPECT_THAT(errors, Each(""));
}

TEST(SimulatedHcclRule, Payload) {
  const c10::Device npu = testing::simulated_npu();
  const Backend group = lone_group("payload");
  const auto reduce = [&](const at::Tensor& tensor) {
    std::vector<at::Tensor> tensors = {tensor};
    return message_of([&] { group->allreduce(tensors)->wait(); });
  };
  EXPECT_THAT(reduce(at::zeros({3}, at::TensorOptions(npu).dtype(at::kByte))),
              HasSubstr("rule payload"));
  EXPECT_THAT(reduce(at::zeros({3}, at::TensorOptions(npu).dtype(at::kBool))),
              HasSubstr("rule payload"));
  EXPECT_THAT(reduce(at::zeros({3})), HasSubstr("rule payload"));
  EXPECT_EQ(reduce(at::zeros({3}, npu)), "(no error)");
}

TEST(SimulatedHcclRule, Thread) {
  const c10::Device npu = testing::simulated_npu();
  const Backend group = lone_group("thread");
  std::vector<at::Tensor> tensors = {at::zeros({3}, npu)};
  std::string elsewhere;
  std::thread([&] { elsewhere = message_of([&] { group->allreduce(tensors); }); }).join();
  EXPECT_THAT(elsewhere, HasSubstr("rule thread"));
  EXPECT_EQ(message_of([&] { group->allreduce(tensors)->wait(); }), "(no error)");
}

TEST(SimulatedHcclRule, Reuse) {
  const Backend first = lone_group("reuse");
  EXPECT_THAT(message_of([] { lone_group("reuse"); }), HasSubstr("rule reuse"));
  EXPECT_EQ(message_of([] { lone_group("another"); }), "(no error)");
}

TEST(SimulatedHcclRule, BoundGroup) {
  const c10::Device npu = testing::simulated_npu();
  Backend first = lone_group("bound");
  first->setBoundDeviceId(npu);
  EXPECT_THAT(message_of([] { lone_group("second"); }), HasSubstr("rule bound-group"));
  first->setBoundDeviceId(std::nullopt);
  EXPECT_EQ(message_of([] { lone_group("second"); }), "(no error)");
}

}  // namespace
}  // namespace heddle::comm
