#include "cli/model_arguments.h"

#include <CLI/CLI.hpp>

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

train::LoadedModel load(const ModelArguments& arguments, models::qwen3_5::Head head,
                        bool generates) {
  return train::load_for_inference(arguments.directory, arguments.adapter, context_of(arguments),
                                   head, ops::ContextMethod::kState, generates);
}

}  // namespace heddle::cli
