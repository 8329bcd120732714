#include <CLI/CLI.hpp>
#include <memory>
#include <optional>
#include <ostream>

#include "base/errors.h"
#include "base/files.h"
#include "base/text.h"
#include "ckpt/gguf_model.h"
#include "ckpt/hf_model.h"
#include "ckpt/training_checkpoint.h"
#include "cli/application.h"
#include "cli/command.h"
#include "cli/model_arguments.h"
#include "cli/names.h"
#include "train/result.h"

namespace heddle::cli {
namespace {

struct ExportOptions {
  std::string model, adapter, base, output, head;
  std::string dtype = "float32";
  std::uint64_t max_shard_bytes = 5'000'000'000;
  bool overwrite = false;
  bool gguf = false;
};

int run_on_checkpoint(const ExportOptions& options, const Session& session) {
  if (!options.adapter.empty()) {
    throw_error<ConfigError>(
        "--adapter: {} is a training checkpoint: export it alone, and merge the adapter that this "
        "writes with a second export",
        options.model);
  }
  const config::RunConfig run = train::export_checkpoint(
      options.model, options.base, options.output,
      {.overwrite = options.overwrite, .max_shard_bytes = options.max_shard_bytes});
  if (run.train.method == config::Method::kFull) {
    session.out << "model: " << options.output << "\n";
    return 0;
  }
  session.out << "adapter: " << options.output << "; a merged model:\n  "
              << quote_command(std::vector<std::string>{"export", run.model.path, "--adapter",
                                                        options.output, "--output", "MERGED"})
              << "\n";
  return 0;
}

int run_on_adapter(const ckpt::AdapterDirectory& adapter, const ExportOptions& options,
                   const Session& session) {
  if (!options.adapter.empty() || !options.base.empty() || !options.head.empty() || options.gguf) {
    throw_error<ConfigError>(
        "{} is an adapter, which is written as it is, without --adapter, --base, --head or --gguf; "
        "merge it with `heddle export BASE_MODEL --adapter {} --output DIR`",
        options.model, options.model);
  }
  const std::uint64_t bytes = ckpt::write_in_peft_form(adapter, options.output, options.overwrite);
  session.out << "adapter: " << options.output << ", "
              << text::format_bytes(static_cast<double>(bytes)) << " in PEFT's form\n";
  return 0;
}

int run_to_gguf(const ExportOptions& options, const Session& session) {
  if (!options.adapter.empty() || ckpt::is_training_checkpoint(options.model)) {
    throw_error<ConfigError>(
        "--gguf: takes a model directory: make one first with `heddle export {}{} --output DIR`",
        options.model, options.adapter.empty() ? "" : " --adapter " + options.adapter);
  }
  if (std::filesystem::exists(options.output) && !options.overwrite)
    throw_error<ConfigError>("--output: {} is there already; --overwrite replaces it",
                             options.output);
  const auto source = ckpt::ModelDirectory::open(find_model(options.model));
  if (const files::Path folder = files::Path(options.output).parent_path(); !folder.empty())
    files::make_writable_directory(folder);
  const ckpt::GgufReport report = ckpt::write_gguf(source, options.output);
  session.out << report.tensors << " tensors, "
              << text::format_bytes(static_cast<double>(report.bytes)) << ": " << options.output
              << "\n";
  return 0;
}

int run(const ExportOptions& options, const Session& session) {
  const files::Path given = options.model;
  if (ckpt::AdapterDirectory::is_one(given) && !std::filesystem::exists(given / "config.json"))
    return run_on_adapter(ckpt::AdapterDirectory::open(given), options, session);
  if (options.gguf) return run_to_gguf(options, session);
  if (ckpt::is_training_checkpoint(options.model)) return run_on_checkpoint(options, session);
  if (!options.base.empty())
    throw_error<ConfigError>("--base: {} is no training checkpoint", options.model);
  ModelArguments arguments;
  arguments.directory = options.model;
  arguments.adapter = options.adapter;
  arguments.dtype = options.dtype;
  arguments.device = "cpu";
  const ckpt::TokenizerSource tokenizer(tokenizer_directory(arguments));
  const assembly::ModelOnRanks loaded =
      load(arguments,
           head_name(options.model, options.adapter, options.head) == "classify"
               ? assembly::Head::kClassify
               : assembly::Head::kLanguageModel,
           assembly::Purpose::kStore);
  ckpt::ModelWriterOptions writer;
  writer.max_shard_bytes = options.max_shard_bytes;
  writer.overwrite = options.overwrite;
  writer.label_names = loaded.label_names;
  std::optional<ckpt::AdapterDirectory> adapter;
  if (!options.adapter.empty()) adapter = ckpt::AdapterDirectory::open(find_model(options.adapter));
  const auto report = ckpt::export_model(*loaded.model, loaded.adapters.get(), *loaded.source,
                                         tokenizer, options.output, writer, ckpt::read_from_memory,
                                         adapter ? &*adapter : nullptr);
  session.out << report.tensors << " tensors, "
              << text::format_bytes(static_cast<double>(report.bytes)) << " in "
              << report.weight_files.size() << " file(s): " << options.output << "\n";
  return 0;
}

}  // namespace

void add_export_command(CLI::App& app, Action& action) {
  auto options = std::make_shared<ExportOptions>();
  CLI::App* command = app.add_subcommand(
      "export", "Write a Hugging Face model directory, adapter merged, or a GGUF file");
  command
      ->add_option(
          "model_dir", options->model,
          "A Hugging Face model directory, an adapter directory, or a training checkpoint of "
          "a run")
      ->required()
      ->type_name("MODEL_DIR");
  command->add_option("--adapter", options->adapter, "A PEFT adapter directory to merge")
      ->type_name("DIR");
  command
      ->add_option("--base", options->base,
                   "Of a training checkpoint: the model that the run started from, if it has moved")
      ->type_name("DIR");
  command->add_option("--output", options->output, "The directory to make; of --gguf the file")
      ->required()
      ->type_name("PATH");
  command
      ->add_option("--head", options->head,
                   "lm or classify; default as the adapter or config.json has it")
      ->check(CLI::IsMember({"lm", "classify"}));
  command
      ->add_option("--dtype", options->dtype,
                   "Of the merge; tensors keep the dtype they are stored in")
      ->capture_default_str();
  command->add_option("--max-shard-bytes", options->max_shard_bytes, "Larger models are split")
      ->capture_default_str();
  command->add_flag("--gguf", options->gguf,
                    "Write one GGUF file, as llama.cpp reads it, instead of a directory");
  command->add_flag("--overwrite", options->overwrite, "Replace what is there");
  command->footer(
      "Every tensor of MODEL_DIR is in the output; those that the text model does not use (vision, "
      "MTP) bit for bit.\n"
      "Of a training checkpoint: what final/ of the run would hold, a model (train.method full) or "
      "an adapter\n"
      "(lora), in the run's own head and dtype.\n"
      "Of an adapter: the same as PEFT reads it, also of a server's checkpoint.\n"
      "\n"
      "Examples:\n"
      "  heddle export models/base --adapter runs/chat/final --output merged\n"
      "  heddle export runs/chat/checkpoints/step-00000200 --output step-200\n"
      "  heddle export data/tenants/me/runs/RUN/sampler_weights/chat --output chat\n"
      "  heddle export merged --gguf --output merged.gguf");
  command->callback([options, &action] {
    action = [options](const Session& session) { return run(*options, session); };
  });
}

}  // namespace heddle::cli
