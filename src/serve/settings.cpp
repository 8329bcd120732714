#include "serve/settings.h"

#include <charconv>
#include <functional>

#include "base/errors.h"
#include "base/quote.h"
#include "base/text.h"

namespace heddle::serve {
namespace {

template <class Number>
Number number_of(const std::string& key, const std::string& text, Number least) {
  Number value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || !(value >= least))
    throw_error<ConfigError>("{}={}: expected a number from {} on", key, text::shown(text, 60),
                             least);
  return value;
}

/// How a key is read into the settings and shown.
struct Key {
  const char* key;
  const char* meaning;
  std::function<void(Settings&, const std::string&)> read;
  std::function<std::string(const Settings&)> show;
};

template <class Member>
Key key(const char* name, const char* meaning, Member member, double least) {
  return {name, meaning,
          [name, member, least](Settings& settings, const std::string& text) {
            auto& value = member(settings);
            using Number = std::remove_reference_t<decltype(value)>;
            value = number_of<Number>(name, text, static_cast<Number>(least));
          },
          [member](const Settings& settings) {
            return fmt::format("{}", member(const_cast<Settings&>(settings)));
          }};
}

template <class Member>
Key flag(const char* name, const char* meaning, Member member) {
  return {name, meaning,
          [name, member](Settings& settings, const std::string& text) {
            if (text != "true" && text != "false")
              throw_error<ConfigError>("{}={}: expected true or false", name,
                                       text::shown(text, 60));
            member(settings) = text == "true";
          },
          [member](const Settings& settings) {
            return member(const_cast<Settings&>(settings)) ? "true" : "false";
          }};
}

std::vector<Key> keys_of_limits() {
  std::vector<Key> made;
  static const std::vector<std::pair<std::string, std::string>> kTexts = [] {
    std::vector<std::pair<std::string, std::string>> texts;
    for (const LimitRow& row : kLimitRows)
      texts.emplace_back(std::string("serve.") + row.name,
                         std::string(row.meaning) + "; 0: no limit");
    return texts;
  }();
  for (std::size_t i = 0; i < kTexts.size(); ++i)
    made.push_back(key(
        kTexts[i].first.c_str(), kTexts[i].second.c_str(),
        [member = kLimitRows[i].member](Settings & s) -> auto& { return s.limits.*member; }, 0));
  return made;
}

std::vector<Key> all_keys() {
  std::vector<Key> all = {
      key(
          "serve.max_sequences", "answers generated at the same time",
          [](Settings & s) -> auto& { return s.max_sequences; }, 1),
      key(
          "serve.max_context", "tokens of prompt and answer, and of a training sequence",
          [](Settings & s) -> auto& { return s.max_context; }, 2),
      key(
          "serve.pass_tokens", "tokens of a training pass, about",
          [](Settings & s) -> auto& { return s.pass_tokens; }, 1),
      flag(
          "serve.deterministic", "true: a run's bits do not depend on other runs",
          [](Settings & s) -> auto& { return s.deterministic; }),
      flag(
          "serve.shared_expert_factors",
          "true: routed experts share the factor on the side of the hidden states, as on Tinker; "
          "false: each has a pair",
          [](Settings & s) -> auto& { return s.tinker.shared_expert_factors; }),
      key(
          "serve.max_body_bytes", "bytes of a request, also once decompressed",
          [](Settings & s) -> auto& { return s.max_body_bytes; }, 1024),
      key(
          "serve.drain_s", "seconds for the answers under way after SIGTERM",
          [](Settings & s) -> auto& { return s.drain_s; }, 0),
      key(
          "serve.turn_s",
          "seconds of one turn of the model, and 0.1 more a token, after which it counts as stuck "
          "and the server ends; 0: never",
          [](Settings & s) -> auto& { return s.turn_s; }, 0),
      key(
          "serve.max_sessions", "open sessions, of one tenant",
          [](Settings & s) -> auto& { return s.tinker.sessions_per_tenant; }, 1),
      key(
          "serve.max_samples", "samples under way, of one tenant",
          [](Settings & s) -> auto& { return s.max_samples; }, 1),
      key(
          "serve.max_rank", "rank of an adapter",
          [](Settings & s) -> auto& { return s.tinker.max_rank; }, 1),
      key(
          "serve.max_waiting_bytes", "bytes of the requests of one run that wait",
          [](Settings & s) -> auto& { return s.tinker.runs.most_waiting_bytes; }, 1024),
      key(
          "serve.max_waiting", "requests of one run that wait",
          [](Settings & s) -> auto& { return s.tinker.runs.most_waiting; }, 1),
      key(
          "serve.durable_steps", "save each run's state every so many steps; 0: its client saves",
          [](Settings & s) -> auto& { return s.tinker.durable_steps; }, 0),
      key(
          "serve.adapters_in_memory", "checkpoints that samplers read without the disk",
          [](Settings & s) -> auto& { return s.tinker.adapters_in_memory; }, 1),
      key(
          "serve.session_timeout_s", "seconds without a heart-beat that end a session",
          [](Settings & s) -> auto& { return s.tinker.session_timeout_s; }, 1),
      key(
          "serve.gap_s", "seconds that a run waits for a seq_id that is missing",
          [](Settings & s) -> auto& { return s.tinker.runs.gap_s; }, 1),
      key(
          "serve.poll_s", "seconds that a poll is held",
          [](Settings & s) -> auto& { return s.tinker.promises.poll_s; }, 0),
  };
  for (Key& limit : keys_of_limits()) all.push_back(std::move(limit));
  return all;
}

const std::vector<Key>& keys() {
  static const std::vector<Key> kKeys = all_keys();
  return kKeys;
}

}  // namespace

std::vector<SettingRow> setting_rows() {
  const Settings defaults;
  std::vector<SettingRow> rows;
  for (const Key& each : keys()) rows.push_back({each.key, each.meaning, each.show(defaults)});
  return rows;
}

Settings read_settings(const std::vector<std::string>& arguments) {
  Settings settings;
  for (const std::string& argument : arguments) {
    const std::size_t equals = argument.find('=');
    if (equals == std::string::npos)
      throw_error<ConfigError>("'{}': expected key=value", text::shown(argument, 60));
    const std::string name = argument.substr(0, equals);
    if (!name.starts_with("serve.")) {
      settings.of_model.push_back(argument);
      continue;
    }
    bool is_known = false;
    std::vector<std::string> names;
    for (const Key& each : keys()) {
      names.emplace_back(each.key);
      if (name != each.key) continue;
      each.read(settings, argument.substr(equals + 1));
      is_known = true;
    }
    if (is_known) continue;
    const std::string near = text::nearest(name, names);
    throw_error<ConfigError>(
        "unknown key '{}'{}", text::shown(name, 60),
        near.empty() ? "; see heddle serve --help" : fmt::format(" (did you mean '{}'?)", near));
  }
  settings.tinker.runs.pass_tokens = settings.pass_tokens;
  return settings;
}

}  // namespace heddle::serve
