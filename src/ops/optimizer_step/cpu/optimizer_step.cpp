#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>

#include "ops/compute_type.h"
#include "ops/optimizer_step/cpu/vector/adamw_elements.h"
#include "ops/optimizer_step/kernels.h"

namespace heddle::ops::optimizer_step_cpu {
namespace {

/// Many tensors are small and a few are large: all are cut into pieces of this many elements, and
/// the threads share the list of pieces. The cuts do not depend on the number of threads, hence
/// neither do the bits.
constexpr std::int64_t kPiece = 16384;

struct Piece {
  std::size_t tensor;
  std::int64_t begin, end;
};

template <class Count>
std::vector<Piece> pieces_of(std::size_t tensors, const Count& count) {
  std::vector<Piece> pieces;
  for (std::size_t i = 0; i < tensors; ++i) {
    for (std::int64_t begin = 0; begin < count(i); begin += kPiece) {
      pieces.push_back({i, begin, std::min(begin + kPiece, count(i))});
    }
  }
  return pieces;
}

template <class Body>
void for_each_piece(const std::vector<Piece>& pieces, const Body& body) {
  at::parallel_for(0, static_cast<std::int64_t>(pieces.size()), 2,
                   [&](std::int64_t first, std::int64_t last) {
                     for (std::int64_t i = first; i < last; ++i) {
                       body(static_cast<std::size_t>(i), pieces[static_cast<std::size_t>(i)]);
                     }
                   });
}

}  // namespace

void adamw(const std::vector<AdamwTensor>& tensors, const AdamwOptions& options) {
  struct Task {
    AdamwKernel kernel;
    AdamwElements elements;
    AdamwScalars scalars;
    at::Tensor gradient;  // holds a contiguous copy where one was needed
  };
  std::vector<Task> tasks;
  const double steps = static_cast<double>(options.step);
  for (const AdamwTensor& tensor : tensors) {
    Task task;
    task.gradient = tensor.gradient.contiguous();
    at::Tensor value = tensor.master.defined() ? tensor.master : tensor.parameter;
    at::Tensor exp_avg = tensor.exp_avg, exp_avg_sq = tensor.exp_avg_sq;
    at::Tensor parameter = tensor.parameter;
    task.kernel =
        HEDDLE_CPU_SELECT(adamw_kernel)(cpu_element(parameter), cpu_element(task.gradient));
    task.elements.value = value.mutable_data_ptr();
    task.elements.exp_avg = exp_avg.mutable_data_ptr();
    task.elements.exp_avg_sq = exp_avg_sq.mutable_data_ptr();
    task.elements.gradient = task.gradient.const_data_ptr();
    if (tensor.master.defined()) task.elements.rounded = parameter.mutable_data_ptr();
    task.scalars.decay = 1 - options.lr * tensor.weight_decay;
    task.scalars.beta1 = options.beta1;
    task.scalars.beta2 = options.beta2;
    task.scalars.step_size = options.lr / (1 - std::pow(options.beta1, steps));
    task.scalars.root_correction2 = std::sqrt(1 - std::pow(options.beta2, steps));
    task.scalars.eps = options.eps;
    task.scalars.gradient_multiplier = options.gradient_multiplier;
    tasks.push_back(std::move(task));
  }
  const auto pieces =
      pieces_of(tasks.size(), [&](std::size_t i) { return tasks[i].gradient.numel(); });
  for_each_piece(pieces, [&](std::size_t, const Piece& piece) {
    const Task& task = tasks[piece.tensor];
    task.kernel(task.elements, task.scalars, piece.begin, piece.end);
  });
}

double square_sum(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> dense;
  for (const at::Tensor& tensor : tensors) dense.push_back(tensor.contiguous());
  const auto pieces = pieces_of(dense.size(), [&](std::size_t i) { return dense[i].numel(); });
  std::vector<double> sums(pieces.size());
  for_each_piece(pieces, [&](std::size_t i, const Piece& piece) {
    const at::Tensor& tensor = dense[piece.tensor];
    sums[i] = HEDDLE_CPU_SELECT(square_sum_kernel)(cpu_element(tensor))(tensor.const_data_ptr(),
                                                                        piece.begin, piece.end);
  });
  double total = 0;
  for (const double sum : sums) total += sum;
  return total;
}

}  // namespace heddle::ops::optimizer_step_cpu
