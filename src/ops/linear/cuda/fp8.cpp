// Products of 8-bit floats: "cuda.fp8_rowwise_or_bf16", and "cuda.fp8_rowwise_from_block_4", whose
// outputs of the first blocks stay bf16. Values e4m3 with a scale for each row of both factors
// along the dimension they share, sums in fp32, results bf16. The gradients of weights, the
// low-rank terms and routers stay bf16. A product with nothing to add is libtorch's; all others are
// sums of our own kernel.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <tuple>

#include "ops/cuda/eight_bit.h"
#include "ops/cuda/kernels.h"
#include "ops/cuda/tensor.h"
#include "ops/linear/cuda/few_row_tensors.h"
#include "ops/linear/cuda/fp8_tensors.h"
#include "ops/linear/cuda/product_sum_tensors.h"
#include "ops/linear/kernels.h"

namespace heddle::ops::linear_fp8 {
namespace {

using cuda::EightBitRows;
using cuda::kFewestEightBitRows, cuda::kNarrowestEightBit;

/// Blocks whose outputs one of the kernels leaves alone: their rounding is what later blocks
/// multiply, and it is most of what a loss curve shows of 8 bits (docs/performance-gpu.md).
constexpr std::int64_t kFirstBlocks = 4;

/// In both widths alike, as the backward exchanges them.
bool is_narrow(std::int64_t out, std::int64_t in) {
  return std::min(out, in) < kNarrowestEightBit || out % 16 != 0 || in % 16 != 0;
}

bool fits(const Product& product) {
  const at::Tensor &a = product.a, &b = product.b;
  return a.scalar_type() == at::kBFloat16 && a.size(0) >= kFewestEightBitRows &&
         !is_narrow(b.size(0), b.size(1)) && cuda::has_rows_of_16_bytes(a) &&
         cuda::has_rows_of_16_bytes(b);
}

/// Products of the same rows: what is known of them before anything runs.
struct Work {
  std::int64_t rows = 0;
  double products = 0;     ///< Multiplications and additions, halved.
  double conversions = 0;  ///< Elements of inputs that nobody laid beside them.
  double weights = 0;      ///< Elements.
  int layers = 0;

  void add(const Product& product, bool is_converted) {
    const double weight = static_cast<double>(product.b.numel());
    rows = product.a.size(0);
    products += static_cast<double>(rows) * weight;
    if (!is_converted) conversions += static_cast<double>(product.a.numel());
    weights += weight;
    ++layers;
  }
  /// Whether 8 bits gain more than the conversions cost, by what an H200 takes in seconds: 650 and
  /// 1150 TFLOP/s in bf16 and in 8 bits, 3.7 TB/s for an input's 3 bytes an element, 2.5 TB/s for
  /// a weight's 5, and two launches a layer.
  bool pays() const {
    constexpr double kGain = 2 * (1 / 650e12 - 1 / 1150e12), kInput = 3 / 3.7e12,
                     kWeight = 5 / 2.5e12, kLaunches = 4e-6;
    return kGain * products > kInput * conversions + kWeight * weights + kLaunches * layers;
  }
};

/// Conversions of one call.
class Converted {
 public:
  /// Layers share inputs.
  const EightBitRows& input(const at::Tensor& a) {
    EightBitRows& input = inputs_[{a.const_data_ptr(), a.size(0), a.size(1), a.stride(0)}];
    if (!input.values.defined()) input = rows_of(a);
    return input;
  }
  /// Puts the product's matrices, b^T in `b`, in the place of those of a term.
  void replace(const Product& product, EightBitRows b, cuda::ProductTerm& term) {
    const EightBitRows& a = input(product.a);
    term.a = a.values.const_data_ptr();
    term.a_stride = term.b_stride = term.depth = a.values.size(1);
    term.a_scales = a.scales.const_data_ptr<float>();
    term.b = b.values.const_data_ptr();
    term.b_scales = b.scales.const_data_ptr<float>();
    weights_.push_back(std::move(b));
  }
  /// Whether an input needs no conversion of its own: it came with one, or was asked for before.
  bool knows(const at::Tensor& a) {
    return cuda::has_beside(a) ||
           !seen_.insert({a.const_data_ptr(), a.size(0), a.size(1), a.stride(0)}).second;
  }

