#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "comm/device_backend.h"

namespace c10d {
class Work;
}

namespace heddle::comm {

class World;

/// Watches the collectives that are queued on devices. Nobody waits for those on the host, so a
/// thread of its own looks whether they end. Where none ends within the job's deadline, or another
/// rank has failed, it aborts the process groups, which lets the host out of whatever waits for the
/// device, and keeps the error for the next check().
class DeviceWatch {
 public:
  explicit DeviceWatch(World& world);
  ~DeviceWatch();
  DeviceWatch(const DeviceWatch&) = delete;
  DeviceWatch& operator=(const DeviceWatch&) = delete;

  /// `operation`: "all_reduce of group tp (ranks 0, 1)"; `ranks`: its members.
  void add(std::string operation, const std::vector<std::int64_t>& ranks, Backend backend,
           c10::intrusive_ptr<c10d::Work> work);
  /// A process group of the world, from when it is made until it is shut down.
  void know(Backend backend);
  void forget(const Backend& backend);
  /// Throws the CommError of a collective that did not end.
  void check() const;
  /// Aborts the world's process groups, idle ones too: to shut one down its members wait for each
  /// other, and one of them may be frozen. The world is broken then. Returns when they are aborted,
  /// or after ten seconds.
  void give_up(const std::string& why);

 private:
  class Thread;
  std::unique_ptr<Thread> thread_;
};

}  // namespace heddle::comm
