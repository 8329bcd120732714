#include "train/whole_matrices.h"

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <span>

#include "base/layout.h"
#include "ops/autograd.h"

namespace heddle::train {
namespace {

/// Elements that travel at a time.
constexpr std::int64_t kBucket = std::int64_t{1} << 26;

/// Whether the layout leaves each matrix of a stack in one piece, on every rank: what divides it is
/// the placement of its inner dimensions, as the rows of a stack are matrices.
bool keeps_matrices_whole(const nn::Parameter& parameter) {
  return parameter.global_shape().size() == 3 &&
         std::none_of(parameter.placement().begin(), parameter.placement().end(),
                      [](const nn::Shard& shard) { return shard.tensor_dim > 0; });
}

std::int64_t numel_of(const nn::Parameter& parameter) {
  return whole_region(parameter.global_shape()).numel();
}

at::Tensor region_of(const at::Tensor& whole, const Region& region) {
  at::Tensor x = whole;
  for (std::size_t d = 0; d < region.offset.size(); ++d)
    x = x.narrow(static_cast<std::int64_t>(d), region.offset[d], region.size[d]);
  return x;
}

/// The bucket's matrices, one after the other in one buffer.
class Bucket {
 public:
  explicit Bucket(std::span<DividedMatrix*> matrices) : matrices_(matrices) {
    std::int64_t size = 0;
    for (const DividedMatrix* matrix : matrices) size += numel_of(*matrix->parameter);
    buffer_ = at::zeros({size}, matrices.front()->part.options());
    std::int64_t offset = 0;
    for (const DividedMatrix* matrix : matrices) {
      const std::int64_t numel = numel_of(*matrix->parameter);
      wholes_.push_back(buffer_.narrow(0, offset, numel).view(matrix->parameter->global_shape()));
      offset += numel;
    }
  }

  void bring_together(const comm::Group& stage) {
    for (std::size_t i = 0; i < matrices_.size(); ++i) {
      // One of the ranks with the same values counts.
      if (matrices_[i]->parameter->is_copy()) continue;
      for (const nn::Box& box : matrices_[i]->parameter->boxes(matrices_[i]->part))
        region_of(wholes_[i], box.global).copy_(box.tensor);
    }
    stage.all_reduce_sum(buffer_);
  }

  void compute(const comm::Group& stage, const std::function<at::Tensor(const at::Tensor&)>& f) {
    for (std::size_t i = 0; i < wholes_.size(); ++i) {
      const bool is_mine = static_cast<std::int64_t>(i) % stage.size() == stage.rank();
      if (is_mine) {
        wholes_[i].copy_(f(wholes_[i]));
      } else {
        wholes_[i].zero_();
      }
    }
    stage.all_reduce_sum(buffer_);
  }

  void hand_out() {
    for (std::size_t i = 0; i < matrices_.size(); ++i) {
      for (nn::Box& box : matrices_[i]->parameter->boxes(matrices_[i]->part))
        box.tensor.copy_(region_of(wholes_[i], box.global));
    }
  }

 private:
  std::span<DividedMatrix*> matrices_;
  at::Tensor buffer_;
  std::vector<at::Tensor> wholes_;
};

}  // namespace

void apply_to_whole(std::vector<DividedMatrix>& matrices, const comm::Group& stage,
                    const std::function<at::Tensor(const at::Tensor&)>& f) {
  const ops::NoGradient guard;
  std::vector<DividedMatrix*> divided;
  for (DividedMatrix& matrix : matrices) {
    if (stage.size() > 1 && !keeps_matrices_whole(*matrix.parameter)) {
      divided.push_back(&matrix);
    } else if (matrix.part.numel() > 0) {
      matrix.part.copy_(f(matrix.part));
    }
  }
  for (std::size_t first = 0, last = 0; first < divided.size(); first = last) {
    std::int64_t size = 0;
    while (last < divided.size() &&
           (last == first || size + numel_of(*divided[last]->parameter) <= kBucket)) {
      size += numel_of(*divided[last]->parameter);
      ++last;
    }
    Bucket bucket{std::span(divided).subspan(first, last - first)};
    bucket.bring_together(stage);
    bucket.compute(stage, f);
    bucket.hand_out();
  }
}

}  // namespace heddle::train
