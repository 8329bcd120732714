#include "data/readers/jsonl_reader.h"

#include <utility>

#include "base/errors.h"

namespace heddle::data {
namespace {

using nlohmann::ordered_json;

/// nlohmann's message without its "[json.exception...]" prefix and without the text that it quotes
/// at length.
std::string reason_of(const std::exception& error) {
  std::string message = error.what();
  if (const auto end = message.find("] "); message.starts_with('[') && end != std::string::npos) {
    message.erase(0, end + 2);
  }
  constexpr std::size_t kLongest = 200;
  if (message.size() > kLongest) {
    std::size_t cut = kLongest;
    while (cut > 0 && (message[cut] & 0xC0) == 0x80) --cut;
    message.resize(cut);
    message += "...";
  }
  return message;
}

}  // namespace

ordered_json parse_json_line(std::string_view line, const Place& place,
                             const ReaderOptions& options) {
  if (nesting_of(line, options.max_depth) > options.max_depth) {
    throw_error<DataError>("{}:{}: lists and objects are nested deeper than {}", place.file,
                           place.line, options.max_depth);
  }
  ordered_json value;
  try {
    value = ordered_json::parse(line.begin(), line.end());
  } catch (const nlohmann::json::exception& error) {
    const bool opens_list = line.starts_with('[') && place.line == 1;
    throw_error<DataError>(
        "{}:{}: not valid JSON: {}{}", place.file, place.line, reason_of(error),
        opens_list ? " (a file that is one JSON list is not JSONL; convert it: jq -c '.[]')" : "");
  }
  if (!value.is_object()) {
    throw_error<DataError>("{}:{}: the line holds a JSON {}, expected an object{}", place.file,
                           place.line, value.type_name(),
                           value.is_array() ? " (a file that is one JSON list is not JSONL; "
                                              "convert it: jq -c '.[]')"
                                            : "");
  }
  return value;
}

Row parse_line(std::string_view line, const Place& place, const ReaderOptions& options) {
  const ordered_json value = parse_json_line(line, place, options);
  try {
    return parse_row(value, options.format, options.fields, options.task, options.group);
  } catch (const DataError& error) {
    throw_error<DataError>("{}:{}: {}", place.file, place.line, error.what());
  }
}

JsonlReader::JsonlReader(const std::filesystem::path& path, ReaderOptions options)
    : lines_(path, options.max_line_bytes), options_(std::move(options)) {}

std::optional<JsonlReader::Item> JsonlReader::next() {
  std::string line;
  if (!lines_.next(line)) return std::nullopt;
  const Place place{lines_.name(), lines_.line()};
  Item item;
  item.line = place.line;
  item.value = parse_json_line(line, place, options_);
  try {
    item.row =
        parse_row(item.value, options_.format, options_.fields, options_.task, options_.group);
  } catch (const DataError& error) {
    throw_error<DataError>("{}:{}: {}", place.file, place.line, error.what());
  }
  return item;
}

}  // namespace heddle::data
