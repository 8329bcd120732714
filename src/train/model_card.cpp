#include "train/model_card.h"

#include <vector>

#include "base/text.h"
#include "ckpt/adapter_names.h"
#include "hub/cache.h"
#include "train/idle_ranks.h"

namespace heddle::train {
namespace {

std::string data_line(const std::vector<config::DataSource>& sources) {
  std::vector<std::string> names;
  for (const config::DataSource& source : sources)
    names.push_back("`" + std::filesystem::path(source.path).filename().string() + "`");
  return text::list_some(names);
}

std::string load_example(const assembly::ModelOnRanks& placed, bool is_adapter,
                         const std::string& base) {
  const models::Head head = placed.model->head();
  const std::string name = ckpt::auto_class(placed.source->config(), head == models::Head::kEmbed,
                                            head == models::Head::kClassify);
  if (!is_adapter) {
    return fmt::format(
        "from transformers import {0}\n\nmodel = {0}.from_pretrained(\"THIS_FOLDER\")", name);
  }
  const std::string labels = head == models::Head::kClassify
                                 ? fmt::format(", num_labels={}", placed.model->num_labels())
                                 : "";
  return fmt::format(
      "from peft import PeftModel\nfrom transformers import {0}\n\n"
      "base = {0}.from_pretrained(\"{1}\"{2})\n"
      "model = PeftModel.from_pretrained(base, \"THIS_FOLDER\")",
      name, base, labels);
}

}  // namespace

std::string model_card(const config::RunConfig& config, const assembly::ModelOnRanks& placed,
                       bool is_adapter) {
  const std::string base = hub::model_name(config.model.path);
  // The Hub knows models by "org/model"; a path of this machine is none of them.
  const bool is_on_hub = !base.starts_with("/");
  std::string card = fmt::format("---\nlibrary_name: {}\n", is_adapter ? "peft" : "transformers");
  if (is_on_hub) card += fmt::format("base_model: {}\n", base);
  card += fmt::format("tags:\n- heddle\n- {}\n---\n\n", is_adapter ? "lora" : "full-finetuning");
  card += fmt::format(
      "# {}\n\n{} of `{}`, trained by Heddle. This page was made by the run: say here "
      "what the model is for, what it was tested on, and under which licence it "
      "stands (that of the base model binds it).\n\n",
      std::filesystem::path(config.train.output_dir).filename().string(),
      is_adapter ? "A LoRA adapter" : "A full fine-tune",
      is_on_hub ? base : std::filesystem::path(base).filename().string());
  const std::string method =
      is_adapter ? fmt::format("LoRA, rank {}, alpha {}", config.adapter.rank, config.adapter.alpha)
                 : "all weights";
  card += fmt::format(
      "| | |\n|---|---|\n| head | {} |\n| objective | {} |\n| trained | {} |\n| data | {} |\n| "
      "learning rate | {} |\n"
      "| sequences a step | {} |\n| dtype | {} |\n| seed | {} |\n\n",
      config::to_string(config.model.head), config::to_string(config.train.objective), method,
      data_line(config.data.train), config.optim.lr, rows_of_step(config).global_batch_size,
      config::to_string(config.model.dtype), config.train.seed);
  card += "```python\n" + load_example(placed, is_adapter, base) + "\n```\n\n";
  const std::string use =
      is_adapter ? fmt::format("{} --adapter THIS_FOLDER", base) : "THIS_FOLDER";
  if (placed.model->head() == models::Head::kLanguageModel)
    card += "    heddle generate " + use + " --prompt TEXT\n";
  else
    card += fmt::format("    heddle score {} --head {} --input IN.jsonl --output OUT.jsonl\n", use,
                        config::to_string(config.model.head));
  return card;
}

}  // namespace heddle::train
