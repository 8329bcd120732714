// The step of the base model, and which kernel takes a step; the kernels are those of step.cuh.
#include "ops/decode_step/cuda/step.cuh"

namespace heddle::ops::cuda {

bool decode_step_available() { return has_sm90a() && multiprocessors() >= decode::kCtas; }

int64_t decode_step_words() { return decode::Exchange::kWords; }

void decode_step(const DecodeStepModel& model, const DecodeStepRows& rows, uint32_t* exchange,
                 cudaStream_t stream, const DecodeStepChanges* changes) {
  if (changes != nullptr && changes->runs != nullptr)
    return decode::launch_changed({model, rows, exchange, *changes}, stream);
  decode::launch_rows(decode::Arguments<false>{model, rows, exchange, {}}, stream);
}

}  // namespace heddle::ops::cuda
