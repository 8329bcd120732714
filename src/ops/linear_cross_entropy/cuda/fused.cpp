// The head in chunks of rows: products by cuBLAS, softmax and its gradient by one kernel in place.
#include <ATen/TensorOperators.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/nonzero.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "ops/cuda/kernels.h"
#include "ops/cuda/tensor.h"
#include "ops/linear/cuda/few_row_tensors.h"
#include "ops/linear/cuda/fp8_tensors.h"
#include "ops/linear_cross_entropy/cuda/entropy_gradient.h"
#include "ops/linear_cross_entropy/cuda/softmax_gradient.h"
#include "ops/linear_cross_entropy/kernels.h"

namespace heddle::ops::linear_cross_entropy_cuda {
namespace {

/// Logits held at once. Every chunk reads and writes the whole gradient of the weight, in fp32:
/// with it few are good.
constexpr std::int64_t kLogitsBytes = std::int64_t{2} << 30;
constexpr std::int64_t kLogitsBytesWithWeightGradient = std::int64_t{4} << 30;

/// Rows of each chunk but the last: as few chunks as fit, all about as long.
std::int64_t chunk_rows(std::int64_t rows, const at::Tensor& weight, bool want_grad_weight) {
  constexpr std::int64_t kTile = 128;  // of the products
  const std::int64_t row = weight.size(0) * static_cast<std::int64_t>(weight.element_size());
  const std::int64_t bytes = want_grad_weight ? kLogitsBytesWithWeightGradient : kLogitsBytes;
  const std::int64_t most = std::max(kTile, bytes / std::max<std::int64_t>(1, row) / kTile * kTile);
  if (rows <= most) return std::max<std::int64_t>(1, rows);
  const std::int64_t chunks = (rows + most - 1) / most;
  return (rows + chunks * kTile - 1) / (chunks * kTile) * kTile;
}

/// The gradient of the weight: added to a buffer that has values, or written into one that has none
/// yet. Over several chunks it is summed in fp32, and rounded into a narrower buffer once, at the
/// end.
class WeightGradient {
 public:
  WeightGradient(const at::Tensor& buffer, bool has_values, bool one_chunk)
      : buffer_(buffer), sum_(buffer), has_values_(has_values), sum_has_values_(has_values) {
    if (buffer.scalar_type() == at::kFloat || one_chunk) return;
    sum_ = at::empty(buffer.sizes(), buffer.options().dtype(at::kFloat));
    sum_has_values_ = false;
  }
  void add(const at::Tensor& d_logits, const at::Tensor& hidden) {
    const bool is_first = !std::exchange(sum_has_values_, true);
    if (sum_.scalar_type() == d_logits.scalar_type()) {
      is_first ? at::mm_out(sum_, d_logits.t(), hidden) : sum_.addmm_(d_logits.t(), hidden);
    } else if (is_first) {
      at::mm_out(sum_, d_logits.t(), hidden, sum_.scalar_type());
    } else {
      at::addmm_out(sum_, sum_, d_logits.t(), hidden, sum_.scalar_type());
    }
  }
  void finish() {
    if (!sum_has_values_) {
      sum_.zero_();
    } else if (!sum_.is_same(buffer_)) {
      has_values_ ? buffer_.add_(sum_) : buffer_.copy_(sum_);
    }
  }

 private:
  at::Tensor buffer_, sum_;
  bool has_values_, sum_has_values_;
};

/// The rows that have a label, and what belongs to them.
struct LabelledRows {
  at::Tensor index;  ///< Undefined: all.
  at::Tensor hidden, labels, loss_weights;

  explicit LabelledRows(const LinearCrossEntropy::Inputs& in) {
    if (!in.all_rows_labelled) {
      index = at::nonzero(in.labels != -100).squeeze(1);
      if (index.size(0) == in.labels.size(0)) index = at::Tensor();
    }
    const auto pick = [&](const at::Tensor& t) {
      return index.defined() ? at::index_select(t, 0, index) : t.contiguous();
    };
    hidden = pick(in.hidden);
    labels = pick(in.labels);
    if (in.loss_weights.defined()) loss_weights = pick(in.loss_weights).to(at::kFloat);
  }

