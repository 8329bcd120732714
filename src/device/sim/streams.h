#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

namespace heddle::device::sim {

/// The queues of the device. Without Options::defers_streams they are labels: work is done when it
/// is submitted. With it, what a stream has written is kept apart, and NaN (or -1) stands in its
/// place, until somebody synchronises with the stream: work of the same stream sees it, another
/// stream or the host that does not wait sees NaN, each time. (A stream that overwrites what
/// another still reads is not caught.)
class Streams {
 public:
  static Streams& all();

  /// While it lives, the memory shows what `stream` sees. One at a time, of all threads.
  class Work {
   public:
    explicit Work(const c10::Stream& stream);
    ~Work();
    Work(const Work&) = delete;
    Work& operator=(const Work&) = delete;
    /// The memory of this tensor of the host was, or will be, written by this work.
    void writes(const at::Tensor& host);

   private:
    c10::Stream stream_;
    std::unique_lock<std::mutex> lock_;
    std::vector<c10::intrusive_ptr<c10::StorageImpl>> written_;
  };

  /// Work of the stream so far, for publish().
  std::int64_t position(const c10::Stream& stream);
  /// Shows everyone what the stream wrote up to there, as after a wait for it.
  void publish(const c10::Stream& stream, std::int64_t position);
  void publish(const c10::Stream& stream);
  /// Of all streams of a device.
  void publish_all(c10::DeviceIndex device);
  bool is_published(const c10::Stream& stream, std::int64_t position);

 private:
  struct Hidden {
    c10::intrusive_ptr<c10::StorageImpl> storage;
    std::vector<char> bytes;
    std::int64_t position = 0;  ///< Of its last write.
  };
  struct Queue {
    std::int64_t position = 0;
    std::vector<Hidden> hidden;
  };
  static void show(Hidden& hidden);
  static void hide(Hidden& hidden);

  std::mutex mutex_;
  std::map<std::pair<c10::DeviceIndex, c10::StreamId>, Queue> queues_;
  Queue& queue(const c10::Stream& stream);
};

/// The current stream of the current device.
c10::Stream current_stream();

}  // namespace heddle::device::sim
