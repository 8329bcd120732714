// Sets and passes for which there is no memory.
#include <ATen/ops/equal.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <atomic>
#include <vector>

#include "base/errors.h"
#include "tenants/tenants_fixture.h"
#include "tenants/trained_set.h"
#include "testing/message_of.h"

namespace heddle::tenants {
namespace {

/// While it lives, an allocation of the CPU after so many others finds no memory.
class ScarceMemory final : public c10::Allocator {
 public:
  explicit ScarceMemory(std::int64_t allocations) : left_(allocations) {
    c10::SetCPUAllocator(this, /*priority=*/1);
  }
  ~ScarceMemory() override { c10::SetCPUAllocator(&usual_, /*priority=*/1); }
  ScarceMemory(const ScarceMemory&) = delete;
  ScarceMemory& operator=(const ScarceMemory&) = delete;

  std::int64_t left() const { return left_; }

  c10::DataPtr allocate(std::size_t bytes) override {
    if (left_-- == 0) TORCH_CHECK_WITH(OutOfMemoryError, false, "no memory for ", bytes);
    return usual_.allocate(bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override { return usual_.raw_deleter(); }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    usual_.copy_data(to, from, bytes);
  }

 private:
  c10::Allocator& usual_ = *c10::GetCPUAllocator();
  std::atomic<std::int64_t> left_;
};

std::vector<at::Tensor> factors_of(const Trainer& trainer, SetId set) {
  std::vector<at::Tensor> factors;
  trainer.snapshot(set)->visit_parameters(
      [&](nn::Parameter& factor) { factors.push_back(factor.data().clone()); });
  return factors;
}

class TenantsMemoryTest : public Tenants {
 protected:
  /// A set after two steps, the second of which has two calls of forward_backward.
  std::vector<at::Tensor> undisturbed() {
    Trainer trainer(base_, {.deterministic = true});
    const SetId set = trainer.create(options(1));
    step_after(trainer, set, {4});
    step_after(trainer, set, {5, 6});
    return factors_of(trainer, set);
  }
  static void step_after(Trainer& trainer, SetId set, const std::vector<int>& seeds) {
    for (const int seed : seeds) forward_backward(trainer, set, seed);
    EXPECT_EQ(trainer.optim_step(set, adam(1)).error, "");
  }
  static void forward_backward(Trainer& trainer, SetId set, int seed) {
    const Work one = work(set, seed);
    trainer.forward_backward({&one, 1});
  }
};

TEST_F(TenantsMemoryTest, APassThatFailsLeavesNoPartOfItsGradients) {
  place(/*moe=*/true);
  const std::vector<at::Tensor> expected = undisturbed();
  constexpr std::int64_t kPlenty = 1 << 30;
  std::int64_t of_a_pass = 0;
  for (int part = -1; part < 8; ++part) {
    Trainer trainer(base_, {.deterministic = true});
    const SetId set = trainer.create(options(1)), other = trainer.create(options(2));
    step_after(trainer, set, {4});
    forward_backward(trainer, other, 7);
    forward_backward(trainer, set, 5);
    if (part < 0) {
      const ScarceMemory all(kPlenty);
      forward_backward(trainer, set, 6);
      of_a_pass = kPlenty - all.left();
      continue;
    }
    {
      const ScarceMemory scarce(of_a_pass * (2 * part + 1) / 16);
      EXPECT_THROW(forward_backward(trainer, set, 6), DeviceError) << part;
    }
    const std::vector<SetUpdate> updates = {{set, adam(1)}, {other, adam(2)}};
    const std::vector<StepResult> stepped = trainer.optim_steps(updates);
    EXPECT_NE(stepped[0].error, "");
    EXPECT_FALSE(stepped[0].updated);
    EXPECT_EQ(trainer.steps(set), 1);
    EXPECT_EQ(stepped[1].error, "");
    EXPECT_GT(stepped[1].grad_norm, 0) << "the gradients of a set that had no part in it";
    step_after(trainer, set, {5, 6});
    const std::vector<at::Tensor> found = factors_of(trainer, set);
    ASSERT_EQ(found.size(), expected.size());
    for (std::size_t i = 0; i < found.size(); ++i)
      EXPECT_TRUE(at::equal(found[i], expected[i])) << part << " " << i;
  }
}

TEST_F(TenantsMemoryTest, ASetThatDoesNotFitIsRefusedBeforeItTrains) {
  place(/*moe=*/true);
  Trainer trainer(base_, {});
  const SetId set = trainer.create({.rank = 4});
  const auto factors = trainer.snapshot(set);
  std::int64_t numbers = 0;
  factors->visit_parameters(
      [&](const nn::Parameter& factor) { numbers += factor.owned().numel(); });
  // In fp32: a gradient and two moments.
  EXPECT_NO_THROW(require_room(*factors, 12 * numbers));
  const std::string refusal =
      testing::message_of([&] { require_room(*factors, 12 * numbers - 1); });
  EXPECT_NE(refusal.find("adapters of rank 4 have 0."), std::string::npos) << refusal;
  EXPECT_NE(refusal.find("of them on routed experts"), std::string::npos) << refusal;
  EXPECT_NE(refusal.find("expected a lower rank, fewer of train_attn"), std::string::npos);
  // A factor that experts share counts once.
  const auto shared = trainer.snapshot(trainer.create({.rank = 4, .shared_expert_factors = true}));
  std::int64_t fewer = 0;
  shared->visit_parameters([&](const nn::Parameter& factor) { fewer += factor.owned().numel(); });
  EXPECT_LT(fewer, numbers);
  EXPECT_NO_THROW(require_room(*shared, 12 * fewer));
  EXPECT_THROW(require_room(*shared, 12 * fewer - 1), ConfigError);
}

}  // namespace
}  // namespace heddle::tenants
