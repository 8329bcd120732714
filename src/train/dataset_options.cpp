#include <optional>

#include "base/errors.h"
#include "base/files.h"
#include "config/eval_share.h"
#include "data/readers/data_files.h"
#include "objective/from_config.h"
#include "train/setup.h"

namespace heddle::train {
namespace {

nlohmann::ordered_json template_variables(const std::map<std::string, config::Scalar>& arguments) {
  nlohmann::ordered_json variables = nlohmann::ordered_json::object();
  for (const auto& [name, value] : arguments) {
    std::visit([&, &key = name](const auto& v) { variables[key] = v; }, value);
  }
  return variables;
}

std::vector<std::string> files_of(const config::DataSource& source, const std::string& key) {
  try {
    return data::expand_files(source.path);
  } catch (const DataError& error) {
    throw_error<DataError>("{}: {}", key, error.what());
  }
}

}  // namespace

data::DatasetOptions dataset_options(const config::RunConfig& config, DataPart part) {
  const bool training = part == DataPart::kTrain;
  data::DatasetOptions options;
  options.files_key = training ? "data.train" : "data.eval";
  const std::optional<double> share = config::eval_share(config);
  if (share) {
    options.held_out = *share;
    options.takes_held_out = !training;
  }
  for (const config::DataSource& source :
       training || share ? config.data.train : config.data.eval) {
    for (std::string& file : files_of(source, options.files_key))
      options.files.push_back({std::move(file), training ? source.weight : 1});
  }
  options.reader = objective::reader_options(config);
  options.reader.format = config.data.format;
  options.reader.fields = config.data.fields;
  options.reader.classes = config.model.num_labels;
  options.reader.class_names = config.data.labels;
  options.bad_rows = config.data.on_bad_line;
  options.rendering.max_length = config.data.max_length;
  options.rendering.truncation = config.data.truncation;
  options.rendering.loss_on = config.data.loss_on;
  if (!config.data.chat_template.empty()) {
    try {
      options.rendering.chat_template =
          files::read(config.data.chat_template, files::kTemplateLimit);
    } catch (const Error& error) {
      throw_error<ConfigError>("data.chat_template: {}", error.what());
    }
    options.rendering.chat_template_name = config.data.chat_template;
  }
  options.rendering.template_variables = template_variables(config.data.template_args);
  options.cache_directory = config.data.cache_dir;
  return options;
}

}  // namespace heddle::train
