#pragma once

#include <string>
#include <vector>

namespace heddle::ui {

enum class TableStyle { kPlain, kBox };
enum class Align { kLeft, kRight };

/// Rows of texts in aligned columns, for the start-up summary, `doctor` and `config`. Cells may
/// hold colours and any UTF-8; a line break in a cell makes the row taller.
class Table {
 public:
  /// An empty list of headers prints none; alignments not given are left.
  explicit Table(std::vector<std::string> headers = {}, std::vector<Align> alignments = {});

  /// Missing cells at the end are empty.
  Table& row(std::vector<std::string> cells);
  /// A line over the whole width, for a group of rows.
  Table& section(std::string title);

  bool empty() const { return rows_.empty(); }
  /// Ends with a line break. `width` > 0 narrows the widest column, wrapping its cells, until a
  /// line fits; `has_color` styles titles.
  std::string render(TableStyle style, bool has_color = false, int width = 0) const;

 private:
  struct Row {
    std::vector<std::string> cells;
    bool is_section = false;
  };
  std::vector<int> column_widths(TableStyle style, int width) const;

  std::vector<std::string> headers_;
  std::vector<Align> alignments_;
  std::vector<Row> rows_;
};

/// Box and colour on a terminal, plain text elsewhere, cut to its width.
std::string render_for(const Table& table, int descriptor);

}  // namespace heddle::ui
