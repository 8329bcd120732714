#include "device/sim/streams.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "base/errors.h"
#include "device/sim/driver.h"
#include "device/sim/rules.h"

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
  // A storage that was resized since holds other things; an empty one has no address.
  if (hidden.bytes.empty() || hidden.storage->nbytes() != hidden.bytes.size()) return;
  std::memcpy(hidden.storage->mutable_data(), hidden.bytes.data(), hidden.bytes.size());
}

std::vector<char> Streams::bytes_of(const c10::StorageImpl& storage) {
  const auto* const bytes = static_cast<const char*>(storage.data());
  return {bytes, bytes + storage.nbytes()};
}

bool Streams::Queue::uses(const c10::StorageImpl* storage) const {
  const auto read = reads.find(storage);
  return (read != reads.end() && !read->second.storage.expired()) ||
         std::ranges::any_of(hidden, [&](const Hidden& h) { return h.storage.get() == storage; });
}

void Streams::hide(Hidden& hidden) {
  hidden.bytes = bytes_of(*hidden.storage);
  if (hidden.bytes.empty()) return;
  std::memset(hidden.storage->mutable_data(), kPoison, hidden.bytes.size());
}

Streams::Queue& Streams::queue(const c10::Stream& stream) {
  return queues_[{stream.device_index(), stream.id()}];
}

Streams::Work::Work(const c10::Stream& stream) : stream_(stream) {
  if (!defers()) return;
  lock_ = std::unique_lock(all().mutex_);
  if (!all().late_error_.empty())
    throw DeviceError(std::exchange(all().late_error_, std::string()));
  Queue& queue = all().queue(stream_);
  ++queue.position;
  std::erase_if(queue.reads, [](const auto& entry) { return entry.second.storage.expired(); });
  // Nobody can read what only the queue still holds.
  std::erase_if(queue.hidden, [](const Hidden& h) { return h.storage.use_count() == 1; });
  for (Hidden& hidden : queue.hidden) show(hidden);
}

void Streams::Work::writes(const at::Tensor& host) {
  if (!defers()) return;
  written_.push_back(
      c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(host.storage().unsafeGetStorageImpl()));
}

void Streams::Work::reads(const at::Tensor& host) {
  if (!defers()) return;
  Queue& queue = all().queue(stream_);
  c10::StorageImpl* const storage = host.storage().unsafeGetStorageImpl();
  const auto known =
      queue.reads
          .try_emplace(storage,
                       Read{c10::weak_intrusive_ptr<c10::StorageImpl>(
                                c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage)),
                            0})
          .first;
  known->second.position = queue.position;
}

void Streams::Work::reads_host(const at::Tensor& host) {
  if (!defers()) return;
  Queue& queue = all().queue(stream_);
  const auto storage =
      c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(host.storage().unsafeGetStorageImpl());
  queue.host_reads.push_back({storage, bytes_of(*storage), queue.position});
}

void Streams::Work::about_to_write(const std::string& op, const at::Tensor& host) const {
  if (!defers()) return;
  const c10::StorageImpl* const storage = host.storage().unsafeGetStorageImpl();
  for (const auto& [key, queue] : all().queues_) {
    if (key == Key{stream_.device_index(), stream_.id()} || !queue.uses(storage)) continue;
    refuse(Rule::kStreamOrder,
           "{} on stream {} writes into memory that work on stream {} may still use; wait for an "
           "event of that stream first",
           op, stream_.id(), key.second);
  }
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
  Queue& done = queue(stream);
  std::erase_if(done.hidden, [&](Hidden& hidden) {
    if (hidden.position > position) return false;
    show(hidden);
    return true;
  });
  std::erase_if(done.reads, [&](const auto& entry) { return entry.second.position <= position; });
  bool has_changed = false;
  std::erase_if(done.host_reads, [&](const HostRead& read) {
    if (read.position > position) return false;
    has_changed = has_changed || bytes_of(*read.storage) != read.bytes;
    return true;
  });
  if (has_changed) {
    refuse(Rule::kStreamOrder,
           "a tensor of the host was changed before stream {} had copied it; wait for the copy, or "
           "make one that blocks",
           stream.id());
  }
}

void Streams::freed(const c10::StorageImpl& host, c10::DeviceIndex device,
                    const std::vector<c10::StreamId>& streams) noexcept {
  if (!defers()) return;
  const std::scoped_lock lock(mutex_);
  for (const auto& [key, queue] : queues_) {
    if (key.first != device || !queue.uses(&host) ||
        std::ranges::find(streams, key.second) != streams.end()) {
      continue;
    }
    late_error_ = broken(
        Rule::kStreamOrder,
        fmt::format("memory of stream {} was freed while work on stream {} may still use it; name "
                    "that stream with record_stream() or wait for it first",
                    streams.front(), key.second));
  }
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
