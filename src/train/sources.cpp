#include "train/sources.h"

#include <set>
#include <vector>

#include "assembly/same_weights.h"
#include "base/errors.h"
#include "base/log.h"
#include "base/quote.h"
#include "base/text.h"

namespace heddle::train {
namespace {

using Json = nlohmann::ordered_json;

/// Names in `part` that are on one side alone, or have another hash on each.
std::vector<std::string> differing(const Json& before, const Json& now, const char* part) {
  const Json empty = Json::object();
  const auto of = [&](const Json& sources) -> const Json& {
    const bool has = sources.is_object() && sources.contains(part) && sources[part].is_object();
    return has ? sources[part] : empty;
  };
  std::set<std::string> names;
  for (const Json* side : {&of(before), &of(now)}) {
    for (const auto& [name, unused] : side->items()) {
      if (of(before).value(name, Json()) != of(now).value(name, Json()))
        names.insert(text::shown(name));
    }
  }
  return {names.begin(), names.end()};
}

}  // namespace

Json contents_of(const ckpt::ModelDirectory& model, const ckpt::TokenizerSource& tokenizer,
                 const ckpt::AdapterDirectory* start) {
  Json trained = Json::object(), carried = Json::object();
  for (const comm::Fact& fact : assembly::facts_of(model)) trained[fact.name] = fact.value;
  if (start != nullptr)
    for (const comm::Fact& fact : assembly::facts_of(*start)) trained[fact.name] = fact.value;
  for (const ckpt::Companion& file : tokenizer.files) trained[file.name] = file.content;
  for (const ckpt::Companion& file : model.companions()) carried[file.name] = file.content;
  return {{"trained", std::move(trained)}, {"carried", std::move(carried)}};
}

void require_same_sources(const Json& state, const Json& now, const std::string& checkpoint) {
  const auto before = state.find("sources");
  if (before == state.end() || now.is_null()) return;
  const auto trained = differing(*before, now, "trained");
  if (!trained.empty()) {
    throw_error<ConfigError>(
        "{}: the run began with other contents of {} in model.path, model.tokenizer or "
        "adapter.path; put "
        "back "
        "what it began with, or begin anew in another train.output_dir",
        checkpoint, text::list_some(trained));
  }
  for (const std::string& name : differing(*before, now, "carried")) {
    log::warning(
        "{} beside the model's weights changed since the checkpoint; the result gets it "
        "as it is now",
        name);
  }
}

}  // namespace heddle::train
