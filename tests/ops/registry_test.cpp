// The kernel that an operator gets, and a table's account of those that it could not take.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/errors.h"
#include "ops/registry.h"

namespace heddle::ops {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

struct Product {
  static constexpr const char* kName = "product";
  struct Dims {
    std::int64_t width = 0;
  };
  struct Functions {
    int number = 0;
  };
};

std::optional<std::string> refuse_wide(const Product::Dims& dims) {
  if (dims.width <= 128) return std::nullopt;
  return "width " + std::to_string(dims.width) + " is above 128";
}

std::vector<std::string> odd_width(const Product::Dims& dims) {
  if (dims.width % 2 == 0) return {};
  return {"width " + std::to_string(dims.width) + " is odd"};
}

/// Two kernels of a GPU, the first for bf16 and a width of at most 128, and the reference.
Registry registry() {
  Registry registry;
  KernelInfo reference = KernelInfo::reference();
  reference.dtypes = {at::kFloat, at::kBFloat16};
  registry.add<Product>(reference, {0});
  registry.add<Product>(KernelInfo::cuda("cuda.fast", {at::kBFloat16}), {1},
                        {.refuse = refuse_wide});
  registry.add<Product>(KernelInfo::cuda("cuda.wide", {at::kBFloat16}), {2},
                        {.warnings = odd_width});
  KernelInfo narrow = KernelInfo::cuda("cuda.narrow", {at::kBFloat16});
  narrow.only_by_name = true;
  registry.add<Product>(narrow, {3});
  KernelInfo native = KernelInfo::ascend("npu.native", {at::kBFloat16});
  native.only_for = Use::kGeneration;
  native.refuse_device = [](const Target& target) -> std::optional<std::string> {
    if (target.chip == "A2") return std::nullopt;
    return "A2 alone has it, this is " + target.chip;
  };
  registry.add<Product>(native, {4});
  registry.add<Product>(KernelInfo::ascend("npu.composed", {at::kBFloat16}), {5});
  return registry;
}

KernelTable choose(c10::ScalarType dtype, std::int64_t width, const KernelPolicy& policy = {}) {
  return KernelTable::choose(registry(), {Platform::kCuda}, dtype,
                             {OpRequest::of<Product>({.width = width})}, policy);
}

KernelTable choose_npu(const Target& target, Use use, const KernelPolicy& policy = {}) {
  return KernelTable::choose(registry(), target, at::kBFloat16,
                             {OpRequest::of<Product>({.width = 64}, use)}, policy);
}

TEST(KernelTable, TakesTheFirstKernelThatFitsAndSaysWhatItLost) {
  const KernelTable first = choose(at::kBFloat16, 128);
  EXPECT_EQ(first.get<Product>().number, 1);
  EXPECT_THAT(first.warnings(), IsEmpty());
  const KernelTable second = choose(at::kBFloat16, 256);
  EXPECT_EQ(second.get<Product>().number, 2);
  EXPECT_THAT(second.warnings(), ElementsAre("product runs cuda.wide: no faster kernel fits "
                                             "(cuda.fast: width 256 is above 128)"));
  EXPECT_THAT(
      choose(at::kBFloat16, 129).warnings(),
      ElementsAre(HasSubstr("width 129 is above 128"), "product runs cuda.wide: width 129 is odd"));
}

TEST(KernelTable, AChoiceOfTheUserIsNoLoss) {
  const KernelTable table = choose(at::kBFloat16, 256, {.named = {{"product", "cuda.wide"}}});
  EXPECT_EQ(table.get<Product>().number, 2);
  EXPECT_THAT(table.warnings(), IsEmpty());
}

TEST(KernelTable, UseAndChipDecide) {
  const Target a2{Platform::kAscend, "A2"}, other{Platform::kSim, "A5"};
  EXPECT_EQ(choose_npu(a2, Use::kGeneration).get<Product>().number, 4);
  // A kernel for generation is none that training has missed.
  const KernelTable training = choose_npu(a2, Use::kTraining);
  EXPECT_EQ(training.get<Product>().number, 5);
  EXPECT_THAT(training.warnings(), IsEmpty());
  const KernelTable lost = choose_npu(other, Use::kGeneration);
  EXPECT_EQ(lost.get<Product>().number, 5);
  EXPECT_THAT(lost.warnings(), ElementsAre(HasSubstr("A2 alone has it, this is A5")));
  EXPECT_THROW(choose_npu(a2, Use::kTraining, {.named = {{"product", "npu.native"}}}), ConfigError);
}

TEST(KernelTable, AKernelByNameAloneIsNeverChosenOtherwise) {
  EXPECT_EQ(
      choose(at::kBFloat16, 64, {.named = {{"product", "cuda.narrow"}}}).get<Product>().number, 3);
  Registry registry;
  KernelInfo narrow = KernelInfo::cpu("cpu.exact");
  narrow.only_by_name = true;
  registry.add<Product>(narrow, {1});
  registry.add<Product>(KernelInfo::reference(), {0});
  const KernelTable table =
      KernelTable::choose(registry, {}, at::kFloat, {OpRequest::of<Product>()});
  EXPECT_EQ(table.get<Product>().number, 0);
}

/// A table for `kernels.fp8`.
KernelTable choose_wished(const std::string& kernel, bool is_needed, std::int64_t width,
                          const std::map<std::string, std::string>& named = {}) {
  KernelPolicy policy;
  policy.named = named;
  policy.wishes = {{"product", {kernel, is_needed}}, {"of no model", {"cuda.none", true}}};
  return choose(at::kBFloat16, width, policy);
}

TEST(KernelTable, AWishGoesBeforeTheOrderAndAfterAName) {
  const KernelTable table = choose_wished("cuda.narrow", true, 64);
  EXPECT_EQ(table.get<Product>().number, 3);
  EXPECT_THAT(table.warnings(), IsEmpty());
  const KernelTable named = choose_wished("cuda.narrow", true, 64, {{"product", "cuda.wide"}});
  EXPECT_EQ(named.get<Product>().number, 2);
}

TEST(KernelTable, AWishThatDoesNotFitIsSaidOrRefused) {
  const KernelTable table = choose_wished("cuda.fast", false, 256);
  EXPECT_EQ(table.get<Product>().number, 2);
  EXPECT_THAT(table.warnings(), Contains(HasSubstr("cuda.fast: width 256 is above 128")));
  EXPECT_THAT(choose_wished("cuda.none", false, 64).warnings(),
              Contains(HasSubstr("cuda.none: this build has none for cuda")));
  const auto message = [](const std::string& kernel) {
    try {
      choose_wished(kernel, true, 256);
    } catch (const ConfigError& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_THAT(message("cuda.fast"),
              AllOf(HasSubstr("kernels.fp8: product cannot run cuda.fast on cuda in BFloat16 "
                              "(width 256 is above 128)"),
                    HasSubstr("leave the key out")));
  EXPECT_THAT(message("cuda.none"), HasSubstr("this build has none for cuda"));
}

TEST(KernelTable, AKernelForSomeShapesIsNotMissedByOthers) {
  Registry registry;
  KernelInfo whole = KernelInfo::cpu("cpu.whole");
  whole.for_some_shapes = true;
  registry.add<Product>(whole, {1}, {.refuse = refuse_wide});
  registry.add<Product>(KernelInfo::cpu("cpu.parts"), {2});
  const auto chosen = [&](std::int64_t width, const KernelPolicy& policy = {}) {
    return KernelTable::choose(registry, {}, at::kFloat, {OpRequest::of<Product>({width})}, policy);
  };
  EXPECT_EQ(chosen(64).get<Product>().number, 1);
  EXPECT_EQ(chosen(256).get<Product>().number, 2);
  EXPECT_THAT(chosen(256).warnings(), IsEmpty());
  try {
    chosen(256, {.named = {{"product", "cpu.whole"}}});
    FAIL() << "a kernel that was named is missed";
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(), HasSubstr("refused: cpu.whole: "));
  }
}

TEST(KernelTable, TheReferenceOnAnAcceleratorIsRefusedUnlessAllowed) {
  const auto message = [](c10::ScalarType dtype) {
    try {
      choose(dtype, 64);
    } catch (const DeviceError& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_THAT(message(at::kFloat),
              AllOf(HasSubstr("product: only the slow reference kernel fits on cuda"),
                    HasSubstr("cuda.fast: does not take Float"),
                    HasSubstr("set model.dtype=bfloat16 (--dtype), or kernels.fallback=allow")));
  KernelPolicy policy;
  policy.allow_fallback = true;
  const KernelTable allowed = choose(at::kFloat, 64, policy);
  EXPECT_EQ(allowed.get<Product>().number, 0);
  EXPECT_THAT(allowed.warnings(), ElementsAre(HasSubstr("product runs reference")));
}

}  // namespace
}  // namespace heddle::ops
