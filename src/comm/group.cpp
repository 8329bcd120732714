#include "comm/group.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <algorithm>
#include <cstring>
#include <utility>

#include "comm/connection.h"

namespace heddle::comm {

void Pending::wait() {
  if (!finish_) return;
  const auto finish = std::exchange(finish_, nullptr);
  finish();
}

Group::Group(std::string name)
    : connection_(std::make_shared<Connection>(std::move(name), std::vector<std::int64_t>{},
                                               nullptr, "")) {}

Group::Group(std::string name, std::vector<std::int64_t> ranks, std::shared_ptr<World> world,
             const std::string& identity) {
  if (ranks.size() == 1) ranks.clear();
  connection_ =
      std::make_shared<Connection>(std::move(name), std::move(ranks), std::move(world), identity);
}

Group::Group(std::string name, std::vector<std::int64_t> ranks, std::int64_t place)
    : connection_(std::make_shared<Connection>(std::move(name), std::move(ranks), place)) {}

const std::string& Group::name() const { return connection_->name(); }
std::int64_t Group::rank() const { return connection_->rank(); }
std::int64_t Group::size() const { return connection_->size(); }
void Group::give_up() const { connection_->give_up(); }
void Group::check() const { connection_->check(); }
const std::vector<std::int64_t>& Group::ranks() const { return connection_->ranks(); }

namespace {

/// `all` is what `members` have of `one` each.
void check_sizes(const char* operation, const at::Tensor& all, const at::Tensor& one,
                 std::int64_t members) {
  TORCH_CHECK(all.numel() == members * one.numel() && all.scalar_type() == one.scalar_type(),
              operation, " of ", members, " ranks: ", all.sizes(), " ", all.scalar_type(), " and ",
              one.sizes(), " ", one.scalar_type(), " on each do not fit");
}

/// `all` and `one` in one list, what an operation over both of them holds on to.
std::vector<at::Tensor> both_of(std::vector<at::Tensor> all, const std::vector<at::Tensor>& one) {
  all.insert(all.end(), one.begin(), one.end());
  return all;
}

/// Gloo's operations over several tensors, and its scattered sum, are handles that know neither a
/// time limit nor whether they have ended: on the CPU each tensor is an operation of its own.
Pending all_of(std::vector<Pending> each) {
  return Pending([each = std::move(each)]() mutable {
    for (Pending& one : each) one.wait();
  });
}

c10d::AllreduceOptions reduction(c10d::ReduceOp::RedOpType op) {
  c10d::AllreduceOptions options;
  options.reduceOp = op;
  return options;
}

}  // namespace

void Group::all_reduce_sum(at::Tensor& tensor) const {
  if (size() == 1) return;
  std::vector<at::Tensor> tensors = {tensor};
  connection_
      ->launch(
          "all_reduce", {tensor},
          [&](c10d::Backend& b) { return b.allreduce(tensors, reduction(c10d::ReduceOp::SUM)); })
      .wait();
}

void Group::all_reduce_max(at::Tensor& tensor) const {
  if (size() == 1) return;
  std::vector<at::Tensor> tensors = {tensor};
  connection_
      ->launch(
          "all_reduce", {tensor},
          [&](c10d::Backend& b) { return b.allreduce(tensors, reduction(c10d::ReduceOp::MAX)); })
      .wait();
}

double Group::all_reduce_sum(double value) const {
  if (size() == 1 || !connection_->has_processes()) return value;
  at::Tensor tensor = at::full({1}, value, at::kDouble);
  all_reduce_sum(tensor);
  return tensor.item<double>();
}

bool Group::any(bool value) const {
  if (size() == 1 || !connection_->has_processes()) return value;
  at::Tensor tensor = at::full({1}, value ? 1 : 0, at::kInt);
  all_reduce_max(tensor);
  return tensor.item<int>() != 0;
}

Pending Group::all_gather_async(at::Tensor& output, const at::Tensor& input) const {
  return all_gather_async(std::vector{output}, std::vector{input});
}

Pending Group::all_gather_async(const std::vector<at::Tensor>& outputs,
                                const std::vector<at::Tensor>& inputs) const {
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    check_sizes("all_gather", outputs.at(i), inputs[i], size());
    if (size() == 1) outputs[i].copy_(inputs[i]);
  }
  if (inputs.empty() || size() == 1) return {};
  if (inputs.front().is_cpu()) {
    std::vector<Pending> each;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      at::Tensor output = outputs[i], input = inputs[i];
      each.push_back(connection_->launch("all_gather", {output, input}, [&](c10d::Backend& gloo) {
        return gloo._allgather_base(output, input);
      }));
    }
    return all_of(std::move(each));
  }
  return connection_->launch("all_gather", both_of(outputs, inputs), [&](c10d::Backend& b) {
    std::vector<at::Tensor> out = outputs, in = inputs;
    return in.size() == 1 ? b._allgather_base(out[0], in[0])
                          : b.allgather_into_tensor_coalesced(out, in);
  });
}