 private:
  using Rows = std::tuple<const void*, std::int64_t, std::int64_t, std::int64_t>;
  std::map<Rows, EightBitRows> inputs_;
  std::set<Rows> seen_;
  std::vector<EightBitRows> weights_;
};

/// Whether any product fits, and all that do are worth their conversions.
bool pays(const std::vector<Products>& sums, Converted& converted) {
  Work work;
  for (const Products& terms : sums) {
    for (const Product& term : terms) {
      if (fits(term)) work.add(term, converted.knows(term.a));
    }
  }
  return work.pays();
}

/// All of them in one launch.
Tensors sums_of(const std::vector<Products>& sums, const at::Tensor& start, Converted& converted) {
  std::vector<std::int64_t> columns;
  for (const Products& sum : sums) columns.push_back(sum[0].b.size(0));
  return linear_cuda::sums_of(sums, columns, /*b_has_depth_first=*/false, start,
                              [&](const Product& product, cuda::ProductTerm& term) {
                                if (fits(product))
                                  converted.replace(product, rows_of(product.b), term);
                              });
}

/// The first term is a weight's; further ones are changes of it or layers that share its input.
bool is_of_a_router(const Products& terms) { return terms.at(0).place.is_router; }

bool can_sum(const std::vector<Products>& sums) {
  std::vector<std::int64_t> columns;
  for (const Products& sum : sums) columns.push_back(sum[0].b.size(0));
  return linear_cuda::can_sum(sums, columns);
}

Tensors forward(const std::vector<Products>& sums) {
  Converted converted;
  if (is_of_a_router(sums[0]) || !pays(sums, converted)) return linear_cuda::forward(sums);
  Tensors results(sums.size());
  std::vector<Products> others;
  bool any_eight_bit = false;
  for (const Products& terms : sums) {
    if (terms.size() == 1 && fits(terms[0])) continue;
    others.push_back(terms);
    any_eight_bit = any_eight_bit || std::any_of(terms.begin(), terms.end(), fits);
  }
  Tensors added;
  if (!others.empty()) {
    added = any_eight_bit && can_sum(others) ? sums_of(others, {}, converted)
                                             : linear_cuda::forward(others);
  }
  std::size_t next = 0;
  for (std::size_t i = 0; i < sums.size(); ++i) {
    const Product& first = sums[i][0];
    results[i] = sums[i].size() == 1 && fits(first)
                     ? product_of(converted.input(first.a), rows_of(first.b))
                     : added[next++];
  }
  return results;
}

at::Tensor forward_onto(const at::Tensor& x, const Products& terms) {
  Converted converted;
  if (!cuda::has_rows_of_16_bytes(x) || !can_sum({terms}) || !pays({terms}, converted))
    return linear_cuda::forward_onto(x, terms);
  return sums_of({terms}, x, converted)[0];
}

/// Whether the layers stand in one of the first blocks.
bool is_in_first_blocks(const Products& terms) {
  const std::int64_t block = terms.at(0).place.block;
  return block != LinearPlace::kOutside && block < kFirstBlocks;
}

/// Frees what producers laid beside the inputs: no product will take it.
void drop_eight_bits(const Products& terms) {
  for (const Product& term : terms) cuda::take_beside(term.a);
}

Tensors forward_after_first_blocks(const std::vector<Products>& sums) {
  if (is_of_a_router(sums[0]) || !is_in_first_blocks(sums[0])) return forward(sums);
  for (const Products& terms : sums) drop_eight_bits(terms);
  return linear_cuda::forward(sums);
}

at::Tensor forward_onto_after_first_blocks(const at::Tensor& x, const Products& terms) {
  if (!is_in_first_blocks(terms)) return forward_onto(x, terms);
  drop_eight_bits(terms);
  return linear_cuda::forward_onto(x, terms);
}

at::Tensor backward(const Products& terms) {
  Converted converted;
  const std::int64_t columns = terms[0].b.size(1);
  const bool is_one = terms.size() == 1;
  if (is_of_a_router(terms) || !pays({terms}, converted) ||
      (!is_one && !linear_cuda::can_sum({terms}, {columns})))
    return linear_cuda::backward(terms);
  if (is_one) return product_of(converted.input(terms[0].a), columns_of(terms[0].b));
  return linear_cuda::sums_of({terms}, {columns}, /*b_has_depth_first=*/true, {},
                              [&](const Product& product, cuda::ProductTerm& term) {
                                if (fits(product))
                                  converted.replace(product, columns_of(product.b), term);
                              })[0];
}

std::optional<std::string> refuse_device(const Target&) {
  if (cuda::has_sm90a()) return std::nullopt;
  return "needs a device of compute capability 9.0 and a build with code for sm_90a";
}

/// Names what is computed in the model's type although other layers are in 8 bits.
std::vector<std::string> warnings(const Linear::Dims& dims) {
  std::vector<std::string> result = linear_cuda::rank_warnings(dims);
  if (dims.layers.empty()) return result;
  std::set<std::string> narrow;
  for (const auto& [name, out, in] : dims.layers) {
    if (is_narrow(out, in)) narrow.insert(fmt::format("{} [{}, {}]", name, out, in));
  }
  result.push_back(fmt::format(
      "in the model's type stay the gradients of weights, the products of adapters, routers, the "
      "language-model head, products too small to repay the conversion (at width 1024 below some "
      "2000 tokens, and always below {}), and {}",
      kFewestEightBitRows,
      narrow.empty() ? "no layer" : fmt::format("the layers {}", fmt::join(narrow, ", "))));
  return result;
}

std::vector<std::string> warnings_from_block(const Linear::Dims& dims) {
  std::vector<std::string> result = warnings(dims);
  if (!dims.layers.empty())
    result.push_back(
        fmt::format("and so do the outputs of the first {} blocks; the gradients of their inputs "
                    "are in 8 bits",
                    kFirstBlocks));
  return result;
}

}  // namespace

}  // namespace heddle::ops::linear_fp8