  /// Values of these rows at their places among all `rows`, zero elsewhere.
  at::Tensor spread(const at::Tensor& values, std::int64_t rows) const {
    if (!index.defined()) return values;
    std::vector<std::int64_t> sizes = values.sizes().vec();
    sizes[0] = rows;
    return at::zeros(sizes, values.options()).index_copy_(0, index, values);
  }
};

/// Logits of rows in 8 bits: a third of the head's work. The products of their gradients stay bf16,
/// because most probabilities are below what e4m3 holds beside a 1.
class EightBitLogits {
 public:
  EightBitLogits(const at::Tensor& hidden, const at::Tensor& weight) {
    if (hidden.scalar_type() != at::kBFloat16 || hidden.size(0) < linear_cuda::kFewestRows ||
        hidden.size(1) % 16 != 0 || weight.size(0) % 16 != 0 ||
        !cuda::has_rows_of_16_bytes(hidden) || !cuda::has_rows_of_16_bytes(weight))
      return;
    hidden_ = linear_fp8::rows_of(hidden);
    weight_ = linear_fp8::rows_of(weight);
  }
  bool run() const { return weight_.values.defined(); }
  void write(at::Tensor& logits, std::int64_t begin, std::int64_t rows) const {
    linear_fp8::product_into(
        logits, {hidden_.values.narrow(0, begin, rows), hidden_.scales.narrow(0, begin, rows)},
        weight_);
  }

