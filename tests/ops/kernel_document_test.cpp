// docs/kernels.md says of every kernel of this build what the registry knows.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sstream>

#include "base/files.h"
#include "ops/kernel_document.h"
#include "testing/paths.h"

namespace heddle::ops {
namespace {

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

/// A build without CUDA knows nothing of the rows of CUDA's kernels; all others stand in its order.
TEST(KernelDocument, ShowsTheKernelsOfThisBuild) {
  const std::string registry = kernel_document(builtin_registry());
  const bool has_cuda = registry.find("| cuda |") != std::string::npos;
  std::vector<std::string> shown;
  for (const std::string& line :
       lines_of(files::read(heddle::testing::source_path("docs/kernels.md")))) {
    if (line.starts_with("|") && (has_cuda || line.find("| cuda |") == std::string::npos))
      shown.push_back(line);
  }
  EXPECT_EQ(shown, lines_of(registry)) << "heddle doctor --kernels prints the table";
}

struct Product {
  static constexpr const char* kName = "product";
  using Dims = AnyDims;
  struct Functions {};
};

TEST(KernelDocument, SaysWhatRulesThereAre) {
  Registry registry;
  registry.add<Product>(KernelInfo::reference(), {});
  KernelInfo odd = KernelInfo::ascend("npu.odd", {c10::ScalarType::BFloat16});
  odd.only_by_name = true;
  odd.only_for = Use::kGeneration;
  odd.falls_back = "the reference for odd rows";
  registry.add<Product>(odd, {});
  EXPECT_EQ(lines_of(kernel_document(registry)).at(2),
            "| product | `npu.odd` | ascend, sim | bf16 | only by `kernels.product`; generation "
            "alone; leaves to the reference for odd rows |");
  EXPECT_EQ(lines_of(kernel_document(registry)).at(3),
            "| product | `reference` | all | fp32, bf16, fp16, fp64 | comes last |");
}

}  // namespace
}  // namespace heddle::ops
