#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "sync/channel.h"

namespace heddle::sync::testing {

/// Hands all on to another channel.
class HandingChannel : public Channel {
 public:
  explicit HandingChannel(std::unique_ptr<Channel> channel) : channel_(std::move(channel)) {}
  std::int64_t rank() const override { return channel_->rank(); }
  std::int64_t size() const override { return channel_->size(); }
  void broadcast(at::Tensor& tensor, std::int64_t root) override {
    channel_->broadcast(tensor, root);
  }
  comm::Pending start_broadcast(at::Tensor& words, std::int64_t root) override {
    return channel_->start_broadcast(words, root);
  }
  void sum(at::Tensor& counts) override { channel_->sum(counts); }
  std::vector<std::string> gather(const std::string& text) override {
    return channel_->gather(text);
  }
  void give_up() override { channel_->give_up(); }

 private:
  std::unique_ptr<Channel> channel_;
};

/// Flips a bit of chosen buckets, counted from the first after the warm-up, on their way to one
/// member.
class DamagingChannel final : public HandingChannel {
 public:
  DamagingChannel(std::unique_ptr<Channel> channel, std::function<bool(std::int64_t)> damages)
      : HandingChannel(std::move(channel)), damages_(std::move(damages)) {}
  comm::Pending start_broadcast(at::Tensor& words, std::int64_t root) override {
    auto pending = std::make_shared<comm::Pending>(HandingChannel::start_broadcast(words, root));
    const bool damages = ++count_ > size() && damages_(count_ - size() - 1);
    return comm::Pending([pending, damages, words]() mutable {
      pending->wait();
      if (damages) words.select(0, words.numel() / 2).bitwise_xor_(16);
    });
  }

 private:
  std::function<bool(std::int64_t)> damages_;
  std::int64_t count_ = 0;
};

}  // namespace heddle::sync::testing
