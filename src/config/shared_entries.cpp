#include "config/shared_entries.h"

#include "config/config.h"

namespace heddle::config {

std::vector<std::pair<std::string, std::string>> shared_entries(const RunConfig& config) {
  // That something is named stays: a rank without it would run something else.
  const auto hide = [](std::string& path) {
    if (!path.empty()) path = "given";
  };
  RunConfig shared = config;
  hide(shared.model.path);
  hide(shared.model.tokenizer);
  hide(shared.data.chat_template);
  hide(shared.eval.input);
  hide(shared.train.router_record);
  hide(shared.train.router_replay);
  for (std::vector<DataSource>* sources : {&shared.data.train, &shared.data.eval}) {
    for (DataSource& source : *sources) hide(source.path);
  }
  if (shared.train.resume != "auto" && shared.train.resume != "never") hide(shared.train.resume);
  shared.data.cache_dir.clear();
  shared.device.name.index = shared.device.threads = 0;
  shared.log.level = {};
  return entries(shared);
}

}  // namespace heddle::config
