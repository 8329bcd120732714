#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "comm/group.h"

namespace heddle::sync {

/// A carrier of buckets from the sender, rank 0, to the rollout ranks. Every wait has the deadline
/// of the group and ends with a CommError that names the missing rank.
class Channel {
 public:
  virtual ~Channel() = default;
  virtual std::int64_t rank() const = 0;
  virtual std::int64_t size() const = 0;
  virtual void broadcast(at::Tensor& tensor, std::int64_t root) = 0;
  virtual void sum(at::Tensor& counts) = 0;
  /// Objects of all members, in the order of ranks.
  virtual std::vector<std::string> gather(const std::string& text) = 0;
};

/// Over a group, for tensors of the host: Gloo.
std::unique_ptr<Channel> make_channel(comm::Group group);

/// Each rank broadcasts bytes that follow from its place and the generation, and every rank looks
/// at every byte: a sum of zeros would come out right over a broken wire too. Throws CommError.
void warm_up(Channel& channel, std::int64_t generation);

}  // namespace heddle::sync
