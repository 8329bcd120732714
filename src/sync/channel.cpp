#include "sync/channel.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
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
  comm::Pending start_broadcast(at::Tensor& words, std::int64_t root) override {
    return group_.broadcast_async(words, root);
  }
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

void warm_up(Channel& channel, std::int64_t generation, c10::Device device) {
  constexpr std::int64_t kWords = 512;
  std::string wrong;
  for (std::int64_t root = 0; root < channel.size(); ++root) {
    at::Tensor pattern = at::empty({kWords}, at::kLong);
    auto* expected = pattern.mutable_data_ptr<std::int64_t>();
    const auto key = static_cast<std::uint64_t>(generation * 65536 + root);
    for (std::int64_t at = 0; at < kWords; ++at) {
      expected[at] =
          static_cast<std::int64_t>(splitmix::bits(key, static_cast<std::uint64_t>(at)));
    }
    at::Tensor words =
        (channel.rank() == root ? pattern.clone() : at::zeros({kWords}, at::kLong)).to(device);
    channel.start_broadcast(words, root).wait();
    const at::Tensor here = words.cpu();
    const auto* found = here.const_data_ptr<std::int64_t>();
    const std::int64_t at = std::mismatch(found, found + kWords, expected).first - found;
    if (at == kWords || !wrong.empty()) continue;
    wrong = fmt::format(
        "weight sync: rank {} got wrong words from rank {} in generation {}: word {} is {:x}, "
        "expected {:x}",
        channel.rank(), root, generation, at, found[at], expected[at]);
  }
  // Says first if a device gave its words up.
  at::Tensor wrong_ranks = at::full({1}, wrong.empty() ? 0 : 1, at::kLong);
  channel.sum(wrong_ranks);
  if (!wrong.empty()) throw_error<CommError>("{}", wrong);
  if (wrong_ranks.item<std::int64_t>() > 0)
    throw_error<CommError>("weight sync: another rank of generation {} got wrong words", generation);
}

}  // namespace heddle::sync
