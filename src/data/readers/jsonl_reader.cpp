#include "data/readers/jsonl_reader.h"

#include <utility>

#include "base/errors.h"
#include "base/text.h"
#include "data/json/json_text.h"

namespace heddle::data {
namespace {

using nlohmann::ordered_json;

/// Guesses what a line that is not JSON is, and what to do; "" where nothing tells.
std::string advice(std::string_view line, const Place& place) {
  line = text::trim(line);
  if (line.ends_with("},")) {
    return "; the line ends with a comma, which JSON Lines has not: remove it, or put the rows in "
           "one list [ ... ]";
  }
  if (place.line != 1) return "";
  if (line.starts_with('{') && !line.ends_with('}')) {
    return fmt::format(
        "; an object over several lines? JSON Lines has one object a line: jq -c . '{}' > NEW",
        place.file);
  }
  if (line.starts_with('<')) return "; a web page? Look at the file and fetch it again";
  if (!line.starts_with('{')) {
    return "; JSON Lines begins with '{'. The name of a table ends in .csv or .tsv, that of plain "
           "text in .txt";
  }
  return "";
}

}  // namespace

ordered_json parse_json_line(std::string_view line, const Place& place,
                             const ReaderOptions& options) {
  ordered_json value;
  try {
    value = json_text::parse(line, options.max_depth);
  } catch (const DataError& error) {
    throw_error<DataError>("{}:{}: {}{}", place.file, place.line, error.what(),
                           advice(line, place));
  }
  if (!value.is_object()) {
    throw_error<DataError>("{}:{}: the row is a JSON {}, expected an object{}", place.file,
                           place.line, json_text::type_name(value),
                           value.is_array() ? " (a list of rows on one line? jq -c '.[]' makes "
                                              "lines of it)"
                                            : "");
  }
  return value;
}

Row parse_line(std::string_view line, const Place& place, const ReaderOptions& options) {
  const ordered_json value = parse_json_line(line, place, options);
  try {
    return parse_row(value, options);
  } catch (const DataError& error) {
    throw_error<DataError>("{}:{}: {}", place.file, place.line, error.what());
  }
}

JsonlReader::JsonlReader(const std::filesystem::path& path, ReaderOptions options)
    : records_(RecordReader::open(path, options.max_line_bytes)), options_(std::move(options)) {}

std::optional<JsonlReader::Item> JsonlReader::next() {
  std::string line;
  if (!records_->next(line)) return std::nullopt;
  const Place place{records_->name(), records_->line()};
  Item item;
  item.line = place.line;
  item.value = parse_json_line(line, place, options_);
  try {
    item.row = parse_row(item.value, options_);
  } catch (const DataError& error) {
    throw_error<DataError>("{}:{}: {}", place.file, place.line, error.what());
  }
  return item;
}

}  // namespace heddle::data
