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
  /// Control messages, on the host.
  virtual void broadcast(at::Tensor& tensor, std::int64_t root) = 0;
  /// Words (int64) of the host or of a device, in the order of the calls. For those of a device the
  /// wait is its queue's, not the host's: what goes wrong shows in the next control message.
  virtual comm::Pending start_broadcast(at::Tensor& words, std::int64_t root) = 0;
  virtual void sum(at::Tensor& counts) = 0;
  /// Objects of all members, in the order of ranks.
  virtual std::vector<std::string> gather(const std::string& text) = 0;
  /// Ends what is under way, as comm::Group::give_up does.
  virtual void give_up() = 0;
};

/// Over a group: control messages by Gloo, words of a device by its own library.
std::unique_ptr<Channel> make_channel(comm::Group group);

/// Each rank broadcasts words of `device` that follow from its place and the generation, and every
/// rank looks at every word: a sum of zeros would come out right over a broken wire too. Connects
/// what carries them. Throws CommError on all ranks.
void warm_up(Channel& channel, std::int64_t generation, c10::Device device);

}  // namespace heddle::sync
