#include "cli/completion.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <vector>

#include "base/errors.h"
#include "base/text.h"
#include "config/config.h"

namespace heddle::cli {
namespace {

struct OptionWord {
  std::string name;  ///< with dashes
  std::string description;
};

struct CommandWords {
  std::string name;
  std::string description;
  std::vector<OptionWord> options;
  std::vector<std::string>
      values;               ///< what its positional argument may be, if that is a short list
  bool takes_keys = false;  ///< key=value overrides
};

std::vector<OptionWord> options_of(const CLI::App& app) {
  std::vector<OptionWord> options;
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& name : option->get_lnames()) {
      options.push_back({"--" + name, option->get_description()});
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
  local word=${{COMP_WORDS[COMP_CWORD]}} command=${{COMP_WORDS[1]}} options= values= takes_keys=0
  COMPREPLY=()
  if ((COMP_CWORD == 1)); then
    COMPREPLY=($(compgen -W '{0} --help --version' -- "$word"))
    return
  fi
  case $command in
{1}  esac
  if [[ $word == -* ]]; then
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
                     names, cases, text::join(key_words(), " "));
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
  local takes_keys=0
  commands=(
{0}  )
  if (( CURRENT == 2 )); then
    _describe 'command' commands
    return
  fi
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
                     names, cases, text::join(key_words(), " "));
}

std::string fish_script(const std::vector<CommandWords>& commands) {
  std::string out = "# fish completion of heddle; use: heddle completion fish | source\n";
  for (const CommandWords& command : commands) {
    out += fmt::format("complete -c heddle -f -n __fish_use_subcommand -a {} -d {}\n", command.name,
                       quoted(command.description));
    const std::string condition = quoted("__fish_seen_subcommand_from " + command.name);
    for (const OptionWord& option : command.options) {
      out += fmt::format("complete -c heddle -n {} -l {} -d {}\n", condition, option.name.substr(2),
                         quoted(option.description));
    }
    if (!command.values.empty()) {
      out += fmt::format("complete -c heddle -f -n {} -a {}\n", condition,
                         quoted(text::join(command.values, " ")));
    }
    if (command.takes_keys) {
      out += fmt::format("complete -c heddle -n {} -a {}\n", condition,
                         quoted(text::join(key_words(), " ")));
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
