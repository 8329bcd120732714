#include "reward/wire.h"

#include <cmath>

#include "base/json.h"

namespace heddle::reward {

Json to_wire(const Sample& sample) {
  Json object = {{"group", sample.group},
                 {"prompt", sample.prompt},
                 {"completion", sample.completion},
                 {"truth", sample.truth},
                 {"meta", sample.meta}};
  if (!sample.tokens.empty()) object["tokens"] = sample.tokens;
  return object;
}

Score from_wire(const Json& answer) {
  const auto refused = [&](const std::string& why) {
    return Score{0, {}, why + ", found " + json::shown(answer)};
  };
  if (!answer.is_object()) return refused("an answer must be an object with 'reward'");
  if (const auto error = answer.find("error"); error != answer.end() && !error->is_null())
    return {0, {}, error->is_string() ? error->get<std::string>() : json::shown(*error)};
  const auto reward = answer.find("reward");
  if (reward == answer.end() || !reward->is_number() || !std::isfinite(reward->get<double>()))
    return refused("'reward' must be a finite number");
  Score score{reward->get<double>(), {}, {}};
  const auto parts = answer.find("parts");
  if (parts == answer.end() || parts->is_null()) return score;
  if (!parts->is_object()) return refused("'parts' must be an object of numbers");
  for (const auto& [name, value] : parts->items()) {
    if (!value.is_number()) return refused("'parts' must be an object of numbers");
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
