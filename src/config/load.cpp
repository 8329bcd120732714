#include <algorithm>
#include <array>
#include <cctype>
#include <map>
#include <optional>

#include "base/errors.h"
#include "base/files.h"
#include "base/hash.h"
#include "base/text.h"
#include "config/adapter_entry.h"
#include "config/adapters.h"
#include "config/check.h"
#include "config/config.h"
#include "config/field.h"
#include "config/objective.h"
#include "config/yaml_text.h"

namespace heddle::config {
namespace {

/// Where a YAML text comes from and at which key of the configuration it hangs.
struct Source {
  std::string name;
  bool has_lines = true;

  std::string at(const YAML::Mark& mark) const {
    return has_lines && !mark.is_null() ? fmt::format("{}:{}", name, mark.line + 1) : name;
  }
};

std::string last_part(std::string_view key) {
  return std::string(key.substr(key.rfind('.') + 1));  // npos + 1 == 0
}

/// The valid key that was most likely meant: another program's name for it, the right name in the
/// wrong section, or a typing error; "" if nothing is near.
std::string nearest_key(const std::string& key) {
  const std::string name = last_part(key);
  const std::string section = key.substr(0, key.size() - std::min(key.size(), name.size() + 1));
  std::vector<std::string> siblings, elsewhere, keys, sections;
  for (const Section& s : schema()) {
    sections.push_back(s.key);
    for (const Field& field : s.fields) {
      keys.push_back(field.key);
      const bool same = last_part(field.key) == name || std::ranges::count(field.aliases, name) > 0;
      if (same) (s.key == section ? siblings : elsewhere).push_back(field.key);
    }
  }
  if (!siblings.empty()) return siblings.front();
  if (!elsewhere.empty()) return elsewhere.front();
  if (section.empty()) {
    const auto start = std::ranges::find_if(sections, [&](auto& s) { return key.starts_with(s); });
    return start != sections.end() ? *start : text::nearest(key, sections);
  }
  return text::nearest(key, keys);
}

/// The value of an override: YAML, but that it is one value and has no comment, so that "runs/a #2"
/// is whole. Throws YAML::Exception.
YAML::Node override_value(const std::string& text) {
  if (text == "-") return YAML::Node(text);  // standard input; in YAML a list begins with it
  const std::string_view trimmed = text::trim(text);
  const bool is_plain =
      !trimmed.empty() && std::string_view("[{\"'").find(trimmed.front()) == std::string_view::npos;
  const std::size_t sign = trimmed.find('#');
  const bool has_comment =
      sign != std::string_view::npos && (sign == 0 || std::isspace(trimmed[sign - 1]) != 0);
  if (is_plain && has_comment) return YAML::Node(std::string(trimmed));
  const YAML::Node value = YAML::Load(text);
  // The text ends where the value does, unless a comment follows.
  const bool is_closed = is_plain || trimmed.empty() || trimmed.back() == ']' ||
                         trimmed.back() == '}' || trimmed.back() == '"' || trimmed.back() == '\'';
  if (is_closed) return value;
  throw YAML::Exception(YAML::Mark::null_mark(), "there is more after the value");
}

/// A pattern as *norm* is a reference to YAML.
std::string reason_of(const YAML::Exception& e) {
  const bool is_reference = e.msg.starts_with(YAML::ErrorMsg::UNKNOWN_ANCHOR) ||
                            e.msg.starts_with(YAML::ErrorMsg::ALIAS_NOT_FOUND);
  return e.msg + (is_reference ? "; a text that begins with * is quoted, as \"*norm*\"" : "");
}

class Reader {
 public:
  /// `adapters`: takes the list of that name; null: it is refused.
  explicit Reader(RunConfig& config, std::vector<AdapterEntry>* adapters = nullptr)
      : config_(config), adapters_(adapters) {}

  void file(std::string_view yaml, const std::string& name) {
    source_ = {name, true};
    given_.clear();
    YAML::Node document;
    bool has_second = false;
    try {
      require_yaml_text(yaml);
      const std::string text(yaml);
      has_second = has_second_document(text);
      if (!has_second) document = YAML::Load(text);
    } catch (const YAML::Exception& e) {
      throw_error<ConfigError>("{}: not valid YAML: {}", source_.at(e.mark), reason_of(e));
    }
    if (has_second) throw_error<ConfigError>("{}: expected one YAML document, found more", name);
    if (document.IsNull()) return;
    if (!document.IsMap()) {
      throw_error<ConfigError>("{}: expected sections (model:, data:, ...), found {}",
                               source_.at(document.Mark()), describe(document));
    }
    mapping("", document);
  }

