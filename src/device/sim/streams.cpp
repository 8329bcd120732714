#include "device/sim/streams.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "device/sim/driver.h"

namespace heddle::device::sim {
namespace {

bool defers() { return driver().options.defers_streams; }

// NaN in every floating type, -1 in every integer.
constexpr int kPoison = 0xFF;

}  // namespace

Streams& Streams::all() {
  static auto* const made = new Streams;  // never destroyed, as the driver
  return *made;
}

void Streams::show(Hidden& hidden) {
  // A storage that was resized since holds other things.
  if (hidden.storage->nbytes() != hidden.bytes.size()) return;
  std::memcpy(hidden.storage->mutable_data(), hidden.bytes.data(), hidden.bytes.size());
}

void Streams::hide(Hidden& hidden) {
  hidden.bytes.resize(hidden.storage->nbytes());
  if (hidden.bytes.empty()) return;
  std::memcpy(hidden.bytes.data(), hidden.storage->data(), hidden.bytes.size());
  std::memset(hidden.storage->mutable_data(), kPoison, hidden.bytes.size());
}

Streams::Queue& Streams::queue(const c10::Stream& stream) {
  return queues_[{stream.device_index(), stream.id()}];
}

Streams::Work::Work(const c10::Stream& stream) : stream_(stream) {
  if (!defers()) return;
  lock_ = std::unique_lock(all().mutex_);
  Queue& queue = all().queue(stream_);
  ++queue.position;
  // Nobody can read what only the queue still holds.
  std::erase_if(queue.hidden, [](const Hidden& h) { return h.storage.use_count() == 1; });
  for (Hidden& hidden : queue.hidden) show(hidden);
}

void Streams::Work::writes(const at::Tensor& host) {
  if (!defers()) return;
  written_.push_back(
      c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(host.storage().unsafeGetStorageImpl()));
}

Streams::Work::~Work() {
  if (!lock_) return;
  Queue& queue = all().queue(stream_);
  for (auto& storage : written_) {
    const auto known = std::find_if(queue.hidden.begin(), queue.hidden.end(),
                                    [&](const Hidden& h) { return h.storage == storage; });
    if (known != queue.hidden.end()) {
      known->position = queue.position;
    } else {
      queue.hidden.push_back({std::move(storage), {}, queue.position});
    }
  }
  for (Hidden& hidden : queue.hidden) hide(hidden);
}

std::int64_t Streams::position(const c10::Stream& stream) {
  const std::scoped_lock lock(mutex_);
  return queue(stream).position;
}

void Streams::publish(const c10::Stream& stream, std::int64_t position) {
  if (!defers()) return;
  const std::scoped_lock lock(mutex_);
  std::erase_if(queue(stream).hidden, [&](Hidden& hidden) {
    if (hidden.position > position) return false;
    show(hidden);
    return true;
  });
}

void Streams::publish(const c10::Stream& stream) {
  publish(stream, std::numeric_limits<std::int64_t>::max());
}

void Streams::publish_all(c10::DeviceIndex device) {
  std::vector<c10::StreamId> ids;
  {
    const std::scoped_lock lock(mutex_);
    for (const auto& [key, queue] : queues_) {
      if (key.first == device) ids.push_back(key.second);
    }
  }
  for (const c10::StreamId id : ids)
    publish(c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, device), id));
}

bool Streams::is_published(const c10::Stream& stream, std::int64_t position) {
  const std::scoped_lock lock(mutex_);
  const auto& hidden = queue(stream).hidden;
  return std::none_of(hidden.begin(), hidden.end(),
                      [&](const Hidden& h) { return h.position <= position; });
}

}  // namespace heddle::device::sim
