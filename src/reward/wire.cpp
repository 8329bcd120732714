#include "reward/wire.h"

#include <cmath>

#include "base/json.h"
#include "base/quote.h"

namespace heddle::reward {

Json to_wire(const Sample& sample) {
  Json object = {{"group", sample.group},
                 {"prompt", sample.prompt},
                 {"completion", sample.completion},
                 {"truth", sample.truth},
                 {"meta", sample.meta}};
  if (!sample.tokens.empty()) object["tokens"] = sample.tokens;
  for (const PastTurn& turn : sample.turns) {
    object["turns"].push_back({{"completion", turn.completion}, {"observation", turn.observation}});
  }
  return object;
}

namespace {

constexpr std::size_t kMostParts = 256;
constexpr std::size_t kLongestName = 100;
constexpr std::size_t kLongestObservation = std::size_t{1} << 20;

/// A name becomes one of a metric.
bool is_plain(const std::string& name) {
  return !name.empty() && name.size() <= kLongestName && text::shown(name) == name;
}

}  // namespace

bool is_reward(const Json& value) {
  // Far above any reward, and small enough for the squares of many to be added.
  constexpr double kLargest = 1e9;
  return value.is_number() && std::abs(value.get<double>()) <= kLargest;
}

Score from_wire(const Json& answer) {
  const auto refused = [&](const std::string& why) {
    return Score{0, {}, why + ", found " + json::shown(answer)};
  };
  if (!answer.is_object()) return refused("an answer must be an object with 'reward'");
  if (const auto error = answer.find("error"); error != answer.end() && !error->is_null())
    return {
        0, {}, error->is_string() ? text::shown(error->get<std::string>()) : json::shown(*error)};
  Score score;
  if (const auto text = answer.find("observation"); text != answer.end() && !text->is_null()) {
    if (!text->is_string() || text->get_ref<const std::string&>().empty() ||
        text->get_ref<const std::string&>().size() > kLongestObservation)
      return refused("'observation' must be text of 1 byte to 1 MiB");
    score.observation = text->get<std::string>();
  }
  const auto reward = answer.find("reward");
  const bool is_missing = reward == answer.end();
  if (is_missing ? !score.observation : !is_reward(*reward))
    return refused("'reward' must be a finite number, at most 1e9");
  if (!is_missing) score.reward = reward->get<double>();
  const auto parts = answer.find("parts");
  if (parts == answer.end() || parts->is_null()) return score;
  if (!parts->is_object()) return refused("'parts' must be an object of numbers");
  if (parts->size() > kMostParts) return refused("'parts' must hold at most 256 numbers");
  for (const auto& [name, value] : parts->items()) {
    if (!is_reward(value)) return refused("'parts' must be an object of numbers");
    if (!is_plain(name)) return refused("names of 'parts' must be of 1 to 100 plain characters");
    score.parts[name] = value.get<double>();
  }
  return score;
}

std::string wire_text(const Json& value) {
  return value.dump(-1, ' ', false, Json::error_handler_t::replace);
}

Score or_failed(Score score, const std::optional<double>& failed) {
  if (!score.error || !failed) return score;
  return {*failed, {{"failed", 1}}, {}};
}

}  // namespace heddle::reward
