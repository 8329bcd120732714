#include "cli/names.h"

#include <memory>

#include "base/errors.h"
#include "base/text.h"
#include "config/eval_share.h"
#include "data/readers/data_files.h"
#include "ui/progress.h"

namespace heddle::cli {
namespace {

/// A progress line for each repository, from its first bytes on.
hub::ProgressCallback shown_progress() {
  auto line = std::make_shared<std::unique_ptr<ui::Progress>>();
  return [line](const hub::Progress& progress) {
    if (!*line) {
      *line = std::make_unique<ui::Progress>("download " + progress.name, 100,
                                             ui::ProgressStyle::detect(10), "%");
    }
    const double share = progress.bytes == 0 ? 1
                                             : static_cast<double>(progress.done) /
                                                   static_cast<double>(progress.bytes);
    (*line)->update(
        static_cast<std::int64_t>(100 * share),
        {fmt::format("{} of {} in {} files", text::format_bytes(static_cast<double>(progress.done)),
                     text::format_bytes(static_cast<double>(progress.bytes)), progress.files)});
  };
}

void resolve(std::vector<config::DataSource>& sources, hub::Part part) {
  std::vector<config::DataSource> resolved;
  for (const config::DataSource& source : sources) {
    for (std::string& file :
         hub::find_data(source.path, part, data::is_data_file, shown_progress()))
      resolved.push_back({std::move(file), source.weight});
  }
  sources = std::move(resolved);
}

}  // namespace

std::filesystem::path find_model(const std::string& name, hub::Need need) {
  return hub::find_model(name, shown_progress(), need);
}

void resolve_names(config::RunConfig& config, hub::Need need) {
  const bool has_own_tokenizer = config.model.tokenizer != config.model.path;
  config.model.path = find_model(config.model.path, need).string();
  config.model.tokenizer = has_own_tokenizer
                               ? find_model(config.model.tokenizer, hub::Need::kTokenizer).string()
                               : config.model.path;
  if (!config.adapter.path.empty())
    config.adapter.path = find_model(config.adapter.path, need).string();
  resolve(config.data.train, hub::Part::kTrain);
  if (!config::eval_share(config)) resolve(config.data.eval, hub::Part::kEvaluation);
}

}  // namespace heddle::cli
