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
  Arguments<true> known = a;
  known.changes.groups = 0;
  for (int l = 0; l < a.model.layers; ++l) {
    const auto& slots = changes.slots[l];
    const auto any = [&](int first, int last) {
      for (int matrix = first; matrix <= last; ++matrix)
        if (slots[matrix] != nullptr) return true;
      return false;
    };
    if (any(0, 3)) known.changes.groups |= a.model.layer[l].is_attention ? kOfAttention : kOfInputs;
    if (any(kOutput, kOutput)) known.changes.groups |= kOfOutput;
    if (any(kGate, kUp)) known.changes.groups |= kOfGated;
    if (any(kDown, kDown)) known.changes.groups |= kOfDown;
  }
  launch_rows(known, stream);
}

}  // namespace heddle::ops::cuda::decode
