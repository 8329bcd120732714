#include "rl/run_facts.h"

#include <algorithm>
#include <array>
#include <map>
#include <string_view>

#include "base/errors.h"
#include "base/text.h"
#include "ckpt/companions.h"
#include "ckpt/model_directory.h"
#include "config/shared_entries.h"
#include "train/sources.h"

namespace heddle::rl {
namespace {

constexpr std::array kSections = {"model.", "data.", "adapter.", "rl.", "rollout.", "sync."};
constexpr std::array kKeysOfTrain = {"train.method", "train.seed", "train.epochs"};
/// Keys of these sections that a job has for itself.
constexpr std::array kOwnKeys = {"rl.role",        "rl.trainer_ranks", "rl.rollout_ranks",
                                 "sync.listen",    "sync.rendezvous",  "sync.rendezvous_timeout_s",
                                 "sync.timeout_s", "data.cache_dir"};
constexpr std::size_t kShown = 3, kShownCharacters = 60;

template <class Names>
bool has(const Names& names, std::string_view key) {
  return std::ranges::find(names, key) != names.end();
}

bool is_shared(std::string_view key) {
  return has(kKeysOfTrain, key) ||
         (!has(kOwnKeys, key) && std::ranges::any_of(kSections, [&](std::string_view section) {
           return key.starts_with(section);
         }));
}

std::string shown(const std::map<std::string, std::string>& facts, const std::string& name) {
  const auto found = facts.find(name);
  if (found == facts.end()) return "not there";
  const std::string& value = found->second;
  if (value.empty()) return "''";
  return value.size() <= kShownCharacters ? value : value.substr(0, kShownCharacters) + "...";
}

}  // namespace

std::string facts_of_run(const config::RunConfig& config, const Prompts& prompts) {
  std::string facts = "prompts " + prompts.identity() + "\n";
  const auto entries =
      config.rl.has_two_jobs() ? facts_of_job(config, prompts) : config::shared_entries(config);
  for (const auto& [key, value] : entries) facts += fmt::format("{} {}\n", key, value);
  return facts;
}

Facts facts_of_job(const config::RunConfig& config, const Prompts& prompts) {
  Facts facts = {
      {"the content of data.train", fmt::format("{} ({} prompts, {} tokens)", prompts.identity(),
                                                prompts.size(), prompts.tokens())},
      // Any number of steps takes what it needs of the prompts; epochs have an end.
      {"train.max_steps", config.train.max_steps > 0 ? "given" : "0"}};
  const auto contents =
      train::contents_of(ckpt::ModelDirectory::open(config.model.path),
                         ckpt::TokenizerSource(std::filesystem::path(config.model.tokenizer)));
  for (const auto& [name, hash] : contents.at("trained").items())
    facts.emplace_back("the content of " + name, hash.get<std::string>());
  for (auto& [key, value] : config::shared_entries(config)) {
    if (is_shared(key)) facts.emplace_back(key, value);
  }
  return facts;
}

std::string difference(const Facts& trainers, const Facts& rollouts) {
  const std::map<std::string, std::string> ours(trainers.begin(), trainers.end()),
      theirs(rollouts.begin(), rollouts.end());
  std::map<std::string, std::string> all = ours;
  all.insert(theirs.begin(), theirs.end());
  std::vector<std::string> found;
  for (const auto& [name, unused] : all) {
    const auto here = ours.find(name), there = theirs.find(name);
    if (here != ours.end() && there != theirs.end() && here->second == there->second) continue;
    found.push_back(fmt::format("{} is {} in the trainer's job and {} in the rollouts'", name,
                                shown(ours, name), shown(theirs, name)));
  }
  return text::list_some(found, kShown);
}

}  // namespace heddle::rl
