#pragma once

#include <functional>
#include <map>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

namespace heddle::device::sim {

/// The work of this thread while a graph is recorded. To learn shapes, each operator is computed as
/// it comes; at the end all it wrote is as it was before, and new memory holds NaN, as nothing has
/// run.
class Capture {
 public:
  using Storage = c10::intrusive_ptr<c10::StorageImpl>;

  Capture();
  ~Capture();
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;

  /// The capture of this thread; null where none is recorded.
  static Capture* current();

  /// `host` is about to be changed.
  void keeps(const at::Tensor& host);
  /// Memory of the host below new memory of the device.
  void makes(Storage storage) { made_.push_back(std::move(storage)); }
  /// Adds work for the operator to do when the graph is replayed.
  void adds(std::function<void()> work) { work_.push_back(std::move(work)); }

  std::vector<std::function<void()>> finish();

 private:
  std::vector<std::function<void()>> work_;
  std::map<Storage, std::vector<char>> before_;
  std::vector<Storage> made_;
};

}  // namespace heddle::device::sim
