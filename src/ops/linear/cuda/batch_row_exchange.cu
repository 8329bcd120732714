#include "ops/linear/cuda/batch_row_exchange.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <tuple>

namespace heddle::ops::cuda::batch_row {
namespace {

constexpr int64_t kFewestWords = 32 * 1024, kCounterWords = 16;
constexpr unsigned long long kMostRecordings = 1024;

void check(cudaError_t status) {
  if (status != cudaSuccess)
    throw std::runtime_error(std::string("batch_row_sums: ") + cudaGetErrorString(status));
}

struct Held {
  uint64_t* memory = nullptr;
  int64_t words = 0;
};

/// Zeros, also while the thread records a stream.
uint64_t* make(int64_t words) {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  check(cudaThreadExchangeStreamCaptureMode(&mode));
  void* memory = nullptr;
  cudaStream_t stream = nullptr;
  cudaError_t status = cudaMalloc(&memory, static_cast<std::size_t>(words) * 8);
  if (status == cudaSuccess) status = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  if (status == cudaSuccess)
    status = cudaMemsetAsync(memory, 0, static_cast<std::size_t>(words) * 8, stream);
  if (status == cudaSuccess) status = cudaStreamSynchronize(stream);
  if (stream != nullptr) cudaStreamDestroy(stream);
  cudaThreadExchangeStreamCaptureMode(&mode);
  check(status);
  return static_cast<uint64_t*>(memory);
}

}  // namespace

// Memory is never given back: a recording may be replayed as long as the process lives.
Exchange exchange_of(cudaStream_t stream, int64_t words) {
  using Key = std::tuple<int, bool, unsigned long long>;
  static std::mutex mutex;
  static std::map<Key, Held> all;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long recording = 0, id = 0;
  int device = 0;
  check(cudaGetDevice(&device));
  check(cudaStreamGetCaptureInfo(stream, &status, &recording));
  const bool is_recorded = status == cudaStreamCaptureStatusActive;
  if (!is_recorded) check(cudaStreamGetId(stream, &id));
  const std::lock_guard lock(mutex);
  Held& held = all[{device, is_recorded, is_recorded ? recording % kMostRecordings : id}];
  if (held.words < words) {
    held.words = std::max({words, 2 * held.words, kFewestWords});
    held.memory = make(held.words + kCounterWords);
  }
  return {held.memory + kCounterWords, reinterpret_cast<uint32_t*>(held.memory)};
}

}  // namespace heddle::ops::cuda::batch_row
