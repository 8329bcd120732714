#include "serve/http/body.h"

#include <zlib.h>
#include <zstd.h>

#include <algorithm>
#include <array>
#include <memory>
#include <utility>

#include "serve/http/request.h"

namespace heddle::serve {
namespace {

constexpr std::size_t kPieceBytes = 64 << 10;
/// Window of a zstd frame that is accepted: 2^27 bytes, the format's recommended minimum is 2^23.
constexpr int kWindowLog = 27;

void append(std::string& out, const char* bytes, std::size_t count, std::size_t most_bytes) {
  const std::size_t left = most_bytes - out.size();
  out.append(bytes, std::min(count, left));
  if (count > left)
    throw_http(413, "the body has more than {} bytes once it is decompressed", most_bytes);
}

void from_zstd(std::string_view body, std::string& out, std::size_t most_bytes) {
  const std::unique_ptr<ZSTD_DCtx, decltype(&ZSTD_freeDCtx)> context(ZSTD_createDCtx(),
                                                                     &ZSTD_freeDCtx);
  ZSTD_DCtx_setParameter(context.get(), ZSTD_d_windowLogMax, kWindowLog);
  ZSTD_inBuffer in{body.data(), body.size(), 0};
  std::array<char, kPieceBytes> piece;
  std::size_t left = 1;
  while (in.pos < in.size || left != 0) {
    ZSTD_outBuffer into{piece.data(), piece.size(), 0};
    const std::size_t before = in.pos;
    left = ZSTD_decompressStream(context.get(), &into, &in);
    if (ZSTD_isError(left)) throw_http(400, "the zstd body is broken: {}", ZSTD_getErrorName(left));
    append(out, piece.data(), into.pos, most_bytes);
    if (into.pos == 0 && in.pos == before && left != 0)
      throw HttpError(400, "the zstd body ends within a frame");
  }
}

void from_gzip(std::string& body, std::string& out, std::size_t most_bytes) {
  z_stream stream{};
  constexpr int kGzip = 16 + MAX_WBITS;
  if (inflateInit2(&stream, kGzip) != Z_OK) throw HttpError(500, "zlib does not start");
  const std::unique_ptr<z_stream, decltype(&inflateEnd)> ended(&stream, &inflateEnd);
  stream.next_in = reinterpret_cast<Bytef*>(body.data());
  stream.avail_in = static_cast<uInt>(body.size());
  std::array<char, kPieceBytes> piece;
  int status = Z_OK;
  while (status != Z_STREAM_END) {
    stream.next_out = reinterpret_cast<Bytef*>(piece.data());
    stream.avail_out = kPieceBytes;
    status = inflate(&stream, Z_NO_FLUSH);
    if (status != Z_OK && status != Z_STREAM_END)
      throw_http(400, "the gzip body is broken: {}", stream.msg ? stream.msg : "it ends too early");
    append(out, piece.data(), kPieceBytes - stream.avail_out, most_bytes);
    // A body may be several files of gzip, one after another.
    if (status == Z_STREAM_END && stream.avail_in > 0 && inflateReset(&stream) == Z_OK)
      status = Z_OK;
  }
}

}  // namespace

void decode_body(std::string& body, std::string_view encoding, std::size_t most_bytes) {
  const std::size_t sent_bytes = body.size();
  if (!encoding.empty() && encoding != "identity") {
    if (encoding != "zstd" && encoding != "gzip")
      throw HttpError(415, "the Content-Encoding is not known: expected identity, gzip or zstd");
    std::string in = std::exchange(body, "");
    encoding == "zstd" ? from_zstd(in, body, most_bytes) : from_gzip(in, body, most_bytes);
  }
  if (sent_bytes > most_bytes)
    throw_http(413, "the body has {} bytes: {} are allowed", sent_bytes, most_bytes);
}

}  // namespace heddle::serve
