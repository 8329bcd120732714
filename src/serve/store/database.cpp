#include "serve/store/database.h"

#include <fcntl.h>
#include <sqlite3.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "base/errors.h"
#include "base/log.h"

namespace heddle::serve {
namespace {

constexpr int kBusy_ms = 5000;  ///< `heddle serve keys` may write beside a running server.

/// SQLite would make the file readable by everybody the umask allows.
void make_private(const std::filesystem::path& path) {
  const int descriptor = open(path.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600);
  if (descriptor < 0) throw_error<FileError>("{}: {}", path.string(), std::strerror(errno));
  close(descriptor);
}

}  // namespace

Database::Database(const std::filesystem::path& path) {
  make_private(path);
  if (sqlite3_open_v2(path.c_str(), &handle_, SQLITE_OPEN_READWRITE | SQLITE_OPEN_NOMUTEX,
                      nullptr) != SQLITE_OK) {
    const std::string reason = handle_ == nullptr ? "no memory" : sqlite3_errmsg(handle_);
    sqlite3_close(handle_);
    throw_error<FileError>("{}: {}", path.string(), reason);
  }
  sqlite3_busy_timeout(handle_, kBusy_ms);
  execute("PRAGMA journal_mode=WAL");
  execute("PRAGMA synchronous=FULL");
  execute("PRAGMA foreign_keys=ON");
}

Database::~Database() {
  for (const auto& [text, statement] : idle_) sqlite3_finalize(statement);
  sqlite3_close(handle_);
}

void Database::execute(const char* sql) {
  if (sqlite3_exec(handle_, sql, nullptr, nullptr, nullptr) != SQLITE_OK)
    throw_error<FileError>("the server's database: {}", sqlite3_errmsg(handle_));
}

std::int64_t Database::rows_scanned() const {
  std::int64_t count = 0;
  sqlite3_stmt* statement = nullptr;
  while ((statement = sqlite3_next_stmt(handle_, statement)) != nullptr)
    count += sqlite3_stmt_status(statement, SQLITE_STMTSTATUS_FULLSCAN_STEP, 0);
  return count;
}

Statement::Statement(Database& database, std::string_view sql) : database_(database) {
  const auto idle = database_.idle_.find(sql);
  if (idle != database_.idle_.end()) {
    prepared_ = database_.idle_.extract(idle);
    statement_ = prepared_.mapped();
    return;
  }
  check(sqlite3_prepare_v3(database_.handle_, sql.data(), static_cast<int>(sql.size()),
                           SQLITE_PREPARE_PERSISTENT, &statement_, nullptr));
  Database::Prepared made;
  prepared_ = made.extract(made.emplace(sql, statement_));
}

Statement::~Statement() {
  sqlite3_reset(statement_);  // tells the last step's error once more
  sqlite3_clear_bindings(statement_);
  database_.idle_.insert(std::move(prepared_));
}

void Statement::check(int status) const {
  if (status != SQLITE_OK)
    throw_error<FileError>("the server's database: {}", sqlite3_errmsg(database_.handle_));
}

Statement& Statement::bind(std::int64_t value) {
  check(sqlite3_bind_int64(statement_, ++bound_, value));
  return *this;
}

Statement& Statement::bind(double value) {
  check(sqlite3_bind_double(statement_, ++bound_, value));
  return *this;
}

Statement& Statement::bind(std::string_view text) {
  check(sqlite3_bind_text64(statement_, ++bound_, text.data() == nullptr ? "" : text.data(),
                            text.size(), SQLITE_TRANSIENT, SQLITE_UTF8));
  return *this;
}

Statement& Statement::bind_null() {
  check(sqlite3_bind_null(statement_, ++bound_));
  return *this;
}

Statement& Statement::bind_blob(std::string_view bytes) {
  check(sqlite3_bind_blob64(statement_, ++bound_, bytes.data(), bytes.size(), SQLITE_TRANSIENT));
  return *this;
}

bool Statement::step() {
  const int status = sqlite3_step(statement_);
  if (status == SQLITE_ROW) return true;
  if (status != SQLITE_DONE) check(status);
  return false;
}

std::int64_t Statement::changes() const { return sqlite3_changes64(database_.handle_); }

std::int64_t Statement::integer(int column) const {
  return sqlite3_column_int64(statement_, column);
}

std::string Statement::text(int column) const {
  const void* bytes = sqlite3_column_blob(statement_, column);
  return bytes == nullptr
             ? ""
             : std::string(static_cast<const char*>(bytes),
                           static_cast<std::size_t>(sqlite3_column_bytes(statement_, column)));
}

bool Statement::is_null(int column) const {
  return sqlite3_column_type(statement_, column) == SQLITE_NULL;
}

double Statement::real(int column) const { return sqlite3_column_double(statement_, column); }

Transaction::Transaction(Database& database) : database_(database) {
  Statement(database_, "BEGIN").run();
}

Transaction::~Transaction() {
  // After some errors, as of a full disk, SQLite has taken the change back itself.
  if (is_done_ || sqlite3_get_autocommit(database_.handle_) != 0) return;
  try {
    Statement(database_, "ROLLBACK").run();
  } catch (const FileError& error) {
    log::error("a change of the server's database cannot be taken back: {}", error.what());
  }
}

void Transaction::commit() {
  Statement(database_, "COMMIT").run();
  is_done_ = true;
}

}  // namespace heddle::serve
