#include "data/readers/line_reader.h"

#include <string_view>
#include <utility>

#include "base/text.h"

namespace heddle::data {
namespace {

constexpr std::size_t kChunk = 1 << 18;

}  // namespace

LineReader::LineReader(const std::filesystem::path& path, std::size_t max_line_bytes)
    : LineReader(ByteSource::open(path), ByteSource::name_of(path), max_line_bytes) {}

LineReader::LineReader(std::unique_ptr<ByteSource> source, std::string name,
                       std::size_t max_line_bytes)
    : source_(std::move(source)), name_(std::move(name)), max_line_bytes_(max_line_bytes) {}

bool LineReader::fill() {
  if (ended_) return false;
  buffer_.erase(0, std::exchange(position_, 0));
  const std::size_t have = buffer_.size();
  buffer_.resize(have + kChunk);
  try {
    buffer_.resize(have + source_->read(buffer_.data() + have, kChunk));
  } catch (...) {
    // Who goes on after the error finds the end, not the same error for ever.
    ended_ = true;
    buffer_.clear();
    throw;
  }
  ended_ = buffer_.size() == have;
  return !ended_;
}

void LineReader::skip_line() {
  std::size_t end;
  while ((end = buffer_.find('\n', position_)) == std::string::npos) {
    position_ = buffer_.size();
    if (!fill()) return;
  }
  position_ = end + 1;
}

void LineReader::refuse_long_line() const {
  throw_error<UnusableRow>("{}:{}: line is longer than {}", name_, line_,
                           text::format_bytes(static_cast<double>(max_line_bytes_)));
}

bool LineReader::next(std::string& line) {
  if (std::exchange(is_in_long_line_, false)) skip_line();
  while (true) {
    std::size_t searched = position_, end;
    while ((end = buffer_.find('\n', searched)) == std::string::npos) {
      if (buffer_.size() - position_ > max_line_bytes_) {
        // Its end may be far: who reads on after the error looks for it.
        ++line_;
        is_in_long_line_ = true;
        refuse_long_line();
      }
      const std::size_t offset = buffer_.size() - position_;
      if (!fill()) break;
      searched = position_ + offset;
    }
    const bool at_end = end == std::string::npos;
    if (at_end && position_ == buffer_.size()) return false;
    std::string_view view(buffer_.data() + position_, (at_end ? buffer_.size() : end) - position_);
    position_ = at_end ? buffer_.size() : end + 1;
    ++line_;
    if (view.size() > max_line_bytes_) refuse_long_line();
    if (line_ == 1 && view.starts_with("\xef\xbb\xbf")) view.remove_prefix(3);
    if (view.ends_with('\r')) view.remove_suffix(1);
    if (view.find_first_not_of(" \t\r") == std::string_view::npos) {
      ++blank_lines_;
      continue;
    }
    line.assign(view);
    return true;
  }
}

}  // namespace heddle::data
