#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <tuple>

#include "base/files.h"
#include "base/quote.h"
#include "base/random_hex.h"
#include "serve/store/usage.h"
#include "serve/tinker/service.h"

// Copies of saved weights, and the record of who did what.
namespace heddle::serve::tinker {
namespace {

using nlohmann::json;

constexpr const char* kCopiedFrom = "copied_from";  ///< Key among a run's options.
constexpr std::int64_t kMostAuditEntries = 10'000;
constexpr double kDay_s = 24 * 3600;

}  // namespace

bool Service::is_copy(const std::string& run) {
  Statement row(data_.database(), "SELECT options FROM run WHERE id = ?");
  return row.bind(run).step() && json::parse(row.text(0)).contains(kCopiedFrom);
}

std::string Service::open_copy(const Request& request, const Fields& fields,
                               const Checkpoint& source) {
  const auto project = fields.maybe_text("destination_project_id");
  if (project && project != kOnlyProject)
    throw_http(400, "destination_project_id {}: this server has one project, which is '{}'",
               text::shown(*project, 60), kOnlyProject);
  std::string session, run;
  if (const auto given = fields.maybe_text("session_id")) {
    session = *given;
    require_session(request, session);
    const std::int64_t number = fields.integer("model_seq_id");
    if (number < 0) fields.refuse("model_seq_id", "a number from 0 on");
    run = fmt::format("{}:train:{}", session, number);
  } else {
    if (!project)
      throw_http(400,
                 "a copy needs destination_project_id, which is '{}', or session_id and "
                 "model_seq_id",
                 kOnlyProject);
    // The client sends a copy that it is not sure of again under the key of the first request.
    const std::string_view key = request.header("x-idempotency-key");
    session =
        key.empty()
            ? random_hex(8)
            : sha256_hex(fmt::format("copy\n{}\n{}", request.caller.tenant, key)).substr(0, 16);
    run = session + ":train:0";
  }
  Statement known(data_.database(), "SELECT options FROM run WHERE id = ?");
  if (known.bind(run).step()) {
    if (json::parse(known.text(0)).value(kCopiedFrom, "") != source.path)
      throw_http(409, "training run {} is there already, and is no copy of {}", run, source.path);
    return run;
  }
  Statement(data_.database(),
            "INSERT OR IGNORE INTO session(id, tenant, created, last_beat, finished, metadata) "
            "VALUES (?, ?, ?, ?, ?, 'null')")
      .bind(session)
      .bind(request.caller.tenant)
      .bind(now_s())
      .bind(now_s())
      .bind(dump({{"type", "success"}, {"detail", "holds a copy of weights"}}))
      .run();
  json options = as_json(source.options);
  options[kCopiedFrom] = source.path;
  Statement(data_.database(),
            "INSERT INTO run(id, session, tenant, created, last_request, options, is_live) VALUES "
            "(?, ?, ?, ?, ?, ?, 0)")
      .bind(run)
      .bind(session)
      .bind(request.caller.tenant)
      .bind(now_s())
      .bind(now_s())
      .bind(options.dump())
      .run();
  return run;
}

void Service::copy_weights(const Request& request, const Responder& responder) {
  const Fields fields(request.body, known::kCopyWeights);
  const Caller& caller = request.caller;
  const std::string from = fields.text("source_path");
  const Checkpoint source = checkpoints_.find(from, reader_of(request, fields, from));
  require_disk(caller);
  Transaction entered(data_.database());
  const std::string run = open_copy(request, fields, source);
  const std::string path =
      fmt::format("tinker://{}/{}/{}", run, segment_of(source.kind), source.name);
  Statement done(data_.database(), "SELECT 1 FROM checkpoint WHERE path = ?");
  if (!done.bind(path).step()) {
    Checkpoint copy = checkpoints_.plan(caller.tenant, run, source.kind, source.name, false);
    try {
      link_folder(source.folder, copy.folder);
    } catch (const std::filesystem::filesystem_error& error) {
      std::error_code ignored;
      std::filesystem::remove_all(copy.folder, ignored);
      throw_error<FileError>("{} cannot be copied: {}", source.path, error.code().message());
    }
    files::sync_directory(copy.folder.parent_path());
    copy.bytes = source.bytes;
    copy.expires = expiry_of(fields);
    copy.metadata = source.metadata;
    copy.options = source.options;
    // It has a run of its own, in which nothing stood before.
    std::ignore = checkpoints_.add(copy);
    audit_.note(caller, "checkpoint_read", source.path);
    audit_.note(caller, "checkpoint_copy", path);
  }
  entered.commit();
  responder.answer(200, dump({{"tinker_path", path}}));
}

void Service::audit_log(const Request& request, const Responder& responder) {
  check_query(request, known::kAudit);
  const auto asked = [&](const char* name, const std::string& otherwise) {
    const auto found = request.query.find(name);
    return found == request.query.end() ? otherwise : found->second;
  };
  const std::string kind = asked("event_type", "all");
  constexpr std::array kKinds = {"all", "checkpoints", "projects", "teams", "organizations"};
  if (std::ranges::find(kKinds, kind) == kKinds.end())
    throw_http(422, "event_type {}: expected one of {}", text::shown(kind, 40),
               fmt::join(kKinds, ", "));
  const double from = start_of_day(asked("day", day_of(now_s())));
  json entries = json::array();
  for (const Audit::Entry& entry : audit_.list(from, from + kDay_s, kMostAuditEntries)) {
    if (kind != "all" && !(kind == "checkpoints" && entry.event.starts_with("checkpoint_")))
      continue;
    entries.push_back(
        {{"timestamp", as_utc(entry.time)},
         {"event", entry.event},
         {"event_details",
          {{"tenant", entry.tenant}, {"key_prefix", entry.key_prefix}, {"object", entry.object}}}});
  }
  responder.answer(200, dump({{"entries", std::move(entries)}}));
}

}  // namespace heddle::serve::tinker
