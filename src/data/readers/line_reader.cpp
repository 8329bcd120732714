#include "data/readers/line_reader.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>
#include <zstd.h>

#include <algorithm>
#include <string_view>
#include <utility>
#include <vector>

#include "base/text.h"

namespace heddle::data {
namespace {

constexpr std::size_t kChunk = 1 << 18;

class FileSource : public ByteSource {
 public:
  explicit FileSource(const std::filesystem::path& path)
      : path_(path), descriptor_(::open(path.c_str(), O_RDONLY | O_CLOEXEC)) {
    if (descriptor_ < 0 && errno == ENOENT)
      throw_error<DataError>("cannot open {}: No such file or directory", path_.string());
    if (descriptor_ < 0) fail("open");
    struct stat status {};
    if (fstat(descriptor_, &status) == 0 && S_ISDIR(status.st_mode)) {
      ::close(descriptor_);
      throw_error<DataError>("{} is a folder, expected a JSONL file", path_.string());
    }
  }
  ~FileSource() override { ::close(descriptor_); }

  std::size_t read(char* into, std::size_t count) override {
    while (true) {
      const ssize_t got = ::read(descriptor_, into, count);
      if (got >= 0) {
        consumed_ += static_cast<std::uint64_t>(got);
        return static_cast<std::size_t>(got);
      }
      if (errno != EINTR) fail("read");
    }
  }
  std::uint64_t bytes_consumed() const override { return consumed_; }

 private:
  [[noreturn]] void fail(const char* what) const {
    throw_error<FileError>("cannot {} {}: {}", what, path_.string(), strerror(errno));
  }

  std::filesystem::path path_;
  int descriptor_;
  std::uint64_t consumed_ = 0;
};

/// Gives back bytes that were read to look at them.
class PeekedSource : public ByteSource {
 public:
  PeekedSource(std::string head, std::unique_ptr<ByteSource> rest)
      : head_(std::move(head)), rest_(std::move(rest)) {}
  std::size_t read(char* into, std::size_t count) override {
    if (position_ == head_.size()) return rest_->read(into, count);
    const std::size_t taken = std::min(count, head_.size() - position_);
    std::copy_n(head_.data() + position_, taken, into);
    position_ += taken;
    return taken;
  }
  std::uint64_t bytes_consumed() const override { return rest_->bytes_consumed(); }

 private:
  std::string head_;
  std::size_t position_ = 0;
  std::unique_ptr<ByteSource> rest_;
};

/// gzip, also of several members one after the other (as pigz and bgzip write).
class GzipSource : public ByteSource {
 public:
  GzipSource(std::unique_ptr<ByteSource> source, std::string name)
      : source_(std::move(source)), name_(std::move(name)), input_(kChunk) {
    if (inflateInit2(&stream_, 15 + 16) != Z_OK) {
      throw_error<InternalError>("zlib cannot be initialised for {}", name_);
    }
  }
  ~GzipSource() override { inflateEnd(&stream_); }
  std::uint64_t bytes_consumed() const override { return source_->bytes_consumed(); }

  std::size_t read(char* into, std::size_t count) override {
    stream_.next_out = reinterpret_cast<Bytef*>(into);
    stream_.avail_out = static_cast<uInt>(std::min<std::size_t>(count, 1u << 30));
    const uInt wanted = stream_.avail_out;
    while (stream_.avail_out == wanted) {
      if (stream_.avail_in == 0) {
        stream_.next_in = reinterpret_cast<Bytef*>(input_.data());
        stream_.avail_in = static_cast<uInt>(source_->read(input_.data(), input_.size()));
        if (stream_.avail_in == 0) {
          if (between_members_) return 0;
          throw_error<DataError>("{} ends in the middle of its gzip stream; it is cut", name_);
        }
      }
      if (between_members_) {
        // Padding with zeros after the last member is allowed.
        while (stream_.avail_in > 0 && *stream_.next_in == 0) {
          ++stream_.next_in;
          --stream_.avail_in;
        }
        if (stream_.avail_in == 0) continue;
        inflateReset(&stream_);
        between_members_ = false;
      }
      const int status = inflate(&stream_, Z_NO_FLUSH);
      if (status == Z_STREAM_END) {
        between_members_ = true;
      } else if (status != Z_OK && status != Z_BUF_ERROR) {
        throw_error<DataError>("{} is damaged: gzip says '{}'", name_,
                               stream_.msg != nullptr ? stream_.msg : "invalid data");
      }
    }
    return wanted - stream_.avail_out;
  }

