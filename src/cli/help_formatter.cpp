#include "cli/help_formatter.h"

#include <algorithm>
#include <sstream>

namespace heddle::cli {
namespace {

constexpr std::size_t kNameColumns = 28;

/// One line of `text`, which loses it.
std::string_view take_line(std::string_view& text) {
  const std::size_t end = text.find('\n');
  const std::string_view line = text.substr(0, end);
  text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
  return line;
}

bool is_in_quotes(std::string_view line, std::size_t at) {
  return std::count(line.begin(), line.begin() + static_cast<std::ptrdiff_t>(at), '\'') % 2 == 1;
}

/// `line` broken at spaces; `mark` ends each piece but the last, `indent` begins each but the
/// first.
std::string broken(std::string_view line, std::size_t columns, std::string_view mark,
                   const std::string& indent) {
  std::string out;
  std::string_view begin;
  while (begin.size() + line.size() > columns) {
    const std::size_t first = line.find_first_not_of(' ');
    const std::size_t width = columns - begin.size() - mark.size();
    std::size_t at = line.rfind(' ', width);
    // A backslash within quotes would be a part of the argument.
    while (!mark.empty() && at != std::string_view::npos && is_in_quotes(line, at)) {
      at = line.rfind(' ', at - 1);
    }
    if (at == std::string_view::npos || at <= first) at = line.find(' ', first);
    if (at == std::string_view::npos) break;
    out.append(begin).append(line.substr(0, at)).append(mark).append("\n");
    line.remove_prefix(at + 1);
    begin = indent;
  }
  return out.append(begin).append(line);
}

}  // namespace

std::string wrapped(std::string_view text, std::size_t columns, const std::string& indent) {
  std::string out;
  while (!text.empty()) {
    const bool ends_line = text.find('\n') != std::string_view::npos;
    out += broken(take_line(text), columns, "", indent);
    if (ends_line) out += "\n";
  }
  return out;
}

HelpFormatter::HelpFormatter() { column_width(kNameColumns); }

std::string HelpFormatter::make_option_name(const CLI::Option* option, bool is_positional) const {
  return is_positional ? option->get_type_name() : CLI::Formatter::make_option_name(option, false);
}

std::string HelpFormatter::make_option_opts(const CLI::Option* option) const {
  const bool is_hidden = option->get_positional() || option->get_type_size() == 0;
  return is_hidden ? "" : " " + option->get_type_name();
}

std::string HelpFormatter::make_option_usage(const CLI::Option* option) const {
  return option->get_type_name();
}

std::string HelpFormatter::make_option_desc(const CLI::Option* option) const {
  return wrapped(option->get_description(), kHelpColumns - kNameColumns);
}

std::string HelpFormatter::make_subcommand(const CLI::App* command) const {
  std::ostringstream out;
  CLI::detail::format_help(out, command->get_display_name(true),
                           wrapped(command->get_description(), kHelpColumns - kNameColumns),
                           kNameColumns);
  return out.str();
}

std::string HelpFormatter::make_description(const CLI::App* command) const {
  return wrapped(CLI::Formatter::make_description(command), kHelpColumns);
}

std::string HelpFormatter::make_usage(const CLI::App* command, std::string name) const {
  return wrapped(CLI::Formatter::make_usage(command, name), kHelpColumns, "    ");
}

std::string HelpFormatter::make_footer(const CLI::App* command) const {
  const std::string footer = CLI::Formatter::make_footer(command);
  std::string_view rest = footer;
  std::string out;
  while (!rest.empty()) {
    const std::string_view line = take_line(rest);
    const bool is_command = line.starts_with("  heddle ");
    out += broken(line, kHelpColumns, is_command ? " \\" : "", is_command ? "      " : "") + "\n";
  }
  return out;
}

}  // namespace heddle::cli
