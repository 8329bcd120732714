#include <unistd.h>

#include <iostream>
#include <string>
#include <vector>

#include "cli/application.h"
#include "ui/terminal.h"

int main(int argc, char** argv) {
  std::ios::sync_with_stdio(false);
  const std::vector<std::string> arguments(argv + (argc > 0 ? 1 : 0), argv + argc);
  heddle::cli::Session session{std::cout};
  session.out_has_color = heddle::ui::uses_color(STDOUT_FILENO);
  if (heddle::ui::is_terminal(STDOUT_FILENO)) {
    session.out_width = heddle::ui::terminal_width(STDOUT_FILENO);
  }
  session.command_line = heddle::cli::quote_command(arguments);
  return heddle::cli::run(arguments, session);
}
