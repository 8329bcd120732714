#include "data/readers/byte_source.h"

#include <errno.h>
#include <fcntl.h>
#include <lzma.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>
#include <zstd.h>
#include <zstd_errors.h>

#include <algorithm>
#include <string_view>
#include <utility>
#include <vector>

#include "base/errors.h"
#include "base/files.h"
#include "base/text.h"
#include "data/readers/file_kind.h"

namespace heddle::data {
namespace {

constexpr std::size_t kChunk = 1 << 18;

/// Whether the name stands for something that the caller opened himself, such as the pipe of a
/// shell's `<(...)`: it may be anything, and he decided that it is waited for.
bool is_open_already(const std::filesystem::path& path) {
  const std::string name = path.lexically_normal().string();
  return name == "/dev/stdin" || name.starts_with("/dev/fd/") || name.starts_with("/proc/self/fd/");
}

int open_source(const std::filesystem::path& path) {
  if (path == ByteSource::kStandardInput) return ::dup(STDIN_FILENO);
  if (is_open_already(path)) return ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0 && errno == ENOENT)
    throw_error<DataError>("cannot open {}: No such file or directory", path.string());
  if (S_ISDIR(status.st_mode))
    throw_error<DataError>("{} is a folder, expected a file of rows", path.string());
  return files::open_regular(path);
}

class FileSource : public ByteSource {
 public:
  explicit FileSource(const std::filesystem::path& path)
      : path_(path), descriptor_(open_source(path)) {
    if (descriptor_ < 0) fail("open");
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
    // Windows up to 2 GiB, as `zstd --long=31` writes; the default is 128 MiB.
    ZSTD_DCtx_setParameter(context_, ZSTD_d_windowLogMax,
                           ZSTD_dParam_getBounds(ZSTD_d_windowLogMax).upperBound);
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
      if (ZSTD_getErrorCode(status) == ZSTD_error_memory_allocation) {
        throw_error<DataError>(
            "{}: no memory for the window of its zstd stream (up to 2 GiB); compress it anew "
            "without --long",
            name_);
      }
      if (ZSTD_isError(status)) {
        throw_error<DataError>("{} is damaged: zstd says '{}'", name_, ZSTD_getErrorName(status));
      }
      inside_frame_ = status != 0;
      // A frame that has ended (status 0) has given all of its output.
      has_pending_output_ = inside_frame_ && out.pos == out.size;
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

/// xz, also of several streams one after the other.
class XzSource : public ByteSource {
 public:
  XzSource(std::unique_ptr<ByteSource> source, std::string name)
      : source_(std::move(source)), name_(std::move(name)), input_(kChunk) {
    // A dictionary has at most 1.5 GiB; xz -9 takes 64 MiB.
    constexpr std::uint64_t kMemory = std::uint64_t{2} << 30;
    if (lzma_stream_decoder(&stream_, kMemory, LZMA_CONCATENATED) != LZMA_OK)
      throw_error<InternalError>("liblzma cannot be initialised for {}", name_);
  }
  ~XzSource() override { lzma_end(&stream_); }
  std::uint64_t bytes_consumed() const override { return source_->bytes_consumed(); }

  std::size_t read(char* into, std::size_t count) override {
    stream_.next_out = reinterpret_cast<std::uint8_t*>(into);
    stream_.avail_out = count;
    while (!has_ended_ && stream_.avail_out == count) {
      if (stream_.avail_in == 0 && !input_ended_) {
        stream_.next_in = reinterpret_cast<const std::uint8_t*>(input_.data());
        stream_.avail_in = source_->read(input_.data(), input_.size());
        input_ended_ = stream_.avail_in == 0;
      }
      const lzma_ret status = lzma_code(&stream_, input_ended_ ? LZMA_FINISH : LZMA_RUN);
      if (status == LZMA_STREAM_END) {
        has_ended_ = true;
      } else if (status == LZMA_BUF_ERROR) {
        throw_error<DataError>("{} ends in the middle of its xz stream; it is cut", name_);
      } else if (status != LZMA_OK) {
        throw_error<DataError>("{} is damaged, or xz of a kind that is not read: liblzma says {}",
                               name_, static_cast<int>(status));
      }
    }
    return count - stream_.avail_out;
  }

 private:
  std::unique_ptr<ByteSource> source_;
  std::string name_;
  std::vector<char> input_;
  lzma_stream stream_ = LZMA_STREAM_INIT;
  bool input_ended_ = false, has_ended_ = false;
};

/// The first bytes, as many as tell what kind of file it is.
std::string read_head(ByteSource& source) {
  std::string head(kKindBytes, '\0');
  std::size_t have = 0;
  while (have < head.size()) {
    const std::size_t got = source.read(head.data() + have, head.size() - have);
    if (got == 0) break;
    have += got;
  }
  head.resize(have);
  return head;
}

}  // namespace

std::unique_ptr<ByteSource> ByteSource::open(const std::filesystem::path& path) {
  return decompress(std::make_unique<FileSource>(path), name_of(path));
}

std::unique_ptr<ByteSource> ByteSource::decompress(std::unique_ptr<ByteSource> raw,
                                                   const std::string& name) {
  std::string head = read_head(*raw);
  const bool is_gzip = head.starts_with("\x1f\x8b");
  // A frame, or one that zstd skips, as pzstd writes before its own.
  const bool is_zstd = head.starts_with("\x28\xb5\x2f\xfd") ||
                       (head.size() > 4 && std::string_view(head).substr(1, 3) == "\x2a\x4d\x18");
  const bool is_xz =
      head.starts_with(std::string_view("\xfd"
                                        "7zXZ\0",
                                        6));
  const bool is_packed = is_gzip || is_zstd || is_xz;
  if (!is_packed) refuse_other_kinds(head, name);
  auto whole = std::make_unique<PeekedSource>(std::move(head), std::move(raw));
  if (!is_packed) return whole;
  std::unique_ptr<ByteSource> content;
  if (is_gzip) {
    content = std::make_unique<GzipSource>(std::move(whole), name);
  } else if (is_xz) {
    content = std::make_unique<XzSource>(std::move(whole), name);
  } else {
    content = std::make_unique<ZstdSource>(std::move(whole), name);
  }
  head = read_head(*content);
  refuse_other_kinds(head, name);
  return std::make_unique<PeekedSource>(std::move(head), std::move(content));
}

std::pair<char, std::unique_ptr<ByteSource>> ByteSource::peek_first(
    std::unique_ptr<ByteSource> source) {
  std::string head = read_head(*source);
  std::string_view text = head;
  if (text.starts_with("\xef\xbb\xbf")) text.remove_prefix(3);
  text = text::trim(text);
  const char first = text.empty() ? '\0' : text.front();
  return {first, std::make_unique<PeekedSource>(std::move(head), std::move(source))};
}

std::string ByteSource::name_of(const std::filesystem::path& path) {
  return path == kStandardInput ? "standard input" : path.string();
}

}  // namespace heddle::data
