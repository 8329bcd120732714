#include "ui/table.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/text.h"
#include "ui/terminal.h"

namespace heddle::ui {
namespace {

constexpr int kNarrowest = 8;  // a column is never cut below this

std::string repeat(std::string_view piece, int count) {
  std::string out;
  for (int i = 0; i < count; ++i) out += piece;
  return out;
}

/// The pieces a style draws between and around cells.
struct Frame {
  std::string_view left, between, right;
};

Frame frame_of(TableStyle style) {
  if (style == TableStyle::kBox) return {"│ ", " │ ", " │"};
  return {"", "  ", ""};
}

int frame_width(const Frame& frame, std::size_t columns) {
  return display_width(frame.left) + display_width(frame.right) +
         display_width(frame.between) * static_cast<int>(columns - 1);
}

/// A cell as the lines it takes in a column of that width.
std::vector<std::string> lines_of(const std::string& cell, int width) {
  std::vector<std::string> lines;
  for (const std::string& line : text::split(cell, '\n')) {
    const bool has_escapes = line.find('\x1b') != std::string::npos;
    if (has_escapes || width < 2) {
      lines.push_back(fit(line, width));
    } else {
      for (std::string& part : wrap(line, width)) lines.push_back(std::move(part));
    }
  }
  return lines;
}

/// Kinds of rows above and below a horizontal rule.
enum class Kind { kEdge, kCells, kSection };

std::string rule(const std::vector<int>& widths, Kind above, Kind below) {
  const bool is_top = above == Kind::kEdge, is_bottom = below == Kind::kEdge;
  const bool has_up = above == Kind::kCells, has_down = below == Kind::kCells;
  const char* between = has_up && has_down ? "┼" : has_up ? "┴" : has_down ? "┬" : "─";
  std::string out = is_top ? "╭" : is_bottom ? "╰" : "├";
  for (std::size_t i = 0; i < widths.size(); ++i) {
    if (i > 0) out += between;
    out += repeat("─", widths[i] + 2);
  }
  return out + (is_top ? "╮" : is_bottom ? "╯" : "┤") + "\n";
}

}  // namespace

Table::Table(std::vector<std::string> headers, std::vector<Align> alignments)
    : headers_(std::move(headers)), alignments_(std::move(alignments)) {}

Table& Table::row(std::vector<std::string> cells) {
  rows_.push_back({std::move(cells), false});
  return *this;
}

Table& Table::section(std::string title) {
  rows_.push_back({{std::move(title)}, true});
  return *this;
}

std::vector<int> Table::column_widths(TableStyle style, int width) const {
  std::vector<int> widths(headers_.size(), 0);
  const auto widen = [&](const std::vector<std::string>& cells) {
    if (cells.size() > widths.size()) widths.resize(cells.size(), 0);
    for (std::size_t i = 0; i < cells.size(); ++i) {
      for (const std::string& line : text::split(cells[i], '\n')) {
        widths[i] = std::max(widths[i], display_width(line));
      }
    }
  };
  widen(headers_);
  for (const Row& row : rows_) {
    if (!row.is_section) widen(row.cells);
  }
  if (widths.empty()) widths.push_back(0);
  const int frame = frame_width(frame_of(style), widths.size());
  for (const Row& row : rows_) {
    if (!row.is_section) continue;
    const int missing = display_width(row.cells[0]) + frame_width(frame_of(style), 1) - frame -
                        std::accumulate(widths.begin(), widths.end(), 0);
    if (missing > 0) widths.back() += missing;
  }
  while (width > 0 && frame + std::accumulate(widths.begin(), widths.end(), 0) > width) {
    const auto widest = std::ranges::max_element(widths);
    if (*widest <= kNarrowest) break;
    --*widest;
  }
  return widths;
}

std::string Table::render(TableStyle style, bool has_color, int width) const {
  const std::vector<int> widths = column_widths(style, width);
  const Frame frame = frame_of(style);
  const bool is_box = style == TableStyle::kBox;
  const int inner = std::accumulate(widths.begin(), widths.end(), 0) +
                    frame_width(frame, widths.size()) - frame_width(frame, 1);
  std::string out;

  const auto line = [&](const std::vector<std::string>& cells, Color color) {
    std::vector<std::vector<std::string>> parts;
    std::size_t height = 1;
    for (const std::string& cell : cells) {
      parts.push_back(lines_of(cell, widths[parts.size()]));
      height = std::max(height, parts.back().size());
    }
    for (std::size_t y = 0; y < height; ++y) {
      std::string text(frame.left);
      for (std::size_t i = 0; i < widths.size(); ++i) {
        if (i > 0) text += frame.between;
        const std::string cell = i < parts.size() && y < parts[i].size() ? parts[i][y] : "";
        const bool is_right = i < alignments_.size() && alignments_[i] == Align::kRight;
        text += paint(pad(cell, widths[i], is_right), color, has_color);
      }
      text += frame.right;
      if (!is_box) text.erase(text.find_last_not_of(' ') + 1);
      out += text + "\n";
    }
  };

  Kind above = Kind::kEdge;
  const auto separate = [&](Kind below, bool is_after_header) {
    const bool is_needed = is_after_header || above != Kind::kCells || below != Kind::kCells;
    if (is_box && is_needed) out += rule(widths, above, below);
    above = below;
  };
  if (!headers_.empty()) {
    separate(Kind::kCells, false);
    line(headers_, Color::kBold);
    if (!is_box) out += repeat("-", inner) + "\n";
  }
  for (std::size_t i = 0; i < rows_.size(); ++i) {
    const Row& row = rows_[i];
    separate(row.is_section ? Kind::kSection : Kind::kCells, i == 0 && !headers_.empty());
    if (!row.is_section) {
      line(row.cells, Color::kNone);
      continue;
    }
    const std::string title = pad(fit(row.cells[0], inner), is_box ? inner : 0);
    out += std::string(frame.left) + paint(title, Color::kBold, has_color) +
           std::string(frame.right) + "\n";
  }
  separate(Kind::kEdge, false);
  return out;
}

std::string render_for(const Table& table, int descriptor) {
  if (!is_terminal(descriptor)) return table.render(TableStyle::kPlain);
  return table.render(TableStyle::kBox, uses_color(descriptor), terminal_width(descriptor));
}

}  // namespace heddle::ui
