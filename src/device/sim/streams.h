#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

namespace heddle::device::sim {

/// The queues of the device. Without Options::defers_streams they are labels: work is done when it
/// is submitted. With it they are late: only a wait makes sure that work is done. What depends on
/// when that is gives a wrong number on hardware, sometimes; here it does each time, whatever the
/// threads do:
///   - what a stream has written is kept apart, and NaN (or -1) stands in its place, until somebody
///     synchronises with the stream: work of the same stream sees it, another stream or the host
///     that does not wait sees NaN;
///   - memory that a stream may still read or write is changed by no other stream and not freed,
///     and what it copies from the host stays as it is (rule stream-order).
class Streams {
 public:
  static Streams& all();

  /// While it lives, the memory shows what `stream` sees. One at a time, of all threads. Throws
  /// DeviceError for what was freed too early, as a driver reports late.
  class Work {
   public:
    explicit Work(const c10::Stream& stream);
    ~Work();
    Work(const Work&) = delete;
    Work& operator=(const Work&) = delete;
    /// The memory of these tensors of the host is, or was, touched by this work.
    void reads(const at::Tensor& host);
    void writes(const at::Tensor& host);
    /// Throws DeviceError if another stream still uses the memory.
    void about_to_write(const std::string& op, const at::Tensor& host) const;
    /// A tensor of the host proper, which the device reads when the work's turn comes.
    void reads_host(const at::Tensor& host);

   private:
    c10::Stream stream_;
    std::unique_lock<std::recursive_mutex> lock_;
    std::vector<c10::intrusive_ptr<c10::StorageImpl>> written_;
  };

  /// Work of the stream so far, for publish().
  std::int64_t position(const c10::Stream& stream);
  /// Everything of the stream up to there is done, as after a wait for it. Throws DeviceError if a
  /// tensor of the host has changed under a copy.
  void publish(const c10::Stream& stream, std::int64_t position);
  void publish(const c10::Stream& stream);
  /// Of all streams of a device.
  void publish_all(c10::DeviceIndex device);
  bool is_published(const c10::Stream& stream, std::int64_t position);
  /// The memory may be reused by the first of the streams, and was named to the others.
  void freed(const c10::StorageImpl& host, c10::DeviceIndex device,
             const std::vector<c10::StreamId>& streams) noexcept;

 private:
  using Storage = c10::intrusive_ptr<c10::StorageImpl>;
  struct Hidden {
    Storage storage;
    std::vector<char> bytes;
    std::int64_t position = 0;  ///< Position of its last write.
  };
  struct Read {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    std::int64_t position = 0;  ///< Position of the last read.
  };
  struct HostRead {
    Storage storage;
    std::vector<char> bytes;  ///< As they were when the copy was queued.
    std::int64_t position = 0;
  };
  struct Queue {
    std::int64_t position = 0;
    std::vector<Hidden> hidden;
    std::map<const c10::StorageImpl*, Read> reads;
    std::vector<HostRead> host_reads;
    bool uses(const c10::StorageImpl* storage) const;
  };
  using Key = std::pair<c10::DeviceIndex, c10::StreamId>;
  static void show(Hidden& hidden);
  static void hide(Hidden& hidden);
  static std::vector<char> bytes_of(const c10::StorageImpl& storage);

  std::recursive_mutex mutex_;  // a tensor may be freed while an operator runs
  std::map<Key, Queue> queues_;
  std::string late_error_;
  Queue& queue(const c10::Stream& stream);
};

/// The current stream of a device; of the current one.
c10::Stream current_stream(c10::DeviceIndex device);
c10::Stream current_stream();

}  // namespace heddle::device::sim