void Group::all_gather(at::Tensor& output, const at::Tensor& input) const {
  all_gather_async(output, input).wait();
}

Pending Group::reduce_scatter_sum_async(at::Tensor& output, const at::Tensor& input) const {
  return reduce_scatter_sum_async(std::vector{output}, std::vector{input});
}

Pending Group::reduce_scatter_sum_async(const std::vector<at::Tensor>& outputs,
                                        const std::vector<at::Tensor>& inputs) const {
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    check_sizes("reduce_scatter", inputs[i], outputs.at(i), size());
    if (size() == 1) outputs[i].copy_(inputs[i]);
  }
  if (inputs.empty() || size() == 1) return {};
  if (inputs.front().is_cpu()) {
    // As Gloo does it itself: it has no sum that is scattered.
    std::vector<Pending> each;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      std::vector<at::Tensor> sum = {inputs[i].clone()};
      Pending summed = connection_->launch(
          "reduce_scatter", sum, [&](c10d::Backend& gloo) { return gloo.allreduce(sum); });
      each.emplace_back([summed, all = sum.front(), output = outputs[i], place = rank()]() mutable {
        summed.wait();
        at::Tensor(output).view({-1}).copy_(
            all.view({-1}).narrow(0, place * output.numel(), output.numel()));
      });
    }
    return all_of(std::move(each));
  }
  return connection_->launch("reduce_scatter", both_of(outputs, inputs), [&](c10d::Backend& b) {
    std::vector<at::Tensor> out = outputs, in = inputs;
    return in.size() == 1 ? b._reduce_scatter_base(out[0], in[0])
                          : b.reduce_scatter_tensor_coalesced(out, in);
  });
}

void Group::reduce_scatter_sum(at::Tensor& output, const at::Tensor& input) const {
  reduce_scatter_sum_async(output, input).wait();
}

Pending Group::all_to_all_async(at::Tensor& output, const std::vector<std::int64_t>& output_rows,
                                const at::Tensor& input,
                                const std::vector<std::int64_t>& input_rows) const {
  if (size() == 1) {
    output.copy_(input);
    return {};
  }
  return connection_->launch("all_to_all", {output, input}, [&](c10d::Backend& b) {
    at::Tensor out = output, in = input;
    std::vector<std::int64_t> to = input_rows, from = output_rows;
    return b.alltoall_base(out, in, from, to);
  });
}

void Group::all_to_all(at::Tensor& output, const std::vector<std::int64_t>& output_rows,
                       const at::Tensor& input, const std::vector<std::int64_t>& input_rows) const {
  all_to_all_async(output, output_rows, input, input_rows).wait();
}

void Group::broadcast(at::Tensor& tensor, std::int64_t root) const {
  if (size() == 1) return;
  connection_
      ->launch("broadcast", {tensor},
               [&](c10d::Backend& b) {
                 std::vector<at::Tensor> tensors = {tensor};
                 c10d::BroadcastOptions options;
                 options.rootRank = root;
                 return b.broadcast(tensors, options);
               })
      .wait();
}

void Group::send(const at::Tensor& tensor, std::int64_t to, int tag) const {
  send_async(tensor, to, tag).wait();
}

Pending Group::send_async(const at::Tensor& tensor, std::int64_t to, int tag) const {
  return connection_->send(tensor, to, tag);
}

void Group::receive(at::Tensor& tensor, std::int64_t from, int tag) const {
  connection_->receive(tensor, from, tag).wait();
}

void Group::barrier() const { any(false); }

std::vector<std::string> Group::all_gather_objects(const std::string& object) const {
  if (size() == 1) return {object};
  if (!connection_->has_processes())
    return std::vector<std::string>(static_cast<std::size_t>(size()), object);
  const at::Tensor own = at::full({1}, static_cast<std::int64_t>(object.size()), at::kLong);
  at::Tensor sizes = at::empty({size()}, at::kLong);
  all_gather(sizes, own);
  const auto* bytes = sizes.const_data_ptr<std::int64_t>();
  const std::int64_t longest = std::max<std::int64_t>(1, *std::max_element(bytes, bytes + size()));
  at::Tensor mine = at::zeros({longest}, at::kByte), all = at::empty({size() * longest}, at::kByte);
  std::memcpy(mine.mutable_data_ptr(), object.data(), object.size());
  all_gather(all, mine);
  std::vector<std::string> objects;
  const auto* text = static_cast<const char*>(all.const_data_ptr());
  for (std::int64_t r = 0; r < size(); ++r)
    objects.emplace_back(text + r * longest, static_cast<std::size_t>(bytes[r]));
  return objects;
}

}  // namespace heddle::comm
