#include "nn/tensor_parallel.h"

#include <ATen/ops/empty.h>

#include <memory>
#include <utility>

#include "ops/autograd.h"
#include "ops/collectives.h"

namespace heddle::nn {
namespace {

/// The gather of rows that are wanted once more in the backward. It may be started before.
class GatherAgain {
 public:
  /// `make` returns this rank's rows.
  GatherAgain(std::function<at::Tensor()> make, comm::Group group)
      : make_(std::move(make)), group_(std::move(group)) {}

  void start() {
    if (rows_.defined()) return;
    own_ = make_().contiguous();
    std::vector<std::int64_t> sizes = own_.sizes().vec();
    sizes[0] *= group_.size();
    rows_ = at::empty(sizes, own_.options());
    gathering_ = group_.all_gather_async(rows_, own_);
  }
  at::Tensor finish() {
    start();
    gathering_.wait();
    own_.reset();
    return std::exchange(rows_, {});
  }

 private:
  std::function<at::Tensor()> make_;
  comm::Group group_;
  at::Tensor own_, rows_;
  comm::Pending gathering_;
};

/// This rank's rows of the sum of the partial products. Its backward is the first of the part's:
/// there it starts `again`, if something still waits for that.
at::Tensor leave(const at::Tensor& partial, const comm::Group& group,
                 const std::weak_ptr<GatherAgain>& again, bool value_unused) {
  const at::Tensor y = ops::run_without_gradient([&] {
    if (!value_unused) return ops::reduce_scatter_rows(partial, group);
    return at::empty({ops::own_rows(partial.size(0), group).count, partial.size(1)},
                     partial.options());
  });
  return ops::with_gradient("leave_tensor_parallel", {partial}, {y},
                            [group, again](const ops::Tensors& grads) -> ops::Tensors {
                              if (!grads[0].defined()) return {{}};
                              const at::Tensor gradient = ops::all_gather_rows(grads[0], group);
                              if (const auto waited_for = again.lock()) waited_for->start();
                              return {gradient};
                            })[0];
}

}  // namespace

at::Tensor run_tensor_parallel(const LinearInput& x, const BlockInputs& inputs,
                               const std::function<at::Tensor(const LinearInput&)>& part,
                               bool value_unused) {
  if (inputs.tensor_group == nullptr) return part(x);
  const comm::Group& group = *inputs.tensor_group;
  LinearInput rows(ops::all_gather_rows(x.value, group));
  std::shared_ptr<GatherAgain> again;
  if (inputs.recompute_elementwise) {
    const auto kept = [value = ops::detached(x.value)] { return value; };
    again = std::make_shared<GatherAgain>(x.again ? x.again : kept, group);
    // Linear layers drop it where no weight is trained.
    rows.again = [again] { return again->finish(); };
  }
  return leave(part(rows), group, again, value_unused);
}

}  // namespace heddle::nn
