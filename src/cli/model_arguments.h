#pragma once

#include <filesystem>
#include <string>

#include "assembly/model_on_ranks.h"
#include "runtime/context.h"

namespace CLI {
class App;
}

namespace heddle::cli {

/// The arguments of every command that loads a model to use it.
struct ModelArguments {
  std::string directory;
  std::string adapter;
  std::string dtype;   ///< Empty: float32 on the CPU, bfloat16 elsewhere.
  std::string device;  ///< Empty: assembly::usual_device().
  int threads = 0;
};

void add_model_arguments(CLI::App& command, ModelArguments& arguments);
runtime::Context context_of(const ModelArguments& arguments);
/// Places the model of the arguments on one rank. Throws ConfigError, ModelError, DeviceError.
assembly::ModelOnRanks load(const ModelArguments& arguments, assembly::Head head,
                            assembly::Purpose purpose);
/// Where its tokenizer lies: the adapter's, if it comes with one (which may know more tokens); else
/// the model's.
std::filesystem::path tokenizer_directory(const ModelArguments& arguments);

}  // namespace heddle::cli
