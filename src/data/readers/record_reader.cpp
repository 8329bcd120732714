#include "data/readers/record_reader.h"

#include <algorithm>
#include <cctype>
#include <string_view>
#include <utility>
#include <vector>

#include "base/text.h"
#include "data/readers/arrow_records.h"
#include "data/readers/line_reader.h"

namespace heddle::data {
namespace {

constexpr std::size_t kChunk = 1 << 18;

/// The characters of a source one by one, with the number of the line.
class Characters {
 public:
  Characters(std::unique_ptr<ByteSource> source, std::string name, std::size_t max_bytes)
      : source_(std::move(source)), name_(std::move(name)), max_bytes_(max_bytes) {
    for (const char c : std::string_view("\xef\xbb\xbf")) {
      if (peek() != static_cast<unsigned char>(c)) break;
      ++position_;
    }
  }

  static constexpr int kEnd = -1;
  int peek() {
    if (position_ == buffer_.size() && !fill()) return kEnd;
    return static_cast<unsigned char>(buffer_[position_]);
  }
  int take() {
    const int c = peek();
    if (c == kEnd) return c;
    ++position_;
    line_ += c == '\n';
    return c;
  }
  int skip_space() {
    while (peek() != kEnd && std::isspace(peek())) take();
    return peek();
  }
  std::int64_t line() const { return line_; }
  std::uint64_t bytes_consumed() const { return source_->bytes_consumed(); }
  const std::string& name() const { return name_; }

  /// Bounds the memory that one row takes.
  void check_size(std::size_t bytes, std::int64_t line) const {
    if (bytes <= max_bytes_) return;
    throw_error<DataError>("{}:{}: row is longer than {}", name_, line,
                           text::format_bytes(static_cast<double>(max_bytes_)));
  }

 private:
  bool fill() {
    buffer_.resize(kChunk);
    buffer_.resize(source_->read(buffer_.data(), kChunk));
    position_ = 0;
    return !buffer_.empty();
  }

  std::unique_ptr<ByteSource> source_;
  std::string name_;
  std::size_t max_bytes_;
  std::string buffer_;
  std::size_t position_ = 0;
  std::int64_t line_ = 1;
};

class CharacterRecords : public RecordReader {
 public:
  explicit CharacterRecords(Characters characters) : characters_(std::move(characters)) {}
  std::int64_t line() const override { return line_; }
  std::int64_t blank_lines() const override { return 0; }
  std::uint64_t bytes_consumed() const override { return characters_.bytes_consumed(); }
  const std::string& name() const override { return characters_.name(); }

 protected:
  template <class... Args>
  [[noreturn]] void fail(fmt::format_string<Args...> format, Args&&... args) const {
    throw_error<DataError>("{}:{}: {}", name(), characters_.line(),
                           fmt::format(format, std::forward<Args>(args)...));
  }

  Characters characters_;
  std::int64_t line_ = 0;
};

/// The elements of a JSON list, cut at the commas between them; what they hold is not looked at.
class ListRecords : public CharacterRecords {
 public:
  using CharacterRecords::CharacterRecords;

  bool next(std::string& json) override {
    if (ended_) return false;
    // Who goes on after an error finds the end, not the same error for ever.
    ended_ = true;
    if (line_ == 0) characters_.take();
    int c = characters_.skip_space();
    if (c == ']') {
      if (has_element_) fail("the list has a comma and no row after it");
      characters_.take();
      end();
      return false;
    }
    if (c == ',') fail("the list has a comma where a row was expected");
    has_element_ = true;
    line_ = characters_.line();
    json.clear();
    int depth = 0;
    bool in_string = false;
    for (;;) {
      c = characters_.take();
      if (c == Characters::kEnd) fail("the file ends inside its JSON list; it is cut");
      if (!in_string && depth == 0 && (c == ',' || c == ']')) break;
      json += static_cast<char>(c);
      characters_.check_size(json.size(), line_);
      if (in_string) {
        if (c == '\\') {
          if (const int escaped = characters_.take(); escaped != Characters::kEnd)
            json += static_cast<char>(escaped);
        }
        in_string = c != '"';
      } else if (c == '"') {
        in_string = true;
      } else {
        depth += (c == '[' || c == '{') - (c == ']' || c == '}');
      }
    }
    if (c == ']') {
      end();
    } else {
      ended_ = false;
    }
    return true;
  }

 private:
  void end() {
    if (characters_.skip_space() != Characters::kEnd) fail("text follows the JSON list");
  }

  bool has_element_ = false;
  bool ended_ = false;
};

void append_json_string(std::string_view text, std::string& out) {
  out += '"';
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      out += fmt::format("\\u{:04x}", static_cast<unsigned>(c));
    } else {
      out += c;
    }
  }
  out += '"';
}

/// A table with a line of names first (RFC 4180): fields in double quotes may hold delimiters, line
/// ends and doubled quotes. Every value is a string.
class TableRecords : public CharacterRecords {
 public:
  TableRecords(Characters characters, char delimiter)
      : CharacterRecords(std::move(characters)), delimiter_(delimiter) {}

