// One CTA; a thread finds the place of a sequence by counting those with more work, which for the
// hundreds of sequences of a pack takes less time than the launch.
#include "ops/attention/cuda/ragged_layout.h"
#include "ops/cuda/element.h"

namespace heddle::ops::cuda {
namespace {

constexpr int kThreads = 512;

struct Args {
  RaggedLayoutShape shape;
  const int32_t *cu_q, *cu_k;
  int32_t* table;
  int64_t row;

  __device__ __forceinline__ int64_t work(int64_t s) const {
    return int64_t{cu_q[s + 1] - cu_q[s]} * (cu_k[s + 1] - cu_k[s]);
  }
  __device__ __forceinline__ void put(RaggedRow which, int64_t place, int64_t value) const {
    table[static_cast<int64_t>(which) * row + place] = static_cast<int32_t>(value);
  }
  /// Sequence s, or after the last one nothing, at `place`.
  __device__ __forceinline__ void place_sequence(int64_t s, int64_t place) const {
    const int64_t q = cu_q[s], k = cu_k[s];
    const bool is_one = s < shape.sequences;
    if (place < shape.batch) {
      put(RaggedRow::kQueries, place, is_one ? cu_q[s + 1] - q : 0);
      put(RaggedRow::kKeys, place, is_one ? cu_k[s + 1] - k : 0);
    }
    put(RaggedRow::kQ, place, q * shape.q_stride);
    put(RaggedRow::kK, place, k * shape.k_stride);
    put(RaggedRow::kV, place, k * shape.v_stride);
    put(RaggedRow::kKeyGradients, place, k * shape.key_gradient_stride);
    put(RaggedRow::kLogSumExp, place, q * shape.log_sum_exp_stride);
  }
};

__global__ void __launch_bounds__(kThreads) fill_table(const Args a) {
  const int64_t n = a.shape.sequences;
  for (int64_t s = threadIdx.x; s < n; s += kThreads) {
    const int64_t own = a.work(s);
    int64_t place = 0;
    for (int64_t other = 0; other < n; ++other) {
      const int64_t work = a.work(other);
      place += work > own || (work == own && other < s);
    }
    a.place_sequence(s, place);
  }
  for (int64_t place = n + threadIdx.x; place <= a.shape.batch; place += kThreads)
    a.place_sequence(n, place);
}

}  // namespace

void ragged_layout(const RaggedLayoutShape& shape, const int32_t* cu_q, const int32_t* cu_k,
                   int32_t* table, cudaStream_t stream) {
  fill_table<<<1, kThreads, 0, stream>>>(
      {shape, cu_q, cu_k, table, ragged_row_length(shape.batch)});
  check_launch("ragged_layout");
}

}  // namespace heddle::ops::cuda
