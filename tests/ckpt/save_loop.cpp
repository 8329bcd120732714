// save_loop DIRECTORY FIRST_STEP KEEP_LAST [UID]: saves checkpoints until it is killed and prints
// each step that is known to be on disk. The contents follow from the step, so that whoever loads
// one can tell whether it is whole.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <exception>

#include <ATen/ops/full.h>

#include "ckpt/training_checkpoint.h"

int main(int argc, char** argv) {
  if (argc < 4) return 64;
  // A test of permissions needs a user whom they bind.
  if (argc > 4 && setuid(static_cast<uid_t>(std::atol(argv[4]))) != 0) return 65;
  try {
    heddle::ckpt::CheckpointStore store(argv[1], std::atoi(argv[3]), 1);
    std::int64_t confirmed = -1;
    for (std::int64_t step = std::atoll(argv[2]);; ++step) {
      const auto value = static_cast<double>(step);
      heddle::ckpt::CheckpointState state;
      state.state = {{"step", step}};
      state.tensors = {{"weights/w", at::full({300, 257}, value)},
                       {"adam_m/w", at::full({300, 257}, -value, at::TensorOptions(at::kDouble))},
                       {"odd", at::full({29}, value + 1)}};
      store.save(step, std::move(state),
                 1.0 / (1.0 + value));  // returns when the save before is on disk
      if (confirmed >= 0) {
        std::printf("%lld\n", static_cast<long long>(confirmed));
        std::fflush(stdout);
      }
      confirmed = step;
    }
  } catch (const std::exception& error) {
    std::printf("error: %s\n", error.what());
    return 1;
  }
}
