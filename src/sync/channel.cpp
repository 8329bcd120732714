#include "sync/channel.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <future>
#include <memory>
#include <optional>
#include <thread>
#include <utility>

#include "base/errors.h"
#include "base/splitmix.h"

namespace heddle::sync {
namespace {

constexpr std::size_t kUnderWay = 8;  ///< Broadcasts of a device that are queued at a time.
constexpr std::chrono::microseconds kPoll{20};

c10::Stream current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

class GroupChannel final : public Channel {
 public:
  explicit GroupChannel(comm::Group group) : group_(std::move(group)) {}
  std::int64_t rank() const override { return group_.rank(); }
  std::int64_t size() const override { return group_.size(); }
  void broadcast(at::Tensor& tensor, std::int64_t root) override { group_.broadcast(tensor, root); }
  comm::Pending start_broadcast(at::Tensor& words, std::int64_t root) override {
    if (words.is_cpu()) return on_a_thread(words, root);
    if (words.is_cuda()) return on_a_stream(words, root);
    // HCCL takes calls of the device's own thread, in the order of its queue.
    group_.broadcast(words, root);
    return {};
  }
  void sum(at::Tensor& counts) override { group_.all_reduce_sum(counts); }
  std::vector<std::string> gather(const std::string& text) override {
    return group_.all_gather_objects(text);
  }
  void give_up() override { group_.give_up(); }

 private:
  /// Gloo keeps the caller waiting: another thread calls it, for one broadcast after the other.
  comm::Pending on_a_thread(const at::Tensor& words, std::int64_t root) {
    last_ = std::async(std::launch::async, [this, same = at::Tensor(words), root,
                                            before = last_]() mutable {
              if (before.valid()) before.get();
              group_.broadcast(same, root);
            }).share();
    return comm::Pending([mine = last_] { mine.get(); });
  }

  /// On a stream of its own, which takes the words as the current one leaves them; the current one
  /// goes on, and waits for them where the caller does.
  comm::Pending on_a_stream(const at::Tensor& words, std::int64_t root) {
    const c10::Device device = words.device();
    const c10::impl::VirtualGuardImpl streams(device.type());
    wait_for_all_but(kUnderWay - 1);
    if (!stream_) stream_ = streams.getStreamFromGlobalPool(device, /*isHighPriority=*/true);
    c10::Event written(device.type());
    written.record(streams.getStream(device));
    written.block(*stream_);
    {
      const c10::StreamGuard on(*stream_);
      at::Tensor same = words;
      group_.broadcast(same, root);
    }
    auto done = std::make_shared<c10::Event>(device.type());
    done->record(*stream_);
    under_way_.push_back(done);
    return comm::Pending([done, words] { done->block(current_stream(words.device())); });
  }

  /// The host does not run further ahead: a device takes so many launches, and one more keeps its
  /// caller waiting, and with it the thread that would see that a rank is gone.
  void wait_for_all_but(std::size_t most) {
    for (; under_way_.size() > most; under_way_.pop_front()) {
      while (!under_way_.front()->query()) {
        group_.check();
        std::this_thread::sleep_for(kPoll);
      }
    }
  }

  comm::Group group_;
  std::shared_future<void> last_;  ///< For words of the host.
  std::deque<std::shared_ptr<c10::Event>> under_way_;
  std::optional<c10::Stream> stream_;  ///< For words of a CUDA device.
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
      expected[at] = static_cast<std::int64_t>(splitmix::bits(key, static_cast<std::uint64_t>(at)));
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
    throw_error<CommError>("weight sync: another rank of generation {} got wrong words",
                           generation);
}

}  // namespace heddle::sync
