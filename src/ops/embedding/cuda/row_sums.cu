// Sums of rows that share a number. A CTA takes 32 positions of the ascending numbers. A run of one
// number that lies inside them is added to its sum at once; of a run that goes on beyond them the
// CTA leaves its part in scratch, and a second launch adds the parts of each such run, so that a
// number that most rows have is summed by many CTAs. A thread holds up to 16 bytes of a row.
#include "ops/cuda/vector.cuh"
#include "ops/embedding/cuda/row_sums.h"

namespace heddle::ops::cuda {
namespace {

constexpr int kPositions = 32, kThreads = 128;

struct Args {
  const int64_t *numbers, *order;
  const void* rows;
  int64_t row_stride;
  void* sums;
  float *heads, *tails;  // [CTAs, width]: parts of runs that began before, and that go on after
  int64_t count, width;

  __device__ __forceinline__ bool joined(int64_t i) const {  // positions i - 1 and i
    return i > 0 && i < count && numbers[i - 1] == numbers[i];
  }
  __device__ __forceinline__ int64_t end(int64_t block) const {
    return min(count, (block + 1) * kPositions);
  }
};

template <class Sum, int N>
__device__ __forceinline__ void add_to_sum(const Args& a, int64_t number, int64_t column,
                                           const float (&x)[N]) {
  Sum* sum = static_cast<Sum*>(a.sums) + number * a.width + column;
  // fp32 sums of bf16 rows are two accesses.
  constexpr int kWidth = N * static_cast<int>(sizeof(Sum)) > 16 ? N / 2 : N;
#pragma unroll
  for (int first = 0; first < N; first += kWidth) {
    float part[kWidth];
    read(sum + first, part);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) part[i] += x[first + i];
    write(sum + first, part);
  }
}

template <class Row, class Sum, int N>
__global__ void __launch_bounds__(kThreads) sum_runs(const Args a) {
  const int64_t block = blockIdx.x, begin = block * kPositions, end = a.end(block);
  const int64_t column = (int64_t{blockIdx.y} * kThreads + threadIdx.x) * N;
  if (column >= a.width) return;
  for (int64_t i = begin; i < end;) {
    const int64_t number = a.numbers[i];
    const bool began_before = i == begin && a.joined(begin);
    float total[N] = {};
    do {
      float x[N];
      read(static_cast<const Row*>(a.rows) + a.order[i] * a.row_stride + column, x);
#pragma unroll
      for (int k = 0; k < N; ++k) total[k] += x[k];
      ++i;
    } while (i < end && a.numbers[i] == number);
    if (began_before || (i == end && a.joined(end))) {
      float* part = (began_before ? a.heads : a.tails) + block * a.width + column;
#pragma unroll
      for (int k = 0; k < N; ++k) part[k] = total[k];
    } else {
      add_to_sum<Sum>(a, number, column, total);
    }
  }
}

/// The CTA of the positions in which a run begins adds what the next ones have of it.
template <class Sum, int N>
__global__ void __launch_bounds__(kThreads) join_runs(const Args a) {
  const int64_t first = blockIdx.x, begin = first * kPositions, end = a.end(first);
  if (!a.joined(end)) return;
  const int64_t number = a.numbers[end];
  if (a.numbers[begin] == number && a.joined(begin)) return;  // began earlier
  const int64_t column = (int64_t{blockIdx.y} * kThreads + threadIdx.x) * N;
  if (column >= a.width) return;
  // Where the run ends is found first, so that the loads of its parts do not wait for each other.
  int64_t last = end, beyond = a.count;
  while (beyond - last > 1) {
    const int64_t middle = (last + beyond) / 2;
    (a.numbers[middle] == number ? last : beyond) = middle;
  }
  float total[N];
#pragma unroll
  for (int k = 0; k < N; ++k) total[k] = a.tails[first * a.width + column + k];
#pragma unroll 4
  for (int64_t block = first + 1; block <= last / kPositions; ++block) {
#pragma unroll
    for (int k = 0; k < N; ++k) total[k] += a.heads[block * a.width + column + k];
  }
  add_to_sum<Sum>(a, number, column, total);
}

int64_t blocks_of(const RowSumsShape& shape) { return (shape.count + kPositions - 1) / kPositions; }

template <class Sum>
void launch(const RowSumsShape& shape, const Args& args, bool wide, cudaStream_t stream) {
  dispatch_access(shape.row_type, wide, [&](auto access) {
    using Row = typename decltype(access)::Type;
    constexpr int kWidth = decltype(access)::kWidth;
    const dim3 blocks(
        static_cast<unsigned>(blocks_of(shape)),
        static_cast<unsigned>((shape.width + kThreads * kWidth - 1) / (kThreads * kWidth)));
    sum_runs<Row, Sum, kWidth><<<blocks, kThreads, 0, stream>>>(args);
    join_runs<Sum, kWidth><<<blocks, kThreads, 0, stream>>>(args);
  });
  check_launch("row_sums");
}

}  // namespace

int64_t row_sums_workspace(const RowSumsShape& shape) { return 2 * blocks_of(shape) * shape.width; }

void row_sums(const RowSumsShape& shape, const int64_t* numbers, const int64_t* order,
              const void* rows, int64_t row_stride, void* sums, float* workspace,
              cudaStream_t stream) {
  if (shape.count == 0 || shape.width == 0) return;
  const Args args{numbers,
                  order,
                  rows,
                  row_stride,
                  sums,
                  workspace,
                  workspace + blocks_of(shape) * shape.width,
                  shape.count,
                  shape.width};
  const bool wide = aligned(InputRows{rows, row_stride, 0}, shape.row_type, shape.width, 16) &&
                    reinterpret_cast<uintptr_t>(sums) % 16 == 0 && shape.width % 8 == 0;
  shape.sum_type == Element::kBFloat16 ? launch<bf16>(shape, args, wide, stream)
                                       : launch<float>(shape, args, wide, stream);
}

}  // namespace heddle::ops::cuda
