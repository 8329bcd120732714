#include "data/cache/token_store.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <string_view>
#include <tuple>
#include <utility>

#include "base/errors.h"
#include "base/hash.h"
#include "base/json.h"

namespace heddle::data {
namespace {

static_assert(std::endian::native == std::endian::little, "the cache files are little-endian");

constexpr std::string_view kHead = "HEDTOK02";
constexpr std::string_view kTail = "HEDEND02";
constexpr std::size_t kHeadBytes = 64;
constexpr std::size_t kDigestBytes = 32;
constexpr std::size_t kSizesBytes = 24;
constexpr std::size_t kTailBytes =
    kSizesBytes + kDigestBytes + 8;  // rows, table and JSON bytes, magic
constexpr std::size_t kPieceBytes = 8 << 20;
constexpr std::size_t kBytesPerToken = 2 * sizeof(std::int32_t) + sizeof(float);
constexpr std::size_t kFlushBytes = 1 << 20;

/// Bytes of the row table without the lengths of texts.
std::size_t table_bytes(std::size_t rows) { return (6 * rows + 2) * 8; }

}  // namespace

std::shared_ptr<const TokenStore> TokenStore::open(const std::filesystem::path& path) {
  std::shared_ptr<TokenStore> store(new TokenStore());
  store->file_ = std::make_unique<files::MappedFile>(path);
  store->parse(store->file_->bytes(), path.string());
  return store;
}

std::shared_ptr<const TokenStore> TokenStore::from_bytes(std::string bytes,
                                                         const std::string& name) {
  std::shared_ptr<TokenStore> store(new TokenStore());
  store->memory_ = std::move(bytes);
  store->parse(std::as_bytes(std::span(store->memory_)), name);
  return store;
}

void TokenStore::parse(std::span<const std::byte> bytes, const std::string& name) {
  const auto damaged = [&](const char* what) {
    throw_error<DataError>("{} is not a whole token cache: {}; remove it", name, what);
  };
  const std::string_view all(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  if (all.size() < kHeadBytes + kTailBytes || !all.starts_with(kHead)) damaged("no head");
  if (!all.ends_with(kTail)) damaged("no tail");
  if (digest(all.substr(0, all.size() - kDigestBytes - kTail.size())) !=
      all.substr(all.size() - kDigestBytes - kTail.size(), kDigestBytes)) {
    damaged("its checksum does not fit its content");
  }
  std::uint64_t sizes[3];
  std::memcpy(sizes, all.data() + all.size() - kTailBytes, sizeof sizes);
  const auto [rows, table, json] = std::tuple(sizes[0], sizes[1], sizes[2]);
  const std::uint64_t room = all.size() - kHeadBytes - kTailBytes;
  if (table > room || json > room - table || rows > room || table < table_bytes(rows) ||
      table % 8 != 0) {
    damaged("its sizes do not fit");
  }
  const std::uint64_t table_at = all.size() - kTailBytes - json - table;
  if (table_at % 8 != 0) damaged("its row table is not aligned");
  rows_ = static_cast<std::int64_t>(rows);
  data_ = bytes.data() + kHeadBytes;
  starts_ = reinterpret_cast<const std::int64_t*>(bytes.data() + table_at);
  lines_ = starts_ + rows_ + 1;
  loss_rows_ = lines_ + rows_;
  loss_weights_ = reinterpret_cast<const double*>(loss_rows_ + rows_);
  targets_ = loss_weights_ + rows_;
  text_starts_ = reinterpret_cast<const std::int64_t*>(targets_ + rows_);
  text_lengths_ = text_starts_ + rows_ + 1;
  const auto most = static_cast<std::int64_t>((table_at - kHeadBytes) / kBytesPerToken);
  if (starts_[0] != 0 || starts_[rows_] > most) damaged("its row table does not fit");
  for (std::int64_t row = 0; row < rows_; ++row) {
    if (starts_[row + 1] <= starts_[row]) damaged("its row table is not increasing");
  }
  check_texts((table - table_bytes(rows)) / 8, damaged);
  const std::string_view text = all.substr(table_at + table, json);
  try {
    meta_ = json::parse<nlohmann::json>(text);
  } catch (const DataError&) {
    damaged("its description is not valid JSON");
  }
  if (!meta_.is_object()) damaged("its description is no object");
}

std::string TokenStore::digest(std::string_view content) const {
  hash::Hasher hasher;
  for (std::size_t at = 0; at < content.size(); at += kPieceBytes) {
    const std::string_view piece = content.substr(at, kPieceBytes);
    hasher.append(piece);
    if (file_) file_->drop(at, piece.size());
  }
  return hasher.hex();
}

void TokenStore::check_texts(std::uint64_t count,
                             const std::function<void(const char*)>& damaged) const {
  if (text_starts_[0] != 0 || text_starts_[rows_] != static_cast<std::int64_t>(count))
    damaged("its list of texts does not fit");
  for (std::int64_t row = 0; row < rows_; ++row) {
    std::int64_t tokens = 0;
    if (text_starts_[row + 1] < text_starts_[row]) damaged("its list of texts is not increasing");
    for (std::int64_t i = text_starts_[row]; i < text_starts_[row + 1]; ++i) {
      if (text_lengths_[i] < 1) damaged("a text has no token");
      tokens += text_lengths_[i];
    }
    if (tokens != 0 && tokens != length(row)) damaged("the texts of a row are not all of it");
  }
}

SequenceView TokenStore::row(std::int64_t row) const {
  const auto count = static_cast<std::size_t>(length(row));
  const std::byte* at = data_ + starts_[row] * kBytesPerToken;
  const auto* tokens = reinterpret_cast<const std::int32_t*>(at);
  return {.tokens = {tokens, count},
          .labels = {tokens + count, count},
          .weights = {reinterpret_cast<const float*>(tokens + 2 * count), count},
          .row = row,
          .target = targets_[row],
          .text_lengths = {text_lengths_ + text_starts_[row],
                           static_cast<std::size_t>(text_starts_[row + 1] - text_starts_[row])}};
}

TokenStoreWriter::TokenStoreWriter() : hasher_(std::make_unique<hash::Hasher>()) {
  std::string head(kHead);
  head.resize(kHeadBytes);
  put(head.data(), head.size());
}

TokenStoreWriter::TokenStoreWriter(const std::filesystem::path& path) : TokenStoreWriter() {
  file_ = std::make_unique<files::AtomicFile>(path);
}

void TokenStoreWriter::put(const void* bytes, std::size_t count) {
  buffer_.append(static_cast<const char*>(bytes), count);
  hasher_->append({static_cast<const char*>(bytes), count});
  if (file_ != nullptr && buffer_.size() >= kFlushBytes) {
    file_->write(buffer_);
    written_ += buffer_.size();
    buffer_.clear();
  }
}

void TokenStoreWriter::add(const TokenizedRow& row, std::int64_t line) {
  const std::size_t count = row.tokens.size();
  put(row.tokens.data(), count * sizeof(std::int32_t));
  put(row.labels.data(), count * sizeof(std::int32_t));
  put(row.weights.data(), count * sizeof(float));
  starts_.push_back(starts_.back() + static_cast<std::int64_t>(count));
  lines_.push_back(line);
  loss_rows_.push_back(row.loss_rows);
  loss_weights_.push_back(row.loss_weight_sum);
  targets_.push_back(row.target);
  text_lengths_.insert(text_lengths_.end(), row.text_lengths.begin(), row.text_lengths.end());
  text_starts_.push_back(std::ssize(text_lengths_));
}

std::string TokenStoreWriter::finish(const nlohmann::json& meta) {
  const std::uint64_t zero = 0;
  put(&zero, (8 - (written_ + buffer_.size()) % 8) % 8);
  const auto put_list = [&](const auto& list) { put(list.data(), list.size() * 8); };
  put_list(starts_);
  put_list(lines_);
  put_list(loss_rows_);
  put_list(loss_weights_);
  put_list(targets_);
  put_list(text_starts_);
  put_list(text_lengths_);
  const std::string text = meta.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  put(text.data(), text.size());
  const std::uint64_t sizes[3] = {
      lines_.size(), table_bytes(lines_.size()) + 8 * text_lengths_.size(), text.size()};
  put(sizes, sizeof sizes);
  const std::string digest = hasher_->hex();
  put(digest.data(), digest.size());
  put(kTail.data(), kTail.size());
  if (file_ == nullptr) return std::exchange(buffer_, {});
  file_->write(buffer_);
  buffer_.clear();
  file_->commit();
  return "";
}

}  // namespace heddle::data
