#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "comm/world.h"

namespace heddle::comm {

class Connection;

/// A collective under way; what it reads and writes must stay as it is until wait() has returned.
/// Of tensors on a device: wait() has the current stream wait, not the host.
class Pending {
 public:
  Pending() = default;
  explicit Pending(std::function<void()> finish) : finish_(std::move(finish)) {}
  /// Returns when the result is there. Throws CommError. Nothing to do a second time.
  void wait();

 private:
  std::function<void()> finish_;
};

/// The ranks along one dimension of the mesh, or along several, and the collectives among them.
/// Every wait ends at the deadline of the job with a CommError that names operation, group, rank
/// and the ranks that give no sign of life. A group of size 1 has no process group: its collectives
/// are the identity. Tensors are contiguous, all on the CPU (Gloo) or all on the rank's device (its
/// own library, NCCL on CUDA); there a member that fails shows in the next call, or in wait().
class Group {
 public:
  /// A group of one rank.
  explicit Group(std::string name);
  /// `ranks` of the world in the order of their places in the group. Connects when first used; all
  /// members use their groups for the first time in the same order. `identity` distinguishes groups
  /// of one name, and may be empty.
  Group(std::string name, std::vector<std::int64_t> ranks, std::shared_ptr<World> world,
        const std::string& identity);
  /// A group of ranks without processes, this one being at `place` among them: tensors without
  /// storage (meta) travel in shape alone, and everything else is a CommError.
  Group(std::string name, std::vector<std::int64_t> ranks, std::int64_t place);

  const std::string& name() const;
  std::int64_t rank() const;  ///< Place of this rank.
  std::int64_t size() const;
  /// Their numbers in the world; empty for a group of one.
  const std::vector<std::int64_t>& ranks() const;

  /// Throws CommError if a collective of a device has been given up.
  void check() const;
  /// Sum over the group, in place.
  void all_reduce_sum(at::Tensor& tensor) const;
  void all_reduce_max(at::Tensor& tensor) const;
  double all_reduce_sum(double value) const;
  /// True everywhere if true anywhere.
  bool any(bool value) const;
  /// output [size * N ...] is the members' inputs [N, ...] in the order of their places.
  void all_gather(at::Tensor& output, const at::Tensor& input) const;
  Pending all_gather_async(at::Tensor& output, const at::Tensor& input) const;
  /// Several of one dtype in one operation: outputs[i] is the members' inputs[i].
  Pending all_gather_async(const std::vector<at::Tensor>& outputs,
                           const std::vector<at::Tensor>& inputs) const;
  /// output [N, ...] is this member's part of the sum of the inputs [size * N, ...].
  void reduce_scatter_sum(at::Tensor& output, const at::Tensor& input) const;
  Pending reduce_scatter_sum_async(at::Tensor& output, const at::Tensor& input) const;
  Pending reduce_scatter_sum_async(const std::vector<at::Tensor>& outputs,
                                   const std::vector<at::Tensor>& inputs) const;
  /// Rows input_rows[r] of the input go to member r, which receives them as its output_rows[this].
  void all_to_all(at::Tensor& output, const std::vector<std::int64_t>& output_rows,
                  const at::Tensor& input, const std::vector<std::int64_t>& input_rows) const;
  Pending all_to_all_async(at::Tensor& output, const std::vector<std::int64_t>& output_rows,
                           const at::Tensor& input,
                           const std::vector<std::int64_t>& input_rows) const;
  void broadcast(at::Tensor& tensor, std::int64_t root) const;
  /// Messages from one member to another arrive in the order in which they were sent; a tag that
  /// does not match is noticed on the CPU alone.
  void send(const at::Tensor& tensor, std::int64_t to, int tag = 0) const;
  Pending send_async(const at::Tensor& tensor, std::int64_t to, int tag = 0) const;
  void receive(at::Tensor& tensor, std::int64_t from, int tag = 0) const;
  void barrier() const;
  /// Ends what is under way on a device, because a member that is gone will not finish it; nothing
  /// may be started on the group any more. A kernel that waits for another rank would keep the
  /// device from whatever needs it alone, such as the start of another group.
  void give_up() const;
  /// Objects of all members, in the order of their places; texts may be empty and of any length.
  /// Travels over Gloo only.
  std::vector<std::string> all_gather_objects(const std::string& object) const;

 private:
  std::shared_ptr<Connection> connection_;
};

}  // namespace heddle::comm
