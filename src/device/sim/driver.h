#pragma once

#include <array>
#include <atomic>
#include <mutex>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Stream.h>

#include "device/sim/simulation.h"

/// Shared by the sources of the simulation. The state is the process's, as a driver's is: libtorch
/// knows one back end behind PrivateUse1.
namespace heddle::device::sim {

inline constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;

struct Driver {
  enum class Phase { kInstalled, kRunning, kFinished };
  std::atomic<Phase> phase = Phase::kInstalled;
  Options options;
  std::atomic<bool> is_recording = false;
  std::mutex mutex;  ///< Guards the members below.
  std::vector<Call> calls;
  Counts waits, entries;
};
Driver& driver();

/// Throws DeviceError (rule lifetime) unless the platform runs.
void require_running(const char* what);
/// Throws DeviceError (rule dtype) for a dtype the chip has no arithmetic for.
void require_dtype(c10::ScalarType dtype);
/// The host waits for the device in `what`: counted, and refused while a graph is recorded.
void wait(const std::string& what);
/// An entry point of the vendor is stood in for.
void count_entry(const char* entry);
void record_call(const std::string& op, const std::vector<at::Tensor>& tensors);

// memory.cpp

/// Memory of an npu storage: a storage of the host. It is the context of the storage's
/// DataPtr, so it moves with the memory when a parameter hands it over.
struct Block {
  c10::intrusive_ptr<c10::StorageImpl> host;
  std::int64_t bytes = 0;
  c10::DeviceIndex device = 0;
  /// Where it was allocated, which may reuse it at once when it is freed, and others that were
  /// named to recordStream().
  std::vector<c10::StreamId> streams;
};
c10::DeviceAllocator& allocator();
/// An npu storage over memory of the host. Reading its data_ptr() throws (rule host-access).
c10::Storage wrap(c10::intrusive_ptr<c10::StorageImpl> host, c10::DeviceIndex device);
/// Makes data_ptr() of an npu storage throw.
void protect(c10::StorageImpl& storage);
/// The host's storage below an npu storage. Throws if its memory was given up.
const c10::intrusive_ptr<c10::StorageImpl>& host_storage(const c10::Storage& storage);
/// Work of the stream uses the memory, which may be freed before that is done.
void record_stream(at::Tensor& tensor, c10::Stream stream);
/// A CPU tensor with the memory, sizes and strides of `tensor`, without history.
at::Tensor host_view(const at::Tensor& tensor);
/// After an operator has resized a host_view(): the same for the tensor.
void follow(const at::Tensor& tensor, const at::Tensor& view);

// guard.cpp and hooks.cpp
c10::DeviceIndex current_device();
void install_guard();
void install_hooks();
/// Whether the device can read this memory of the host while the host goes on.
bool is_pinned(const at::Tensor& host);
/// The CPU generator behind the generator of a device.
at::Generator host_generator(c10::DeviceIndex device);
at::Generator host_generator(const at::Generator& generator);

// kernels
void install_fallback();
void install_factories();
void install_copies();
void install_operators();

}  // namespace heddle::device::sim