  void override_with(const std::string& argument) {
    source_ = {"command line", false};
    given_.clear();
    const std::size_t equals = argument.find('=');
    if (equals == std::string::npos || equals == 0) {
      throw_error<ConfigError>("command line: expected key=value (as optim.lr=3e-4), found '{}'",
                               argument);
    }
    YAML::Node value;
    try {
      value = override_value(argument.substr(equals + 1));
    } catch (const YAML::Exception& e) {
      throw_error<ConfigError>("command line: {}: the value is not valid YAML: {}",
                               without_secret(argument), reason_of(e));
    }
    assign(argument.substr(0, equals), value.Mark(), value);
  }

  /// The settings of an entry of `name`'s list.
  void entry(const AdapterEntry& entry, const std::string& name) {
    source_ = {name, true};
    given_.clear();
    for (const auto& [key, value] : entry.settings) assign(key, value.Mark(), value);
  }

 private:
  void adapter_list(const YAML::Mark& mark, const YAML::Node& list) {
    if (adapters_ == nullptr) {
      throw_error<ConfigError>("{}: adapters: only heddle sft trains several adapters in one run",
                               source_.at(mark));
    }
    if (!list.IsSequence() || list.size() == 0) {
      throw_error<ConfigError>(
          "{}: adapters: expected a list as [{{name: a, data: a.jsonl, rank: 8}}, ...], found {}",
          source_.at(mark), describe(list));
    }
    adapters_->clear();
    for (const YAML::Node& node : list) {
      AdapterEntry entry =
          read_adapter_entry(node, [&](const YAML::Mark& at) { return source_.at(at); });
      const auto is_same = [&](const AdapterEntry& other) { return other.name == entry.name; };
      if (std::ranges::any_of(*adapters_, is_same)) {
        throw_error<ConfigError>("{}: adapters: the name '{}' is given twice",
                                 source_.at(node.Mark()), entry.name);
      }
      adapters_->push_back(std::move(entry));
    }
  }

  void mapping(const std::string& prefix, const YAML::Node& node) {
    for (const auto& entry : node) {
      if (!entry.first.IsScalar()) {
        throw_error<ConfigError>("{}: expected a key, found {}", source_.at(entry.first.Mark()),
                                 describe(entry.first));
      }
      const std::string& name = entry.first.Scalar();
      assign(prefix.empty() ? name : prefix + "." + name, entry.first.Mark(), entry.second);
    }
  }

  void assign(const std::string& key, const YAML::Mark& mark, const YAML::Node& value) {
    const std::string position = source_.at(mark);
    const auto [earlier, is_new] = given_.try_emplace(key, position);
    if (!is_new) {
      throw_error<ConfigError>("{}: '{}' is given twice, first at {}", position, key,
                               earlier->second);
    }
    if (key == "adapters") return adapter_list(mark, value);
    if (const Section* section = find_section(key)) return section_value(*section, mark, value);
    if (const Field* field = find_field(key)) {
      return set(key, mark, value, [&] { field->set(config_, value); });
    }
    const std::size_t dot = key.rfind('.');
    if (dot != std::string::npos && dot + 1 < key.size()) {
      const Section* section = find_section(key.substr(0, dot));
      if (section != nullptr && section->open) {
        return set(key, mark, value,
                   [&] { section->open->set(config_, key.substr(dot + 1), value); });
      }
    }
    const std::string meant = nearest_key(key);
    throw_error<ConfigError>("{}: unknown key '{}'{}", position, key,
                             meant.empty() ? "" : fmt::format(" (did you mean '{}'?)", meant));
  }

  /// Keys of any name, given as a whole, are these and no others: an override takes the place of
  /// those of the file.
  void clear_open(const Section& section) {
    section.open->clear(config_);
    std::erase_if(config_.origins,
                  [&](const auto& entry) { return entry.first.starts_with(section.key + "."); });
  }

