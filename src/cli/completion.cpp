#include "cli/completion.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <vector>

#include "base/errors.h"
#include "base/text.h"
#include "cli/answer_evaluation.h"
#include "cli/command.h"
#include "config/config.h"
#include "config/listed_values.h"
#include "models/registry.h"
#include "plan/hardware.h"

namespace heddle::cli {
namespace {

struct OptionWord {
  std::string name;  ///< with dashes
  std::string description;
  std::vector<std::string> values;  ///< what may follow, if that is a short list
};

struct CommandWords {
  std::string name;
  std::string description;
  std::vector<OptionWord> options;
  std::vector<std::string>
      values;               ///< what its positional argument may be, if that is a short list
  bool takes_keys = false;  ///< key=value overrides
};

/// "lm" and "classify" of "a|b" or of "TEXT:{a,b}", as CLI11 writes the type of a checked option.
std::vector<std::string> values_of(const CLI::Option& option, const std::string& name) {
  if (name == "preset") return models::preset_names();
  if (name == "dtype") return {"float32", "bfloat16", "float64"};
  if (name == "device") return {"cpu", "cuda", "npu"};
  if (name == "hardware") return plan::hardware_names();
  if (name == "metric") return metric_names();
  std::string type = option.get_type_name();
  char separator = '|';
  if (const std::size_t open = type.find('{'); open != std::string::npos && type.ends_with('}')) {
    type = type.substr(open + 1, type.size() - open - 2);
    separator = ',';
  }
  std::vector<std::string> values = text::split(type, separator);
  const bool is_list =
      values.size() > 1 && std::all_of(values.begin(), values.end(), [](const std::string& value) {
        return !value.empty() && value.find_first_not_of(
                                     "abcdefghijklmnopqrstuvwxyz0123456789_-") == std::string::npos;
      });
  if (!is_list) values.clear();
  return values;
}

std::vector<OptionWord> options_of(const CLI::App& app) {
  std::vector<OptionWord> options;
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& name : option->get_lnames()) {
      options.push_back({"--" + name, option->get_description(), values_of(*option, name)});
    }
  }
  return options;
}

std::vector<CommandWords> commands_of(const CLI::App& app) {
  std::vector<CommandWords> commands;
  for (const CLI::App* sub : app.get_subcommands({})) {
    CommandWords words{sub->get_name(), sub->get_description(), options_of(*sub), {}, false};
    for (const OptionWord& global : options_of(app)) {
      if (global.name == "--debug") words.options.push_back(global);
    }
    for (const CLI::Option* option : sub->get_options()) {
      if (!option->get_positional()) continue;
      const std::string type = option->get_type_name();
      if (type.find("key=value") != std::string::npos) words.takes_keys = true;
      if (type.find('|') != std::string::npos) words.values = text::split(type, '|');
    }
    commands.push_back(std::move(words));
  }
  return commands;
}

std::vector<std::string> key_words() {
  std::vector<std::string> keys = config::all_keys();
  for (std::string& key : keys) key += "=";
  return keys;
}

std::vector<std::string> names_of(const std::vector<OptionWord>& options) {
  std::vector<std::string> names;
  for (const OptionWord& option : options) names.push_back(option.name);
  return names;
}

/// For a text between single quotes of a shell.
std::string quoted(const std::string& text) {
  std::string out = "'";
  for (const char c : text) out += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return out + "'";
}

/// "    init--preset) values='a b' ;;" for the options of all commands that take one of a list.
std::string option_cases(const std::vector<CommandWords>& commands, const char* open,
                         const char* close) {
  std::string cases;
  for (const CommandWords& command : commands) {
    for (const OptionWord& option : command.options) {
      if (option.values.empty()) continue;
      cases += fmt::format("    {}{}) values={}{}{} ;;\n", command.name, option.name, open,
                           text::join(option.values, " "), close);
    }
  }
  return cases;
}

