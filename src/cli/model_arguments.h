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
/// The head of a directory as config.json's architectures tell it: "classify" for
/// "...ForSequenceClassification", else "lm". `asked`, unless empty, is taken instead. Throws
/// ConfigError where a language model is asked of a directory with another head.
std::string head_name(const std::string& directory, const std::string& asked);
/// The file that --input means: "-" is the standard input.
std::string input_file(const std::string& argument);
train::LoadedModel load(const ModelArguments& arguments, models::qwen3_5::Head head);

}  // namespace heddle::cli
