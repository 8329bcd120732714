#pragma once

#include <string>

#include "models/qwen3_5/model.h"
#include "runtime/context.h"
#include "train/setup.h"

namespace CLI {
class App;
}

namespace heddle::cli {

/// The arguments of every command that loads a model to use it.
struct ModelArguments {
  std::string directory;
  std::string adapter;
  std::string dtype;   ///< Empty: float32 on the CPU, bfloat16 elsewhere.
  std::string device;  ///< Empty: train::usual_device().
  int threads = 0;
};

void add_model_arguments(CLI::App& command, ModelArguments& arguments);
runtime::Context context_of(const ModelArguments& arguments);
train::LoadedModel load(const ModelArguments& arguments, models::qwen3_5::Head head,
                        bool generates = false);

}  // namespace heddle::cli
