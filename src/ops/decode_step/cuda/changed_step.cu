// The step of rows with low-rank changes, see step.cuh.
#include "ops/decode_step/cuda/step.cuh"

namespace heddle::ops::cuda::decode {

void launch_changed(const Arguments<true>& a, cudaStream_t stream) {
  const DecodeStepChanges& changes = a.changes;
  if (changes.count < 1 || changes.count > a.rows.rows ||
      (changes.rank != 16 && changes.rank != 32 && changes.rank != DecodeStepChanges::kMostRank))
    throw std::invalid_argument("decode_step: " + std::to_string(changes.count) +
                                " runs of changes of rank " + std::to_string(changes.rank) +
                                " for " + std::to_string(a.rows.rows) + " rows");
  launch_rows(a, stream);
}

}  // namespace heddle::ops::cuda::decode