 private:
  cuda::EightBitRows hidden_, weight_;
};

/// [n] d loss / d -logprob of the rows from `first` on.
at::Tensor factors_of(const LinearCrossEntropy::Inputs& in, const LabelledRows& rows,
                      std::int64_t first, const at::Tensor& logprobs) {
  if (in.token_loss) return in.token_factors(first, logprobs).squeeze(1).contiguous();
  if (!rows.loss_weights.defined())
    return at::full(logprobs.sizes(), in.gradient_scale, logprobs.options());
  return rows.loss_weights.narrow(0, first, logprobs.size(0)) * in.gradient_scale;
}

template <bool kEight>
LinearCrossEntropy::Result forward(const LinearCrossEntropy::Inputs& in, bool want_grad_hidden,
                                   bool want_grad_weight, at::Tensor& grad_weight_buffer) {
  const cuda::OnDevice on(in.hidden);
  const LabelledRows rows(in);
  const std::int64_t count = rows.hidden.size(0), vocabulary = in.weight.size(0);
  const std::int64_t chunk = chunk_rows(count, in.weight, want_grad_weight || in.keep_logits);
  const auto wide = in.hidden.options().dtype(at::kFloat);
  at::Tensor logprobs = at::empty({count}, wide), entropy, grad_hidden;
  if (in.want_entropy) entropy = at::empty({count}, wide);
  if (want_grad_hidden) grad_hidden = at::empty(rows.hidden.sizes(), in.hidden.options());
  std::optional<WeightGradient> grad_weight;
  if (want_grad_weight) {
    const bool has_values = grad_weight_buffer.defined();
    if (!has_values) grad_weight_buffer = at::empty(in.weight.sizes(), in.gradient_options());
    grad_weight.emplace(grad_weight_buffer, has_values, count <= chunk);
  }
  const at::Tensor logits =
      in.logits.defined() ? in.logits : at::empty({chunk, vocabulary}, in.hidden.options());
  HeadChanges changes(in, want_grad_hidden);
  std::optional<EightBitLogits> eight_bit;
  if (kEight && !in.logits.defined()) eight_bit.emplace(rows.hidden, in.weight);
  for (std::int64_t begin = 0; begin < count; begin += chunk) {
    const std::int64_t length = std::min(chunk, count - begin);
    at::Tensor hidden = rows.hidden.narrow(0, begin, length);
    at::Tensor part = logits.narrow(0, 0, length);
    if (eight_bit && eight_bit->run()) {
      eight_bit->write(part, begin, length);
    } else if (!in.logits.defined()) {
      at::mm_out(part, hidden, in.weight.t());
    }
    if (!in.logits.defined()) changes.add_to(part, begin);
    cuda::SoftmaxGradientRows parameters;
    parameters.labels = rows.labels.const_data_ptr<std::int64_t>() + begin;
    parameters.loss_weights =
        rows.loss_weights.defined() ? rows.loss_weights.const_data_ptr<float>() + begin : nullptr;
    parameters.gradient_scale = static_cast<float>(in.gradient_scale);
    parameters.logprobs = logprobs.mutable_data_ptr<float>() + begin;
    if (in.want_entropy) parameters.entropies = entropy.mutable_data_ptr<float>() + begin;
    const bool want_gradient = want_grad_hidden || want_grad_weight;
    parameters.want_gradient = want_gradient && !in.entropy_gradients.defined();
    const cuda::SoftmaxGradientShape shape{cuda::element_of(part), length, vocabulary};
    cuda::softmax_gradient(shape, part.mutable_data_ptr(), parameters, on.stream());
    if (want_gradient && in.entropy_gradients.defined()) {
      // The entropy bends what the logits hold, so a factor by token comes before the products.
      const at::Tensor
          factors = factors_of(in, rows, begin, logprobs.narrow(0, begin, length)),
          by_entropy = in.entropy_gradients.narrow(0, begin, length).to(at::kFloat).contiguous();
      cuda::entropy_gradient(shape, part.mutable_data_ptr(),
                             {.labels = parameters.labels,
                              .logprobs = parameters.logprobs,
                              .entropies = parameters.entropies,
                              .factors = factors.const_data_ptr<float>(),
                              .entropy_gradients = by_entropy.const_data_ptr<float>()},
                             on.stream());
    }
    at::Tensor d_hidden;
    if (want_grad_hidden) {
      d_hidden = grad_hidden.narrow(0, begin, length);
      at::mm_out(d_hidden, part, in.weight);
    }
    at::Tensor factors;
    if (in.token_loss && !in.entropy_gradients.defined()) {
      // The logits hold softmax - one_hot(label): a row's factor is applied to what is not as wide,
      // and the logits are read and written once.
      factors = in.token_factors(begin, logprobs.narrow(0, begin, length));
      if (want_grad_hidden) d_hidden.mul_(factors);
      if (want_grad_weight) hidden = (hidden * factors).to(hidden.scalar_type());
    }
    changes.take(part, begin, factors);
    if (want_grad_weight) grad_weight->add(part, hidden);
  }
  LinearCrossEntropy::Result result;
  if (in.keep_logits && count <= chunk) result.logits = logits;
  result.loss_sum = -at::sum(rows.loss_weights.defined() ? logprobs * rows.loss_weights : logprobs);
  result.logprobs = rows.spread(logprobs, in.hidden.size(0));
  if (in.want_entropy) result.entropy = rows.spread(entropy, in.hidden.size(0));
  if (want_grad_hidden) result.grad_hidden = rows.spread(grad_hidden, in.hidden.size(0));
  result.grad_changes = changes.gradients();
  if (want_grad_weight) {
    grad_weight->finish();
    result.grad_weight = grad_weight_buffer;
  }
  return result;
}

/// The softmax reads and writes logits in pieces of 16 bytes, and holds a row in between, where
/// rows begin at a multiple of them.
std::vector<std::string> warnings(const LinearCrossEntropy::Dims& dims) {
  if (dims.vocab_size % 8 == 0) return {};
  return {
      fmt::format("slower than it could, as vocab_size {} is no multiple of 8; "
                  "model.resize_vocab={} makes it one",
                  dims.vocab_size, (dims.vocab_size + 7) / 8 * 8)};
}

}  // namespace

}  // namespace heddle::ops::linear_cross_entropy_cuda

namespace heddle::ops::cuda {

void add_linear_cross_entropy(Registry& registry) {
  using namespace linear_cross_entropy_cuda;
  registry.add<LinearCrossEntropy>(KernelInfo::cuda("cuda.fused"), {forward<false>},
                                   {.warnings = warnings});
  KernelInfo fp8 = KernelInfo::cuda("cuda.fused_fp8", {c10::ScalarType::BFloat16});
  fp8.only_by_name = true;
  fp8.refuse_device = [](const Target&) -> std::optional<std::string> {
    if (has_sm90a()) return std::nullopt;
    return "needs a device of compute capability 9.0 and a build with code for sm_90a";
  };
  fp8.falls_back = fmt::format(
      "cuda.fused for fewer than {} rows, and widths or vocabularies not a multiple of 16",
      linear_cuda::kFewestRows);
  registry.add<LinearCrossEntropy>(fp8, {forward<true>}, {.warnings = warnings});
}

}  // namespace heddle::ops::cuda
