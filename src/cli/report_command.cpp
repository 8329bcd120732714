#include <CLI/CLI.hpp>
#include <memory>
#include <ostream>

#include "cli/command.h"
#include "ui/report.h"

namespace heddle::cli {

void add_report_command(CLI::App& app, Action& action) {
  auto run_directory = std::make_shared<std::string>();
  CLI::App* command = app.add_subcommand("report", "Make the HTML report of a run anew");
  command->add_option("run_dir", *run_directory, "The train.output_dir of the run")
      ->required()
      ->type_name("RUN_DIR");
  command->footer(
      "Writes RUN_DIR/report.html from RUN_DIR/metrics.jsonl and RUN_DIR/report.json, also while "
      "the run goes on,\n"
      "and prints its path. The page needs no network.\n"
      "\n"
      "Example:\n"
      "  heddle report runs/chat");
  command->callback([run_directory, &action] {
    action = [run_directory](const Session& session) {
      session.out << ui::rebuild_report(*run_directory).string() << "\n";
      return 0;
    };
  });
}

}  // namespace heddle::cli
