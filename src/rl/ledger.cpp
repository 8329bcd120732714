#include "rl/ledger.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include <nlohmann/json.hpp>

#include "base/errors.h"
#include "base/hash.h"
#include "base/json.h"
#include "base/log.h"
#include "base/quote.h"

namespace heddle::rl {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::size_t kChecksumDigits = 16;

/// The offset takes part, so that a record that moved is damaged too.
std::string checksum(std::string_view text, std::uint64_t offset) {
  return fmt::format("{:016x}", hash::of(text, offset));
}

constexpr std::array<Rejection, 3> kRejections{Rejection::kStale, Rejection::kFailed,
                                               Rejection::kFiltered};

Rejection rejection_of(const std::string& name) {
  for (const Rejection reason : kRejections) {
    if (name == name_of(reason)) return reason;
  }
  throw_error<InternalError>("unknown reason '{}'", text::shown(name));
}

/// A number of a record: a count, a cursor, a version.
std::int64_t whole(const Json& value) {
  constexpr std::int64_t kMost = std::int64_t{1} << 62;  // one more is still a number
  if (!value.is_number_integer() || value < 0 || value > kMost)
    throw_error<InternalError>("{} is no whole number from 0 on", json::shown(value));
  return value.get<std::int64_t>();
}

std::uint64_t seed_of(const Json& value) {
  if (!value.is_number_unsigned()) throw_error<InternalError>("{} is no seed", json::shown(value));
  return value.get<std::uint64_t>();
}

/// Effect of each record on the state; refuses contradictions. Both the writer and the reader
/// go through here.
void apply(LedgerState& state, const std::string& kind, const Json& value) {
  const auto pending = [&](std::int64_t cursor) {
    const auto found = state.pending.find(cursor);
    if (found == state.pending.end()) {
      throw_error<InternalError>(
          "{} of group {}, which is not pending: it was never dispatched, or "
          "consumed or rejected before",
          kind, cursor);
    }
    return found;
  };
  const auto forget = [&](std::int64_t cursor) {
    state.pending.erase(pending(cursor));
    state.completed.erase(cursor);
  };
  if (kind == "dispatched") {
    const Dispatch dispatch{whole(value.at("cursor")), whole(value.at("attempt")),
                            seed_of(value.at("seed")), whole(value.at("version"))};
    const bool is_new = dispatch.cursor == state.next_cursor && dispatch.attempt == 0;
    if (is_new) {
      ++state.next_cursor;
    } else if (pending(dispatch.cursor)->second.attempt + 1 != dispatch.attempt) {
      throw_error<InternalError>("dispatched group {}: attempt {} after attempt {}",
                                 dispatch.cursor, dispatch.attempt,
                                 state.pending.at(dispatch.cursor).attempt);
    }
    state.pending[dispatch.cursor] = dispatch;
    state.completed.erase(dispatch.cursor);
  } else if (kind == "completed") {
    const std::int64_t cursor = pending(whole(value.at("cursor")))->first;
    if (!state.completed.insert(cursor).second)
      throw_error<InternalError>("group {} completed twice", cursor);
  } else if (kind == "consumed") {
    const std::int64_t step = whole(value.at("step"));
    if (step <= state.step)
      throw_error<InternalError>("consumed in step {} after step {}", step, state.step);
    for (const Json& cursor : value.at("groups")) {
      forget(whole(cursor));
      ++state.consumed;
    }
    state.step = step;
  } else if (kind == "rejected") {
    forget(whole(value.at("cursor")));
    ++state.rejected[rejection_of(value.at("reason"))];
  } else if (kind == "published") {
    state.version = whole(value.at("version"));
    state.weights_hash = value.at("hash");
  } else if (kind == "resumed") {
    if (state.next_cursor != 0) throw_error<InternalError>("resumed after other records");
    state.next_cursor = whole(value.at("next_cursor"));
    state.step = whole(value.at("step"));
    state.version = whole(value.at("version"));
    for (const Json& entry : value.at("tried")) {
      const Dispatch dispatch{.cursor = whole(entry.at(0)), .attempt = whole(entry.at(1))};
      state.pending[dispatch.cursor] = dispatch;
    }
  } else if (kind == "epoch") {
    state.epoch = whole(value.at("number"));
  } else {
    throw_error<InternalError>("unknown record '{}'", text::shown(kind));
  }
}

/// The length of the record at `offset` with its newline, and its text; nothing if it is damaged.
std::optional<std::string_view> intact_record(std::string_view bytes, std::uint64_t offset) {
  const std::string_view rest = bytes.substr(offset);
  const std::size_t end = rest.find('\n');
  if (end == std::string_view::npos || end <= kChecksumDigits + 1) return {};
  const std::string_view text = rest.substr(kChecksumDigits + 1, end - kChecksumDigits - 1);
  if (rest[kChecksumDigits] != ' ' || rest.substr(0, kChecksumDigits) != checksum(text, offset))
    return {};
  return text;
}

[[noreturn]] void fail(const files::Path& path, const char* what) {
  throw_error<FileError>("{}: {}: {}", path.string(), what, std::strerror(errno));
}

}  // namespace

