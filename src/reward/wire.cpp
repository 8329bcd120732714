#include "reward/wire.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <initializer_list>

#include <fmt/format.h>

#include "base/json.h"
#include "base/quote.h"

namespace heddle::reward {
namespace {

constexpr std::size_t kMostParts = 256;
constexpr std::size_t kLongestName = 100;
constexpr std::size_t kMostUnread = 8;
constexpr std::size_t kLongestObservation = std::size_t{1} << 20;

/// A name becomes one of a metric.
bool is_plain(const std::string& name) {
  return !name.empty() && name.size() <= kLongestName && text::shown(name) == name;
}

/// The value of a key, or null for one that is absent or null.
const Json* given(const Json& object, const char* key) {
  const auto found = object.find(key);
  return found == object.end() || found->is_null() ? nullptr : &*found;
}

/// Why an answer is refused; empty if it was read into the score.
std::string read_parts(const Json& answer, Score& score) {
  const Json* const parts = given(answer, "parts");
  if (parts == nullptr) return {};
  if (!parts->is_object()) return "'parts' must be an object of numbers";
  if (parts->size() > kMostParts) return "'parts' must hold at most 256 numbers";
  for (const auto& [name, value] : parts->items()) {
    if (!is_reward(value)) return "'parts' must be an object of numbers";
    if (!is_plain(name)) return "names of 'parts' must be of 1 to 100 plain characters";
    if (name == "mean" || name == "std")
      return "names of 'parts' must be others than mean and std, which are the reward's own";
    score.parts[name] = value.get<double>();
  }
  return {};
}

std::string read_continuation(const Json& answer, Score& score) {
  const Json* const text = given(answer, "observation");
  const Json* const messages = given(answer, "messages");
  if (text != nullptr && messages != nullptr)
    return "'observation' and 'messages' are two answers; give one";
  if (text != nullptr) {
    if (!text->is_string() || text->get_ref<const std::string&>().empty() ||
        text->get_ref<const std::string&>().size() > kLongestObservation)
      return "'observation' must be text of 1 byte to 1 MiB";
    score.observation = text->get<std::string>();
  }
  if (messages != nullptr) {
    if (!messages->is_array() || messages->empty() ||
        messages->dump(-1, ' ', false, Json::error_handler_t::replace).size() > kLongestObservation)
      return "'messages' must be a list of 1 message or more, of 1 MiB at most";
    score.messages = *messages;
  }
  return {};
}

std::string read_reward(const Json& answer, bool may_miss, Score& score) {
  const Json* const reward = given(answer, "reward");
  if (reward == nullptr ? !may_miss : !is_reward(*reward))
    return "'reward' must be a finite number, at most 1e9";
  if (reward != nullptr) score.reward = reward->get<double>();
  return {};
}

/// Keys that nothing reads may be misspelt ones: whoever takes the score says so.
void note_unread(const Json& answer, std::initializer_list<const char*> more, Score& score) {
  constexpr std::array kKnown = {"id", "reward", "parts", "observation", "messages", "error"};
  for (const auto& [key, value] : answer.items()) {
    const bool is_known = std::ranges::find(kKnown, key) != kKnown.end() ||
                          std::ranges::find(more, key) != more.end();
    if (!is_known && score.unread.size() < kMostUnread) score.unread.push_back(text::shown(key));
  }
}

std::string read_flag(const Json& answer, const char* key, bool& flag) {
  const Json* const value = given(answer, key);
  if (value == nullptr) return {};
  if (!value->is_boolean()) return fmt::format("'{}' must be true or false", key);
  flag = value->get<bool>();
  return {};
}

std::string read_step(const Json& answer, Score& score) {
  bool is_done = false;
  std::string why = read_flag(answer, "done", is_done);
  if (why.empty()) why = read_flag(answer, "truncated", score.is_truncated);
  const bool is_over = is_done || score.is_truncated;
  // Nobody reads what comes after the end, where many environments have an empty text.
  if (why.empty() && !is_over) why = read_continuation(answer, score);
  if (why.empty()) why = read_reward(answer, !is_over, score);
  if (why.empty()) why = read_parts(answer, score);
  if (why.empty() && !is_over && !score.goes_on())
    why = "an episode that is not 'done' needs an 'observation' or 'messages'";
  return why;
}

std::string read_opening(const Json& answer, Score& score) {
  for (const char* key : {"done", "truncated"}) {
    const Json* const flag = given(answer, key);
    if (flag != nullptr && *flag != false)
      return fmt::format("'{}' is for op step: an episode has one turn at least", key);
  }
  return read_continuation(answer, score);
}

template <class Read>
Score score_of(const Json& answer, const char* expected, const Read& read) {
  const auto refused = [&](const std::string& why) {
    return Score{.error = why + ", found " + json::shown(answer)};
  };
  if (!answer.is_object()) return refused(expected);
  if (const Json* const error = given(answer, "error")) {
    if (*error == "" || *error == false)
      return refused("'error' must say what is wrong, or be absent where nothing is");
    return {.error =
                error->is_string() ? text::shown(error->get<std::string>()) : json::shown(*error)};
  }
  Score score;
  const std::string why = read(score);
  return why.empty() ? score : refused(why);
}

}  // namespace

Json to_wire(const Sample& sample) {
  Json object = {{"group", sample.group},
                 {"prompt", sample.prompt},
                 {"completion", sample.completion},
                 {"truth", sample.truth},
                 {"meta", sample.meta}};
  if (!sample.message.is_null()) object["message"] = sample.message;
  if (!sample.tokens.empty()) object["tokens"] = sample.tokens;
  for (const PastTurn& turn : sample.turns) {
    object["turns"].push_back({{"completion", turn.completion}, {"observation", turn.observation}});
  }
  return object;
}

Json episode_to_wire(const Sample& sample) {
  if (sample.ask == Ask::kClosing) return {{"op", "close"}};
  if (sample.ask == Ask::kOpening) {
    return {{"op", "reset"},
            {"seed", sample.seed},
            {"row", {{"prompt", sample.prompt}, {"answer", sample.truth}, {"meta", sample.meta}}}};
  }
  Json object = {{"op", "step"}, {"action", sample.completion}, {"truncated", sample.is_truncated}};
  if (!sample.message.is_null()) object["message"] = sample.message;
  if (!sample.tokens.empty()) object["tokens"] = sample.tokens;
  return object;
}

bool is_reward(const Json& value) {
  // Far above any reward, and small enough for the squares of many to be added.
  constexpr double kLargest = 1e9;
  return value.is_number() && std::abs(value.get<double>()) <= kLargest;
}

Score from_wire(const Json& answer) {
  return score_of(answer, "an answer must be an object with 'reward'", [&](Score& score) {
    note_unread(answer, {}, score);
    std::string why = read_continuation(answer, score);
    if (why.empty()) why = read_reward(answer, score.goes_on(), score);
    return why.empty() ? read_parts(answer, score) : why;
  });
}

Score episode_from_wire(const Json& answer, Ask ask) {
  return score_of(answer, "an answer must be an object", [&](Score& score) {
    note_unread(answer, {"done", "truncated"}, score);
    return ask == Ask::kOpening ? read_opening(answer, score) : read_step(answer, score);
  });
}

std::string wire_text(const Json& value) {
  return value.dump(-1, ' ', false, Json::error_handler_t::replace);
}

Score or_failed(Score score, const std::optional<double>& failed) {
  if (!score.error || !failed) return score;
  return {.reward = *failed, .parts = {{"failed", 1}}};
}

}  // namespace heddle::reward
