#include <CLI/CLI.hpp>
#include <memory>
#include <ostream>

#include "cli/application.h"
#include "cli/completion.h"

namespace heddle::cli {

void add_completion_command(CLI::App& app, Action& action) {
  auto shell = std::make_shared<std::string>();
  CLI::App* command = app.add_subcommand("completion", "Print a shell's completion script");
  command->add_option("shell", *shell, "The shell that will read it")
      ->required()
      ->type_name("bash|zsh|fish");
  command->footer(
      "Completes commands, options, files and configuration keys (optim.lr=).\n"
      "\n"
      "Examples:\n"
      "  source <(heddle completion bash)        in ~/.bashrc\n"
      "  source <(heddle completion zsh)         in ~/.zshrc, after compinit\n"
      "  heddle completion fish | source         in ~/.config/fish/config.fish");
  command->callback([shell, &action] {
    action = [shell](const Session& session) {
      CLI::App tree;
      Action unused;
      add_commands(tree, unused);
      session.out << completion_script(tree, *shell);
      return 0;
    };
  });
}

}  // namespace heddle::cli
