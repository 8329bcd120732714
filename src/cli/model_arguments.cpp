#include "cli/model_arguments.h"

#include <CLI/CLI.hpp>
#include <algorithm>

#include "base/errors.h"
#include "ckpt/hub_cache.h"
#include "ckpt/model_directory.h"
#include "device/device.h"
#include "device/require.h"

namespace heddle::cli {

void add_model_arguments(CLI::App& command, ModelArguments& arguments) {
  command.add_option("model_dir", arguments.directory, "A Hugging Face model directory")
      ->required()
      ->type_name("MODEL_DIR");
  command.add_option("--adapter", arguments.adapter, "A PEFT adapter directory to put on it")
      ->type_name("DIR");
  command.add_option("--dtype", arguments.dtype,
                     "float32, bfloat16 or float64; default float32 on the CPU, else bfloat16");
  command.add_option("--device", arguments.device,
                     "cpu, cuda[:N] or npu[:N]; default the first accelerator, else cpu");
  command.add_option("--threads", arguments.threads,
                     "CPU threads; 0: the cores this process may use");
}

runtime::Context context_of(const ModelArguments& arguments) {
  runtime::Context context;
  device::set_cpu_threads(arguments.threads);
  context.device = device::parse(arguments.device.empty() ? config::to_string(train::usual_device())
                                                          : arguments.device);
  const std::string usual = context.device.is_cpu() ? "float32" : "bfloat16";
  context.dtype =
      runtime::parse_dtype(arguments.dtype.empty() ? usual : arguments.dtype, "--dtype");
  device::start(context.device);
  device::require_dtype(context.device, context.dtype, "--dtype");
  return context;
}

std::string head_name(const std::string& directory, const std::string& asked) {
  const ckpt::Path file = ckpt::find_model(directory) / "config.json";
  bool is_classifier = false;
  if (std::filesystem::exists(file)) {
    const auto config = ckpt::read_json_object(file);
    const auto found = config.find("architectures");
    if (found != config.end() && found->is_array()) {
      is_classifier = std::any_of(found->begin(), found->end(), [](const auto& name) {
        return name.is_string() &&
               name.template get<std::string>().ends_with("ForSequenceClassification");
      });
    }
  }
  if (is_classifier && asked == "lm") {
    throw_error<ConfigError>(
        "{} is a classifier: it has no language-model head; use --head classify", directory);
  }
  if (!asked.empty()) return asked;
  return is_classifier ? "classify" : "lm";
}

std::string input_file(const std::string& argument) {
  return argument == "-" ? "/dev/stdin" : argument;
}

train::LoadedModel load(const ModelArguments& arguments, models::qwen3_5::Head head) {
  return train::load_for_inference(ckpt::find_model(arguments.directory),
                                   ckpt::find_model(arguments.adapter), context_of(arguments),
                                   head);
}

}  // namespace heddle::cli
