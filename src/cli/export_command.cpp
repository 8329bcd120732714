#include <CLI/CLI.hpp>
#include <memory>
#include <ostream>

#include "base/text.h"
#include "ckpt/hf_model.h"
#include "cli/command.h"
#include "cli/model_arguments.h"

namespace heddle::cli {
namespace {

struct ExportOptions {
  std::string model, adapter, output, head = "lm";
  std::string dtype = "float32";
  std::uint64_t max_shard_bytes = 5'000'000'000;
  bool overwrite = false;
};

int run(const ExportOptions& options, const Session& session) {
  ModelArguments arguments;
  arguments.directory = options.model;
  arguments.adapter = options.adapter;
  arguments.dtype = options.dtype;
  const train::LoadedModel loaded =
      load(arguments, options.head == "classify" ? models::qwen3_5::Head::kClassify
                                                 : models::qwen3_5::Head::kLanguageModel);
  ckpt::ModelWriterOptions writer;
  writer.max_shard_bytes = options.max_shard_bytes;
  writer.overwrite = options.overwrite;
  const auto report = ckpt::export_model(*loaded.model, *loaded.source,
                                         {loaded.tokenizer_directory}, options.output, writer);
  session.out << report.tensors << " tensors, "
              << text::format_bytes(static_cast<double>(report.bytes)) << " in "
              << report.weight_files.size() << " file(s): " << options.output << "\n";
  return 0;
}

}  // namespace

void add_export_command(CLI::App& app, Action& action) {
  auto options = std::make_shared<ExportOptions>();
  CLI::App* command =
      app.add_subcommand("export", "Write a Hugging Face model directory, adapter merged");
  command->add_option("model_dir", options->model, "A Hugging Face model directory")
      ->required()
      ->type_name("MODEL_DIR");
  command->add_option("--adapter", options->adapter, "A PEFT adapter directory to merge")
      ->type_name("DIR");
  command->add_option("--output", options->output, "The directory to make")
      ->required()
      ->type_name("DIR");
  command->add_option("--head", options->head, "lm or classify")
      ->check(CLI::IsMember({"lm", "classify"}))
      ->capture_default_str();
  command
      ->add_option("--dtype", options->dtype,
                   "Of the merge; tensors keep the dtype they are stored in")
      ->capture_default_str();
  command->add_option("--max-shard-bytes", options->max_shard_bytes, "Larger models are split")
      ->capture_default_str();
  command->add_flag("--overwrite", options->overwrite, "Replace a model directory that is there");
  command->footer(
      "Every tensor of MODEL_DIR is in the output; those that the text model does not use (vision, "
      "MTP) bit for bit.\n"
      "\n"
      "Example:\n"
      "  heddle export Qwen3.5-0.8B --adapter runs/chat/final --output merged");
  command->callback([options, &action] {
    action = [options](const Session& session) { return run(*options, session); };
  });
}

}  // namespace heddle::cli