const char* name_of(Rejection reason) {
  switch (reason) {
    case Rejection::kStale:
      return "stale";
    case Rejection::kFailed:
      return "failed";
    case Rejection::kFiltered:
      return "filtered";
  }
  throw_error<InternalError>("unknown reason {}", static_cast<int>(reason));
}

Ledger::Ledger(files::Path path, std::optional<std::uint64_t> offset) : path_(std::move(path)) {
  descriptor_ = files::open_to_append(path_);
  try {
    std::string bytes = files::read(path_);
    const std::size_t found = bytes.size();
    if (offset) bytes.resize(std::min<std::size_t>(found, *offset));
    length_ = replay(bytes);
    if (offset && length_ != *offset) {
      throw_error<DataError>(
          "{}: damaged at byte {}, before byte {} where the checkpoint stands; restore the file or "
          "resume from an earlier checkpoint",
          path_.string(), length_, *offset);
    }
    if (!offset && length_ < found) {
      log::warning("{}: {} damaged bytes at the end, left by a crash, are cut off", path_.string(),
                   found - length_);
    }
    if (length_ < found && ::ftruncate(descriptor_, static_cast<off_t>(length_)) != 0)
      fail(path_, "cannot be cut");
  } catch (...) {
    ::close(descriptor_);
    throw;
  }
}

Ledger::~Ledger() { ::close(descriptor_); }

/// Returns where the intact records end.
std::uint64_t Ledger::replay(const std::string& bytes) {
  std::uint64_t at = 0;
  while (const auto text = intact_record(bytes, at)) {
    const std::string where = fmt::format("{}: byte {}", path_.string(), at);
    const Json value = json::parse_as<DataError>(*text, where);
    if (!value.is_object() || value.size() != 1)
      throw_error<DataError>("{}: {} is no record", where, json::shown(value));
    try {
      const auto record = value.items().begin();
      apply(state_, record.key(), record.value());
    } catch (const std::exception& error) {
      throw_error<DataError>("{}: {}", where, error.what());
    }
    at += kChecksumDigits + 1 + text->size() + 1;
    if (at >= bytes.size()) break;
  }
  return at;
}

void Ledger::record(const std::string& kind, const Json& value) {
  apply(state_, kind, value);
  const std::string text = Json{{kind, value}}.dump();
  const std::string line = checksum(text, length_) + ' ' + text + '\n';
  unwritten_ += line;
  length_ += line.size();
}

void Ledger::dispatched(const Dispatch& dispatch) {
  record("dispatched", {{"cursor", dispatch.cursor},
                        {"attempt", dispatch.attempt},
                        {"seed", dispatch.seed},
                        {"version", dispatch.version}});
}

void Ledger::completed(std::int64_t cursor) { record("completed", {{"cursor", cursor}}); }

void Ledger::consumed(std::int64_t step, std::span<const std::int64_t> cursors) {
  record("consumed", {{"step", step}, {"groups", std::vector(cursors.begin(), cursors.end())}});
}

void Ledger::rejected(std::int64_t cursor, Rejection reason, std::int64_t tokens) {
  record("rejected", {{"cursor", cursor}, {"reason", name_of(reason)}, {"tokens", tokens}});
}

void Ledger::published(std::int64_t version, const std::string& hash) {
  record("published", {{"version", version}, {"hash", hash}});
}

void Ledger::epoch(std::int64_t number) { record("epoch", {{"number", number}}); }

void Ledger::resumed(std::int64_t next_cursor, std::int64_t step, std::int64_t version,
                     std::span<const Dispatch> tried) {
  Json tries = Json::array();
  for (const Dispatch& dispatch : tried) tries.push_back({dispatch.cursor, dispatch.attempt});
  record("resumed",
         {{"next_cursor", next_cursor}, {"step", step}, {"version", version}, {"tried", tries}});
}

std::uint64_t Ledger::commit() {
  for (std::string_view rest = unwritten_; !rest.empty();) {
    const ssize_t count = ::write(descriptor_, rest.data(), rest.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) fail(path_, "cannot be written");
    rest.remove_prefix(static_cast<std::size_t>(count));
  }
  if (!unwritten_.empty() && ::fsync(descriptor_) != 0)
    fail(path_, "cannot be flushed to the disk");
  unwritten_.clear();
  return length_;
}

}  // namespace heddle::rl