namespace heddle::ops::cuda {

void add_fp8_linear(Registry& registry) {
  KernelInfo info = KernelInfo::cuda("cuda.fp8_rowwise_or_bf16", {c10::ScalarType::BFloat16});
  info.only_by_name = true;
  info.refuse_device = linear_fp8::refuse_device;
  info.falls_back = fmt::format(
      "the bf16 products of the default kernel for layers narrower than {} or not a multiple of "
      "16, for routers, for fewer than {} rows, and where conversions cost more than 8 bits gain",
      kNarrowestEightBit, kFewestEightBitRows);
  Linear::Functions functions = {.forward = linear_fp8::forward,
                                 .forward_onto = linear_fp8::forward_onto,
                                 .backward = linear_fp8::backward,
                                 .low_rank_backward = linear_cuda::low_rank_backward,
                                 .dropped_low = linear_cuda::dropped_low,
                                 .dropped_gradient = linear_cuda::dropped_gradient,
                                 .add_dropped = linear_cuda::add_dropped};
  registry.add<Linear>(info, functions, {.warnings = linear_fp8::warnings});
  info.name = fmt::format("cuda.fp8_rowwise_from_block_{}", linear_fp8::kFirstBlocks);
  info.falls_back +=
      fmt::format("; and for the outputs of the first {} blocks", linear_fp8::kFirstBlocks);
  functions.forward = linear_fp8::forward_after_first_blocks;
  functions.forward_onto = linear_fp8::forward_onto_after_first_blocks;
  registry.add<Linear>(info, functions, {.warnings = linear_fp8::warnings_from_block});
}

}  // namespace heddle::ops::cuda
