#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "base/files.h"
#include "base/hash.h"
#include "data/batch.h"
#include "data/rendering/renderer.h"

namespace heddle::data {

/// Tokenised rows of one file, in memory or as a read-only map of a cache file.
///
/// The file, little-endian: 64 bytes of head with a magic; for each row its tokens, labels (int32)
/// and weights (float32); at a multiple of 8 the row table: starts in tokens [rows + 1], file lines
/// [rows], positions with loss [rows] (int64), sums of weights [rows], targets [rows] (float64),
/// starts in the list of texts [rows + 1], lengths of the texts of rows that have several (int64);
/// a JSON text of `meta`; the number of rows, the lengths of table and JSON, the xxh3-128 of all
/// before it, and a magic. It is written front to back, so that tokenising needs no more memory
/// than a chunk of rows and the row table.
class TokenStore {
 public:
  /// Ends the names of cache files; another form of the file has another.
  static constexpr const char* kExtension = ".v2.tokens";

  /// Maps a cache file. Throws FileError, or DataError when it is damaged.
  static std::shared_ptr<const TokenStore> open(const std::filesystem::path& path);
  /// From bytes of the same form.
  static std::shared_ptr<const TokenStore> from_bytes(std::string bytes, const std::string& name);

  std::int64_t rows() const { return rows_; }
  std::int64_t tokens() const { return rows_ == 0 ? 0 : starts_[rows_]; }
  std::int64_t length(std::int64_t row) const { return starts_[row + 1] - starts_[row]; }
  SequenceView row(std::int64_t row) const;
  std::int64_t line(std::int64_t row) const { return lines_[row]; }
  std::int64_t loss_rows(std::int64_t row) const { return loss_rows_[row]; }
  double loss_weight(std::int64_t row) const { return loss_weights_[row]; }
  const nlohmann::json& meta() const { return meta_; }

 private:
  TokenStore() = default;
  void parse(std::span<const std::byte> bytes, const std::string& name);
  std::string digest(std::string_view content) const;
  /// Calls `damaged`, which throws, unless the list of `count` texts fits the rows.
  void check_texts(std::uint64_t count, const std::function<void(const char*)>& damaged) const;

  std::unique_ptr<files::MappedFile> file_;
  std::string memory_;
  const std::byte* data_ = nullptr;
  std::int64_t rows_ = 0;
  const std::int64_t* starts_ = nullptr;
  const std::int64_t* lines_ = nullptr;
  const std::int64_t* loss_rows_ = nullptr;
  const double* loss_weights_ = nullptr;
  const double* targets_ = nullptr;
  const std::int64_t* text_starts_ = nullptr;
  const std::int64_t* text_lengths_ = nullptr;
  nlohmann::json meta_;
};

/// Writes the form that TokenStore reads, to a file that appears only when it is whole, or to
/// memory.
class TokenStoreWriter {
 public:
  /// To memory.
  TokenStoreWriter();
  /// Throws FileError.
  explicit TokenStoreWriter(const std::filesystem::path& path);

  void add(const TokenizedRow& row, std::int64_t line);
  /// Ends the file; gives the bytes when it was written to memory, "" otherwise.
  std::string finish(const nlohmann::json& meta);
  std::int64_t rows() const { return static_cast<std::int64_t>(lines_.size()); }

 private:
  void put(const void* bytes, std::size_t count);

  std::unique_ptr<files::AtomicFile> file_;
  std::unique_ptr<hash::Hasher> hasher_;
  std::string buffer_;
  std::uint64_t written_ = 0;
  std::vector<std::int64_t> starts_ = {0};
  std::vector<std::int64_t> lines_;
  std::vector<std::int64_t> loss_rows_;
  std::vector<double> loss_weights_;
  std::vector<double> targets_;
  std::vector<std::int64_t> text_starts_ = {0};
  std::vector<std::int64_t> text_lengths_;
};

}  // namespace heddle::data