  void section_value(const Section& section, const YAML::Mark& mark, const YAML::Node& value) {
    const bool is_open = section.open && section.fields.empty();
    if (is_open && (value.IsNull() || value.IsMap())) clear_open(section);
    if (value.IsNull()) return;
    if (value.IsMap()) return mapping(section.key, value);
    if (value.IsScalar() && !section.scalar_key.empty()) {
      return assign(section.scalar_key, mark, value);
    }
    throw_error<ConfigError>("{}: {}: expected a section with keys, found {}", source_.at(mark),
                             section.key, describe(value));
  }

  template <class Set>
  void set(const std::string& key, const YAML::Mark& mark, const YAML::Node& value, Set apply) {
    try {
      apply();
    } catch (const BadValue& bad) {
      throw_error<ConfigError>("{}: {}: expected {}, found {}{}", source_.at(mark), key,
                               bad.expected, bad.found,
                               bad.hint.empty() ? "" : fmt::format(" ({})", bad.hint));
    }
    config_.origins[key] = source_.at(mark);
  }

  RunConfig& config_;
  std::vector<AdapterEntry>* adapters_;
  Source source_;
  std::map<std::string, std::string> given_;  // within one file or one override: key -> position
};

/// The folder of a run without a configuration file: the model's name, and a number that tells runs
/// of other settings apart. How long it runs and where leaves the number as it is, so that a run
/// can go on elsewhere or for longer.
std::string name_of_run(const RunConfig& config, std::span<const std::string> overrides) {
  constexpr std::array<std::string_view, 6> kNotOfTheResult = {
      "train.max_steps", "train.epochs", "device", "parallel.", "log.", "ckpt."};
  std::vector<std::string> settings;
  std::copy_if(overrides.begin(), overrides.end(), std::back_inserter(settings),
               [&](const std::string& setting) {
                 return std::ranges::none_of(kNotOfTheResult, [&](std::string_view start) {
                   return setting.starts_with(start);
                 });
               });
  std::ranges::sort(settings);
  std::filesystem::path model(config.model.path);
  if (!model.has_filename()) model = model.parent_path();
  // The result of another run is called by that run.
  if (model.filename() == "final") model = model.parent_path();
  const std::string number = fmt::format("{:016x}", hash::of(text::join(settings, "\n")));
  return fmt::format("{}-{}", model.empty() ? "run" : model.filename().string(),
                     number.substr(0, 6));
}

/// Several versions of an adapter are held at once, so that nothing pauses or is read again. Ranks
/// that divide experts and generate pass one version at a time, which would be slower.
bool can_pin(const RunConfig& config) {
  return config.rl.mode == RlMode::kAsync && config.train.method == Method::kLora &&
         (config.rl.is_disaggregated() || config.parallel.ep == 1) &&
         config.adapter.modules_to_save.empty() && !config.rollout.merge_adapter &&
         !config.rollout.release_memory && !config.rl.deterministic;
}

/// Defaults that follow from other keys, so that a printed configuration shows what will really be
/// used.
void fill_in(RunConfig& config, const std::string& name, std::span<const std::string> overrides,
             const DeviceName& usual) {
  if (!config.is_set("device.name")) config.device.name = usual;
  if (config.train.output_dir.empty()) {
    const std::string stem = std::filesystem::path(name).stem().string();
    config.train.output_dir = "runs/" + (stem.empty() ? name_of_run(config, overrides) : stem);
  }
  if (config.model.tokenizer.empty()) config.model.tokenizer = config.model.path;
  if (config.data.cache_dir.empty()) config.data.cache_dir = config.train.output_dir + "/cache";
  const std::int64_t texts = needs_of(objective_of(config)).texts;
  if (config.train.micro_batch_tokens == 0)
    config.train.micro_batch_tokens = config.data.max_length * texts;
  if (config.model.num_labels == 0) config.model.num_labels = std::ssize(config.data.labels);
  if (texts > 1 && !config.is_set("data.packing")) config.data.packing = false;
  if (config.device.name.type != DeviceType::kCpu && !config.is_set("model.dtype"))
    config.model.dtype = Dtype::kBFloat16;
  if (config.train.method == Method::kLora && !config.is_set("optim.lr")) config.optim.lr = 2e-4;
  if (config.optim.name == OptimName::kMuon && !config.is_set("optim.momentum"))
    config.optim.momentum = 0.95;
  if (config.dpo.loss == objective::DpoLoss::kSimpo && !config.is_set("dpo.beta"))
    config.dpo.beta = 2;
  if (config.dpo.loss == objective::DpoLoss::kOrpo && !config.is_set("dpo.sft_weight"))
    config.dpo.sft_weight = 1;
  if (!config.is_set("rl.update_mode") && can_pin(config)) config.rl.update_mode = UpdateMode::kPin;
  if (!config.is_set("adapter.seed")) config.adapter.seed = config.train.seed;
}

RunConfig read(std::optional<std::string_view> yaml, const std::string& name,
               std::span<const std::string> overrides, Completeness completeness,
               const DeviceName& usual) {
  RunConfig config;
  Reader reader(config);
  if (yaml) reader.file(*yaml, name);
  for (const std::string& argument : overrides) reader.override_with(argument);
  fill_in(config, name, overrides, usual);
  check(config, yaml ? name : "command line", completeness);
  return config;
}

}  // namespace

RunConfig load(const std::filesystem::path& file, std::span<const std::string> overrides,
               Completeness completeness, const DeviceName& usual) {
  if (file.empty()) return read({}, "", overrides, completeness, usual);
  if (!std::filesystem::exists(file)) {
    throw_error<ConfigError>("{}: no such configuration file", file.string());
  }
  const std::string yaml = files::read(file, files::kYamlLimit);
  return read(yaml, file.string(), overrides, completeness, usual);
}

namespace {

bool has_eval(const std::vector<AdapterEntry>& entries) {
  return std::ranges::any_of(entries, [](const AdapterEntry& entry) {
    return std::ranges::any_of(entry.settings,
                               [](const auto& setting) { return setting.key == "data.eval"; });
  });
}

}  // namespace

std::vector<AdapterRun> load_adapters(const std::filesystem::path& file,
                                      std::span<const std::string> overrides,
                                      const DeviceName& usual) {
  const std::string name = file.empty() ? "command line" : file.string();
  // A file that is not there is load()'s to refuse.
  std::optional<std::string> yaml;
  if (!file.empty() && std::filesystem::exists(file)) yaml = files::read(file, files::kYamlLimit);
  const auto read_all = [&](RunConfig& config, std::vector<AdapterEntry>& entries) {
    Reader reader(config, &entries);
    if (yaml) reader.file(*yaml, name);
    for (const std::string& argument : overrides) reader.override_with(argument);
    return reader;
  };
  RunConfig shared;
  std::vector<AdapterEntry> entries, unused;
  read_all(shared, entries);
  std::vector<AdapterRun> runs;
  for (const AdapterEntry& entry : entries) {
    AdapterRun run{entry.name, {}};
    read_all(run.config, unused).entry(entry, name);
    if (run.config.is_set("train.method") && run.config.train.method != Method::kLora) {
      throw_error<ConfigError>("{}: several adapters are trained by train.method lora",
                               where(run.config, "train.method"));
    }
    require_for_several(run.config);
    run.config.train.method = Method::kLora;
    fill_in(run.config, file.string(), overrides, usual);
    // The pace of evaluations is the run's, and an adapter without rows for them has none.
    if (run.config.data.eval.empty() && has_eval(entries)) {
      TrainSection& train = run.config.train;
      train.eval_every = train.early_stop_patience = 0;
      train.eval_every_epochs = 0;
      train.eval_on_start = false;
    }
    try {
      check(run.config, name, Completeness::kComplete);
    } catch (const ConfigError& error) {
      throw_error<ConfigError>("adapter {}: {}", run.name, error.what());
    }
    runs.push_back(std::move(run));
  }
  return runs;
}

RunConfig parse(std::string_view yaml, const std::string& name,
                std::span<const std::string> overrides, Completeness completeness,
                const DeviceName& usual) {
  return read(yaml, name, overrides, completeness, usual);
}

std::string where(const RunConfig& config, const std::string& key) {
  const auto origin = config.origins.find(key);
  return origin == config.origins.end() ? key : origin->second + ": " + key;
}

}  // namespace heddle::config
