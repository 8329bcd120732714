#include "sync/channel.h"

#include <ATen/ops/empty.h>

#include <utility>

#include "base/errors.h"
#include "base/splitmix.h"

namespace heddle::sync {
namespace {

class GroupChannel final : public Channel {
 public:
  explicit GroupChannel(comm::Group group) : group_(std::move(group)) {}
  std::int64_t rank() const override { return group_.rank(); }
  std::int64_t size() const override { return group_.size(); }
  void broadcast(at::Tensor& tensor, std::int64_t root) override { group_.broadcast(tensor, root); }
  void sum(at::Tensor& counts) override { group_.all_reduce_sum(counts); }
  std::vector<std::string> gather(const std::string& text) override {
    return group_.all_gather_objects(text);
  }

 private:
  comm::Group group_;
};

}  // namespace

std::unique_ptr<Channel> make_channel(comm::Group group) {
  return std::make_unique<GroupChannel>(std::move(group));
}

void warm_up(Channel& channel, std::int64_t generation) {
  constexpr std::int64_t kBytes = 4096;
  for (std::int64_t root = 0; root < channel.size(); ++root) {
    const auto pattern = [&](std::int64_t at) {
      const auto key = static_cast<std::uint64_t>(generation * 65536 + root);
      return static_cast<std::uint8_t>(splitmix::bits(key, static_cast<std::uint64_t>(at)));
    };
    at::Tensor tensor = at::empty({kBytes}, at::kByte);
    auto* bytes = tensor.mutable_data_ptr<std::uint8_t>();
    for (std::int64_t at = 0; at < kBytes; ++at)
      bytes[at] = channel.rank() == root ? pattern(at) : std::uint8_t{0};
    channel.broadcast(tensor, root);
    for (std::int64_t at = 0; at < kBytes; ++at) {
      if (bytes[at] == pattern(at)) continue;
      throw_error<CommError>(
          "weight sync: rank {} got wrong bytes from rank {} in generation {}: "
          "byte {} is {}, expected {}",
          channel.rank(), root, generation, at, bytes[at], pattern(at));
    }
  }
}

}  // namespace heddle::sync
