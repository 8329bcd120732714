#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>

struct sqlite3;
struct sqlite3_stmt;

namespace heddle::serve {

/// One connection to an SQLite file, for one thread at a time. Errors are FileErrors with SQLite's
/// reason.
class Database {
 public:
  /// Opens or makes the file (mode 0600): WAL, and a commit is on the disk when it returns.
  explicit Database(const std::filesystem::path& path);
  ~Database();
  Database(const Database&) = delete;
  Database& operator=(const Database&) = delete;

  void execute(const char* sql);
  /// Rows that statements passed over for want of an index.
  std::int64_t rows_scanned() const;

 private:
  friend class Statement;
  friend class Transaction;
  struct TextHash {
    using is_transparent = void;
    std::size_t operator()(std::string_view text) const {
      return std::hash<std::string_view>()(text);
    }
  };
  using Prepared = std::unordered_multimap<std::string, sqlite3_stmt*, TextHash, std::equal_to<>>;

  sqlite3* handle_ = nullptr;
  /// Statements that nobody uses now, by their text. Preparing one costs as much as many runs of
  /// it. A text that is used within its own rows is prepared a second time.
  Prepared idle_;
};

/// A statement and its values: Statement(db, "... ? ...").bind(1).bind("a").run()
/// The database must outlive it.
class Statement {
 public:
  Statement(Database& database, std::string_view sql);
  ~Statement();
  Statement(const Statement&) = delete;
  Statement& operator=(const Statement&) = delete;

  // Values of the question marks, from the first to the last.
  Statement& bind(std::int64_t value);
  Statement& bind(double value);
  Statement& bind(std::string_view text);
  template <class Value>
  Statement& bind(const std::optional<Value>& value) {
    return value ? bind(*value) : bind_null();
  }
  Statement& bind_null();
  Statement& bind_blob(std::string_view bytes);

  bool step();  ///< True if there is a row.
  void run() { step(); }
  /// Rows that the statement changed.
  std::int64_t changes() const;

  std::int64_t integer(int column) const;
  double real(int column) const;
  std::string text(int column) const;  ///< Also of a blob; empty for NULL.
  bool is_null(int column) const;

 private:
  void check(int status) const;

  Database& database_;
  Database::Prepared::node_type prepared_;
  sqlite3_stmt* statement_ = nullptr;
  int bound_ = 0;
};

/// Changes that appear together or not at all.
class Transaction {
 public:
  explicit Transaction(Database& database);
  ~Transaction();
  Transaction(const Transaction&) = delete;
  Transaction& operator=(const Transaction&) = delete;
  void commit();

 private:
  Database& database_;
  bool is_done_ = false;
};

}  // namespace heddle::serve
