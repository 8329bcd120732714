#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <string_view>

namespace heddle::cli {

constexpr std::size_t kHelpColumns = 80;

/// `text` with each line that is wider than `columns` broken at spaces; the lines that come of it
/// begin with `indent`. A word wider than that stays whole.
std::string wrapped(std::string_view text, std::size_t columns, const std::string& indent = "");

/// Help that fits a terminal of kHelpColumns. Positional arguments are shown as the user will think
/// of them ("FILE",
/// "[key=value ...]"), not by an inner name; a command of the examples goes on after a backslash,
/// so that it can be copied.
class HelpFormatter : public CLI::Formatter {
 public:
  HelpFormatter();

  std::string make_option_name(const CLI::Option* option, bool is_positional) const override;
  std::string make_option_opts(const CLI::Option* option) const override;
  std::string make_option_usage(const CLI::Option* option) const override;
  std::string make_option_desc(const CLI::Option* option) const override;
  std::string make_subcommand(const CLI::App* command) const override;
  std::string make_description(const CLI::App* command) const override;
  std::string make_usage(const CLI::App* command, std::string name) const override;
  std::string make_footer(const CLI::App* command) const override;
};

}  // namespace heddle::cli