 private:
  std::unique_ptr<ByteSource> source_;
  std::string name_;
  std::vector<char> input_;
  z_stream stream_{};
  bool between_members_ = false;
};

/// zstd, also of several frames one after the other.
class ZstdSource : public ByteSource {
 public:
  ZstdSource(std::unique_ptr<ByteSource> source, std::string name)
      : source_(std::move(source)),
        name_(std::move(name)),
        input_(kChunk),
        context_(ZSTD_createDCtx()) {
    if (context_ == nullptr) throw_error<InternalError>("zstd cannot be initialised for {}", name_);
  }
  ~ZstdSource() override { ZSTD_freeDCtx(context_); }
  std::uint64_t bytes_consumed() const override { return source_->bytes_consumed(); }

  std::size_t read(char* into, std::size_t count) override {
    ZSTD_outBuffer out{into, count, 0};
    while (out.pos == 0) {
      if (in_.pos == in_.size && !has_pending_output_) {
        in_ = {input_.data(), source_->read(input_.data(), input_.size()), 0};
        if (in_.size == 0) {
          if (!inside_frame_) return 0;
          throw_error<DataError>("{} ends in the middle of its zstd stream; it is cut", name_);
        }
      }
      const std::size_t status = ZSTD_decompressStream(context_, &out, &in_);
      if (ZSTD_isError(status)) {
        throw_error<DataError>("{} is damaged: zstd says '{}'", name_, ZSTD_getErrorName(status));
      }
      inside_frame_ = status != 0;
      has_pending_output_ = out.pos == out.size;
    }
    return out.pos;
  }

 private:
  std::unique_ptr<ByteSource> source_;
  std::string name_;
  std::vector<char> input_;
  ZSTD_DCtx* context_;
  ZSTD_inBuffer in_{nullptr, 0, 0};
  bool inside_frame_ = false;
  bool has_pending_output_ = false;
};

void refuse_columnar(std::string_view head, const std::string& name) {
  const bool is_parquet = head.starts_with("PAR1");
  const bool is_arrow = head.starts_with("ARROW1");
  if (!is_parquet && !is_arrow) return;
  throw_error<DataError>(
      "{}: row 1 cannot be read: this is {} file, expected JSONL. Convert it, for example with "
      "python3 -c \"import pandas; pandas.read_{}('{}').to_json('data.jsonl', orient='records', "
      "lines=True, force_ascii=False)\"",
      name, is_parquet ? "a Parquet" : "an Arrow", is_parquet ? "parquet" : "feather", name);
}

}  // namespace

std::unique_ptr<ByteSource> ByteSource::open(const std::filesystem::path& path) {
  return decompress(std::make_unique<FileSource>(path), path.string());
}

std::unique_ptr<ByteSource> ByteSource::decompress(std::unique_ptr<ByteSource> raw,
                                                   const std::string& name) {
  std::string head(8, '\0');
  std::size_t have = 0;
  while (have < head.size()) {
    const std::size_t got = raw->read(head.data() + have, head.size() - have);
    if (got == 0) break;
    have += got;
  }
  head.resize(have);
  refuse_columnar(head, name);
  const bool is_gzip = head.starts_with("\x1f\x8b");
  const bool is_zstd = head.starts_with("\x28\xb5\x2f\xfd");
  auto whole = std::make_unique<PeekedSource>(std::move(head), std::move(raw));
  if (is_gzip) return std::make_unique<GzipSource>(std::move(whole), name);
  if (is_zstd) return std::make_unique<ZstdSource>(std::move(whole), name);
  return whole;
}

LineReader::LineReader(const std::filesystem::path& path, std::size_t max_line_bytes)
    : LineReader(ByteSource::open(path), path.string(), max_line_bytes) {}

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

bool LineReader::next(std::string& line) {
  while (true) {
    std::size_t searched = position_, end;
    bool too_long = false;
    while ((end = buffer_.find('\n', searched)) == std::string::npos) {
      if (buffer_.size() - position_ > max_line_bytes_) {
        // Forget what was read of it, so that the memory stays bounded, and go on to its end.
        too_long = true;
        position_ = buffer_.size();
      }
      const std::size_t offset = buffer_.size() - position_;
      if (!fill()) break;
      searched = position_ + offset;
    }
    const bool at_end = end == std::string::npos;
    if (at_end && position_ == buffer_.size() && !too_long) return false;
    std::string_view view(buffer_.data() + position_, (at_end ? buffer_.size() : end) - position_);
    position_ = at_end ? buffer_.size() : end + 1;
    ++line_;
    if (too_long || view.size() > max_line_bytes_) {
      throw_error<LineTooLong>("{}:{}: line is longer than {}", name_, line_,
                               text::format_bytes(static_cast<double>(max_line_bytes_)));
    }
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
