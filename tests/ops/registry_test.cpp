// Which kernel an operator gets, and what a table says of those that it could not take.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/errors.h"
#include "ops/registry.h"

namespace heddle::ops {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

struct Product {
  static constexpr const char* kName = "product";
  struct Functions {
    int number = 0;
  };
};

std::optional<std::string> refuse_wide(const Dims& dims) {
  if (dims.at("width") <= 128) return std::nullopt;
  return "width " + std::to_string(dims.at("width")) + " is above 128";
}

std::optional<std::string> odd_width(const Dims& dims) {
  if (dims.at("width") % 2 == 0) return std::nullopt;
  return "width " + std::to_string(dims.at("width")) + " is odd";
}

/// Two kernels of a GPU, the first for bf16 and a width of at most 128, and the reference.
Registry registry() {
  Registry registry;
  registry.add<Product>({.op = "",
                         .name = "reference",
                         .device = {},
                         .dtypes = {at::kFloat, at::kBFloat16},
                         .is_reference = true,
                         .refuse = {},
                         .on_chip_bytes = {}},
                        {0});
  registry.add<Product>({.op = "",
                         .name = "cuda.fast",
                         .device = c10::DeviceType::CUDA,
                         .dtypes = {at::kBFloat16},
                         .is_reference = false,
                         .refuse = refuse_wide,
                         .on_chip_bytes = {}},
                        {1});
  registry.add<Product>({.op = "",
                         .name = "cuda.wide",
                         .device = c10::DeviceType::CUDA,
                         .dtypes = {at::kBFloat16},
                         .is_reference = false,
                         .refuse = {},
                         .on_chip_bytes = {},
                         .slowed_by = odd_width},
                        {2});
  return registry;
}

KernelTable choose(c10::ScalarType dtype, std::int64_t width, const KernelPolicy& policy = {}) {
  return KernelTable::choose(registry(), c10::DeviceType::CUDA, dtype,
                             {{Product::kName, {{{"width", width}}}}}, policy);
}

TEST(KernelTable, TakesTheFirstKernelThatFitsAndSaysWhatItLost) {
  const KernelTable first = choose(at::kBFloat16, 128);
  EXPECT_EQ(first.get<Product>().number, 1);
  EXPECT_THAT(first.losses(), IsEmpty());
  const KernelTable second = choose(at::kBFloat16, 256);
  EXPECT_EQ(second.get<Product>().number, 2);
  EXPECT_THAT(second.losses(), ElementsAre("product runs cuda.wide: no faster kernel fits "
                                           "(cuda.fast: width 256 is above 128)"));
  EXPECT_THAT(choose(at::kBFloat16, 129).losses(),
              ElementsAre(HasSubstr("width 129 is above 128"),
                          "product runs cuda.wide slower than it could: width 129 is odd"));
}

TEST(KernelTable, AChoiceOfTheUserIsNoLoss) {
  const KernelTable table =
      choose(at::kBFloat16, 256, {.chosen_by_user = {{"product", "cuda.wide"}}});
  EXPECT_EQ(table.get<Product>().number, 2);
  EXPECT_THAT(table.losses(), IsEmpty());
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
  EXPECT_THAT(allowed.losses(), ElementsAre(HasSubstr("product runs reference")));
}

}  // namespace
}  // namespace heddle::ops