  bool next(std::string& json) override {
    std::vector<std::string> fields;
    if (columns_.empty()) {
      if (!read_fields(fields)) return false;
      check_names(fields);
      columns_ = std::move(fields);
    }
    if (!read_fields(fields)) return false;
    if (fields.size() != columns_.size()) {
      throw_error<DataError>("{}:{}: the row has {} fields, the first line names {}", name(), line_,
                             fields.size(), columns_.size());
    }
    json = "{";
    for (std::size_t i = 0; i < fields.size(); ++i) {
      if (i > 0) json += ',';
      append_json_string(columns_[i], json);
      json += ':';
      append_json_string(fields[i], json);
    }
    json += '}';
    return true;
  }
  std::int64_t blank_lines() const override { return blank_lines_; }

 private:
  void check_names(const std::vector<std::string>& names) const {
    for (std::size_t i = 0; i < names.size(); ++i) {
      if (names[i].empty()) fail("column {} has no name in the first line", i + 1);
      if (std::find(names.begin(), names.begin() + static_cast<std::ptrdiff_t>(i), names[i]) !=
          names.begin() + static_cast<std::ptrdiff_t>(i)) {
        fail("the first line names column '{}' twice", names[i]);
      }
    }
    if (names.size() == 1 && names[0].find(';') != std::string::npos && delimiter_ == ',') {
      fail("the columns seem to be separated by ';', expected ','");
    }
  }

  /// One record; false at the end of the file.
  bool read_fields(std::vector<std::string>& fields) {
    while (characters_.peek() == '\n' || characters_.peek() == '\r') {
      blank_lines_ += characters_.take() == '\n';
    }
    if (characters_.peek() == Characters::kEnd) return false;
    line_ = characters_.line();
    std::size_t bytes = 0;
    for (;;) {
      fields.emplace_back();
      std::string& field = fields.back();
      if (characters_.peek() == '"') {
        characters_.take();
        read_quoted(field, bytes);
      }
      int c;
      while ((c = characters_.take()) != delimiter_ && c != '\n' && c != Characters::kEnd) {
        field += static_cast<char>(c);
        characters_.check_size(++bytes, line_);
      }
      if (c == delimiter_) continue;
      if (field.ends_with('\r')) field.pop_back();
      return true;
    }
  }

  void read_quoted(std::string& field, std::size_t& bytes) {
    for (;;) {
      const int c = characters_.take();
      if (c == Characters::kEnd) {
        throw_error<DataError>("{}:{}: a field opens with '\"' and does not close", name(), line_);
      }
      if (c == '"' && characters_.peek() != '"') return;
      if (c == '"') characters_.take();
      field += static_cast<char>(c);
      characters_.check_size(++bytes, line_);
    }
  }

  char delimiter_;
  std::vector<std::string> columns_;
  std::int64_t blank_lines_ = 0;
};

/// A whole file as one row {"text": ...}.
class TextRecord : public CharacterRecords {
 public:
  using CharacterRecords::CharacterRecords;

  bool next(std::string& json) override {
    if (line_ > 0 || characters_.peek() == Characters::kEnd) return false;
    line_ = 1;
    std::string text;
    for (int c; (c = characters_.take()) != Characters::kEnd;) {
      text += static_cast<char>(c);
      characters_.check_size(text.size(), line_);
    }
    json = "{\"text\":";
    append_json_string(text, json);
    json += '}';
    return true;
  }
};

/// The ending of the name, in small letters, without that of a compression: ".csv" of "a.CSV.gz".
std::string ending_of(std::filesystem::path path) {
  const auto lower = [&] {
    std::string ending = path.extension().string();
    std::transform(ending.begin(), ending.end(), ending.begin(),
                   [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
    return ending;
  };
  std::string ending = lower();
  if (ending == ".gz" || ending == ".zst" || ending == ".xz") {
    path.replace_extension();
    ending = lower();
  }
  return ending;
}

}  // namespace

std::string RecordReader::form_of(const std::filesystem::path& path) {
  const std::string ending = ending_of(path);
  return ending == ".csv" || ending == ".tsv" || ending == ".txt" ? ending : "";
}

std::unique_ptr<RecordReader> RecordReader::open(const std::filesystem::path& path,
                                                 std::size_t max_bytes) {
  if (is_arrow_file(path)) return open_arrow_file(path, max_bytes);
  const std::string name = ByteSource::name_of(path);
  auto source = ByteSource::open(path);
  const std::string form = form_of(path);
  const auto characters = [&] { return Characters(std::move(source), name, max_bytes); };
  if (form == ".csv") return std::make_unique<TableRecords>(characters(), ',');
  if (form == ".tsv") return std::make_unique<TableRecords>(characters(), '\t');
  if (form == ".txt") return std::make_unique<TextRecord>(characters());
  auto [first, whole] = ByteSource::peek_first(std::move(source));
  source = std::move(whole);
  if (first == '[') {
    Characters list = characters();
    list.skip_space();
    return std::make_unique<ListRecords>(std::move(list));
  }
  return std::make_unique<LineReader>(std::move(source), name, max_bytes);
}

}  // namespace heddle::data