std::string key_cases(const char* open, const char* close) {
  std::string cases;
  for (const auto& [key, values] : config::listed_values())
    cases += fmt::format("    {}) values={}{}{} ;;\n", key, open, text::join(values, " "), close);
  return cases;
}

std::string bash_script(const std::vector<CommandWords>& commands) {
  std::string names, cases;
  for (const CommandWords& command : commands) {
    names += (names.empty() ? "" : " ") + command.name;
    cases += fmt::format("    {}) options={}; values={}; takes_keys={} ;;\n", command.name,
                         quoted(text::join(names_of(command.options), " ")),
                         quoted(text::join(command.values, " ")), command.takes_keys ? 1 : 0);
  }
  return fmt::format(R"(# bash completion of heddle; use: source <(heddle completion bash)
_heddle() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} first=1 at name= before= options= values= takes_keys=0
  local commands='{0} --help --version'
  COMPREPLY=()
  # The command of every rank stands after launch ... --
  if [[ ${{COMP_WORDS[1]}} == launch ]]; then
    for ((at = 2; at < COMP_CWORD; at++)); do
      [[ ${{COMP_WORDS[at]}} == -- ]] && first=$((at + 1)) commands='{5}' && break
    done
  fi
  local command=${{COMP_WORDS[first]}}
  if ((COMP_CWORD == first)); then
    COMPREPLY=($(compgen -W "$commands" -- "$word"))
    return
  fi
  # bash cuts "key=value" into three words unless it was told otherwise.
  if [[ $word == [a-z]*=* ]]; then
    name=${{word%%=*}} before=$name= word=${{word#*=}}
  elif [[ $word == = ]]; then
    word= name=${{COMP_WORDS[COMP_CWORD - 1]}}
  elif [[ ${{COMP_WORDS[COMP_CWORD - 1]}} == = ]]; then
    name=${{COMP_WORDS[COMP_CWORD - 2]}}
  elif [[ ${{COMP_WORDS[COMP_CWORD - 1]}} == --* ]]; then
    name=${{COMP_WORDS[COMP_CWORD - 1]}}
  fi
  case $command$name in
{3}  esac
  case $name in
{4}  esac
  if [[ -n $values ]]; then
    COMPREPLY=($(compgen -P "$before" -W "$values" -- "$word"))
    return
  fi
  case $command in
{1}  esac
  if [[ -n $name && $name != --* ]]; then
    COMPREPLY=($(compgen -P "$before" -f -- "$word"))
  elif [[ $word == -* ]]; then
    COMPREPLY=($(compgen -W "$options" -- "$word"))
  elif [[ -n $values ]]; then
    COMPREPLY=($(compgen -W "$values" -- "$word"))
  else
    COMPREPLY=($(compgen -f -- "$word"))
    if ((takes_keys)) && [[ $word == *.* || ${{#COMPREPLY[@]}} -eq 0 ]]; then
      COMPREPLY+=($(compgen -W '{2}' -- "$word"))
      [[ ${{COMPREPLY[0]}} == *= ]] && compopt -o nospace 2>/dev/null
    fi
  fi
}}
complete -o filenames -F _heddle heddle
)",
                     names, cases, text::join(key_words(), " "), option_cases(commands, "'", "'"),
                     key_cases("'", "'"), text::join(launched_command_names(), " "));
}

/// name:description for zsh's _describe, in which a colon of the name must be escaped.
std::string described(const std::string& name, const std::string& description) {
  return quoted(name + ":" + description);
}

std::string zsh_script(const std::vector<CommandWords>& commands) {
  std::string names, cases;
  for (const CommandWords& command : commands) {
    names += fmt::format("    {}\n", described(command.name, command.description));
    std::string options;
    for (const OptionWord& option : command.options) {
      options += " " + described(option.name, option.description);
    }
    cases += fmt::format("    {}) options=({}); values=({}); takes_keys={} ;;\n", command.name,
                         options, text::join(command.values, " "), command.takes_keys ? 1 : 0);
  }
  return fmt::format(R"(#compdef heddle
# zsh completion of heddle; use: source <(heddle completion zsh)
_heddle() {{
  local -a commands options values keys
  local takes_keys=0 dashes key
  commands=(
{0}  )
  # The command of every rank stands after launch ... --
  if [[ $words[2] == launch ]]; then
    dashes=${{words[(i)--]}}
    if (( dashes < CURRENT )); then
      words=(heddle "${{(@)words[dashes+1,-1]}}")
      (( CURRENT -= dashes - 1 ))
      commands=(${{(M)commands:#({5}):*}})
    fi
  fi
  if (( CURRENT == 2 )); then
    _describe 'command' commands
    return
  fi
  case $words[2]$words[CURRENT-1] in
{3}  esac
  if [[ $PREFIX == [^-]*=* ]]; then
    key=${{PREFIX%%=*}}
    compset -P '*='
    case $key in
{4}    esac
    (( $#values )) || _files
  fi
  if (( $#values )); then
    compadd -a values
    return
  fi
  [[ -z $key ]] || return
  case $words[2] in
{1}  esac
  if [[ $PREFIX == -* ]]; then
    _describe 'option' options
  elif (( $#values )); then
    compadd -a values
  else
    _files
    if (( takes_keys )); then
      keys=({2})
      compadd -S '' -a keys
    fi
  fi
}}
if [[ $funcstack[1] == _heddle ]]; then _heddle "$@"; else compdef _heddle heddle; fi
)",
                     names, cases, text::join(key_words(), " "), option_cases(commands, "(", ")"),
                     key_cases("(", ")"), text::join(launched_command_names(), "|"));
}

std::string fish_script(const std::vector<CommandWords>& commands) {
  std::string out = "# fish completion of heddle; use: heddle completion fish | source\n";
  std::vector<std::string> words = key_words();
  out += fmt::format(
      "complete -c heddle -n '__fish_seen_subcommand_from launch; and contains -- -- (commandline "
      "-opc)' -a {}\n",
      quoted(text::join(launched_command_names(), " ")));
  for (const auto& [key, values] : config::listed_values()) {
    for (const std::string& value : values) words.push_back(key + "=" + value);
  }
  for (const CommandWords& command : commands) {
    out += fmt::format("complete -c heddle -f -n __fish_use_subcommand -a {} -d {}\n", command.name,
                       quoted(command.description));
    const std::string condition = quoted("__fish_seen_subcommand_from " + command.name);
    for (const OptionWord& option : command.options) {
      const std::string values = quoted(text::join(option.values, " "));
      out +=
          fmt::format("complete -c heddle -n {} -l {} -d {}{}\n", condition, option.name.substr(2),
                      quoted(option.description), option.values.empty() ? "" : " -x -a " + values);
    }
    // fish takes no word behind -- for an option: those of a command there are arguments.
    out +=
        fmt::format("complete -c heddle -n '{} {}; and contains -- -- (commandline -opc)' -a {}\n",
                    "string match -q -- \"-*\" (commandline -ct); and __fish_seen_subcommand_from",
                    command.name, quoted(text::join(names_of(command.options), " ")));
    if (!command.values.empty()) {
      out += fmt::format("complete -c heddle -f -n {} -a {}\n", condition,
                         quoted(text::join(command.values, " ")));
    }
    if (command.takes_keys) {
      out += fmt::format("complete -c heddle -n {} -a {}\n", condition,
                         quoted(text::join(words, " ")));
    }
  }
  return out;
}

}  // namespace

std::string completion_script(const CLI::App& app, const std::string& shell) {
  const std::vector<CommandWords> commands = commands_of(app);
  if (shell == "bash") return bash_script(commands);
  if (shell == "zsh") return zsh_script(commands);
  if (shell == "fish") return fish_script(commands);
  const std::string near = text::nearest(shell, {"bash", "zsh", "fish"});
  throw_error<ConfigError>("unknown shell '{}', expected bash, zsh or fish{}", shell,
                           near.empty() ? "" : fmt::format(" (did you mean '{}'?)", near));
}

}  // namespace heddle::cli
