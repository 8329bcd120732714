#include "serve/tinker/checkpoints.h"

#include <algorithm>
#include <array>
#include <set>

#include "base/files.h"
#include "base/log.h"
#include "base/quote.h"
#include "base/random_hex.h"
#include "serve/http/request.h"

namespace heddle::serve::tinker {
namespace {

constexpr std::int64_t kLeastTtl_s = 3600, kMostTtl_s = std::int64_t{10} * 366 * 24 * 3600;
constexpr const char* kSharedFactors = "shared_expert_factors";
constexpr const char* kColumns =
    "SELECT path, run, tenant, kind, name, created, bytes, is_public, expires, metadata, options, "
    "folder FROM checkpoint ";

std::string selected(const char* condition) { return std::string(kColumns) + condition; }

Checkpoint::Kind kind_of(const std::string& segment) {
  if (segment == "weights") return Checkpoint::Kind::kTraining;
  return segment == "sampler_weights" ? Checkpoint::Kind::kSampler : Checkpoint::Kind::kExternal;
}

}  // namespace

void remove_folder(const std::filesystem::path& folder) {
  std::error_code reason;
  std::filesystem::remove_all(folder, reason);
  if (reason) log::error("{}: cannot be removed: {}", folder.string(), reason.message());
}

const char* segment_of(Checkpoint::Kind kind) {
  switch (kind) {
    case Checkpoint::Kind::kTraining:
      return "weights";
    case Checkpoint::Kind::kSampler:
      return "sampler_weights";
    default:
      return "external_weights";
  }
}

std::string Checkpoint::id() const { return fmt::format("{}/{}", segment_of(kind), name); }

nlohmann::json Checkpoint::json() const {
  const char* type = kind == Kind::kTraining  ? "training"
                     : kind == Kind::kSampler ? "sampler"
                                              : "external";
  nlohmann::json value{{"checkpoint_id", id()},   {"checkpoint_type", type},
                       {"time", as_utc(created)}, {"tinker_path", path},
                       {"size_bytes", bytes},     {"public", is_public}};
  if (!metadata.is_null()) value["user_metadata"] = metadata;
  if (expires) value["expires_at"] = as_utc(*expires);
  return value;
}

nlohmann::json as_json(const tenants::SetOptions& options) {
  return {{"rank", options.rank},
          {"alpha", options.alpha},
          {"seed", options.seed},
          {"attn", options.attn},
          {"mlp", options.mlp},
          {"unembed", options.unembed},
          {kSharedFactors, options.shared_expert_factors}};
}

tenants::SetOptions set_options_of(const nlohmann::json& value) {
  return {value.at("rank"), value.at("alpha"), value.at("seed"), value.at("attn"), value.at("mlp"),
          value.at("unembed"),
          // Runs from before there were shared factors have none.
          value.value(kSharedFactors, false)};
}

std::optional<double> expiry_of(const Fields& fields) {
  const auto seconds = fields.maybe_integer("ttl_seconds");
  if (!seconds) return std::nullopt;
  if (*seconds < kLeastTtl_s || *seconds > kMostTtl_s)
    fields.refuse("ttl_seconds", "3600 seconds to 10 years");
  return now_s() + static_cast<double>(*seconds);
}

void link_folder(const std::filesystem::path& from, const std::filesystem::path& to) {
  std::filesystem::create_directory(to);
  for (const auto& entry : std::filesystem::directory_iterator(from)) {
    const std::filesystem::path target = to / entry.path().filename();
    if (entry.is_directory()) {
      link_folder(entry.path(), target);
    } else {
      std::filesystem::create_hard_link(entry.path(), target);
    }
  }
  files::sync_directory(to);
}

std::int64_t folder_bytes(const std::filesystem::path& folder) {
  std::int64_t bytes = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder))
    if (entry.is_regular_file()) bytes += static_cast<std::int64_t>(entry.file_size());
  return bytes;
}

Checkpoint Checkpoints::plan(const std::string& tenant, const std::string& run,
                             Checkpoint::Kind kind, const std::string& name, bool overwrite) {
  if (!is_plain_name(name))
    throw_http(400,
               "checkpoint name {}: expected 1 to 128 letters, digits, _ . -, not beginning "
               "with a dot",
               text::shown(name, 60));
  Checkpoint made;
  made.path = fmt::format("tinker://{}/{}/{}", run, segment_of(kind), name);
  made.run = run;
  made.tenant = tenant;
  made.name = name;
  made.kind = kind;
  made.created = now_s();
  if (!overwrite &&
      Statement(data_.database(), "SELECT 1 FROM checkpoint WHERE path = ?").bind(made.path).step())
    throw_http(409, "{} stands already: choose another name, or overwrite", made.path);
  // A folder of its own: readers of the one that is replaced keep what they opened.
  made.folder = data_.run_directory(tenant, run) /
                fmt::format("{}-{}-{}", segment_of(kind), name, random_hex(4));
  return made;
}

std::filesystem::path Checkpoints::add(const Checkpoint& checkpoint) {
  std::filesystem::path replaced;
  {
    Statement old(data_.database(), "SELECT folder FROM checkpoint WHERE path = ?");
    if (old.bind(checkpoint.path).step()) replaced = data_.path() / old.text(0);
  }
  std::optional<std::string> metadata;
  if (!checkpoint.metadata.is_null()) metadata = checkpoint.metadata.dump();
  Statement row(data_.database(),
                "INSERT OR REPLACE INTO checkpoint(path, run, tenant, kind, name, created, bytes, "
                "is_public, expires, metadata, options, folder) VALUES (?,?,?,?,?,?,?,0,?,?,?,?)");
  row.bind(checkpoint.path)
      .bind(checkpoint.run)
      .bind(checkpoint.tenant)
      .bind(segment_of(checkpoint.kind))
      .bind(checkpoint.name)
      .bind(checkpoint.created)
      .bind(checkpoint.bytes)
      .bind(checkpoint.expires)
      .bind(metadata)
      .bind(as_json(checkpoint.options).dump())
      .bind(std::filesystem::relative(checkpoint.folder, data_.path()).string())
      .run();
  return replaced;
}

std::vector<Checkpoint> Checkpoints::read(Statement& rows) {
  std::vector<Checkpoint> found;
  while (rows.step()) {
    Checkpoint each;
    each.path = rows.text(0);
    each.run = rows.text(1);
    each.tenant = rows.text(2);
    each.kind = kind_of(rows.text(3));
    each.name = rows.text(4);
    each.created = rows.real(5);
    each.bytes = rows.integer(6);
    each.is_public = rows.integer(7) != 0;
    if (!rows.is_null(8)) each.expires = rows.real(8);
    if (!rows.is_null(9)) each.metadata = nlohmann::json::parse(rows.text(9));
    each.options = set_options_of(nlohmann::json::parse(rows.text(10)));
    each.folder = data_.path() / rows.text(11);
    found.push_back(std::move(each));
  }
  return found;
}

Checkpoint Checkpoints::find(const std::string& path, const std::string& tenant) {
  const std::string sql = selected(
      "WHERE path = ? AND (tenant = ? OR is_public = 1) AND (expires "
      "IS NULL OR expires > ?)");
  Statement rows(data_.database(), sql.c_str());
  auto found = read(rows.bind(path).bind(tenant).bind(now_s()));
  if (found.empty()) throw_http(404, "checkpoint {} is not known", text::shown(path));
  return std::move(found.front());
}

Checkpoint Checkpoints::own(const std::string& run, const std::string& id,
                            const std::string& tenant) {
  Checkpoint found = find(fmt::format("tinker://{}/{}", run, id), tenant);
  if (found.tenant != tenant)
    throw_http(404, "checkpoint {} is not known", text::shown(found.path));
  return found;
}

Checkpoint Checkpoints::signed_for(const std::string& path) {
  const std::string sql = selected("WHERE path = ? AND (expires IS NULL OR expires > ?)");
  Statement rows(data_.database(), sql.c_str());
  auto found = read(rows.bind(path).bind(now_s()));
  if (found.empty()) throw HttpError(404, "these weights are gone");
  return std::move(found.front());
}

std::vector<Checkpoint> Checkpoints::of_run(const std::string& run, const std::string& tenant) {
  const std::string sql = selected("WHERE run = ? AND tenant = ? ORDER BY created");
  Statement rows(data_.database(), sql.c_str());
  return read(rows.bind(run).bind(tenant));
}

std::vector<Checkpoint> Checkpoints::of_tenant(const std::string& tenant, std::int64_t limit,
                                               std::int64_t offset) {
  const std::string sql = selected("WHERE tenant = ? ORDER BY created DESC LIMIT ? OFFSET ?");
  Statement rows(data_.database(), sql.c_str());
  return read(rows.bind(tenant).bind(limit).bind(offset));
}

std::int64_t Checkpoints::count(const std::string& tenant) {
  Statement row(data_.database(), "SELECT count(*) FROM checkpoint WHERE tenant = ?");
  row.bind(tenant).step();
  return row.integer(0);
}

std::int64_t Checkpoints::bytes(const std::string& tenant) {
  Statement row(data_.database(),
                "SELECT coalesce(sum(bytes), 0) FROM checkpoint WHERE tenant = ?");
  row.bind(tenant).step();
  return row.integer(0);
}

void Checkpoints::remove(const Checkpoint& checkpoint) {
  Statement(data_.database(), "DELETE FROM checkpoint WHERE path = ?").bind(checkpoint.path).run();
  remove_folder(checkpoint.folder);
}

void Checkpoints::set_public(const Checkpoint& checkpoint, bool is_public) {
  Statement(data_.database(), "UPDATE checkpoint SET is_public = ? WHERE path = ?")
      .bind(std::int64_t{is_public})
      .bind(checkpoint.path)
      .run();
}

void Checkpoints::set_expiry(const Checkpoint& checkpoint, std::optional<double> expires) {
  Statement(data_.database(), "UPDATE checkpoint SET expires = ? WHERE path = ?")
      .bind(expires)
      .bind(checkpoint.path)
      .run();
}

void Checkpoints::sweep() {
  const std::string sql = selected("WHERE expires < ?");
  Statement rows(data_.database(), sql.c_str());
  for (const Checkpoint& each : read(rows.bind(now_s()))) remove(each);
}

void Checkpoints::remove_strays() {
  std::set<std::filesystem::path> known;
  Statement rows(data_.database(), "SELECT folder FROM checkpoint");
  while (rows.step()) known.insert(data_.path() / rows.text(0));
  const auto is_checkpoint = [](const std::string& name) {
    return std::ranges::any_of(std::array{Checkpoint::Kind::kTraining, Checkpoint::Kind::kSampler,
                                          Checkpoint::Kind::kExternal},
                               [&](Checkpoint::Kind kind) {
                                 return name.starts_with(segment_of(kind) + std::string("-"));
                               });
  };
  std::error_code ignored;
  for (const auto& tenant :
       std::filesystem::directory_iterator(data_.path() / "tenants", ignored)) {
    for (const auto& run : std::filesystem::directory_iterator(tenant.path() / "runs", ignored)) {
      for (const auto& folder : std::filesystem::directory_iterator(run.path(), ignored)) {
        if (!is_checkpoint(folder.path().filename()) || known.contains(folder.path())) continue;
        log::info("{}: no checkpoint has this folder, which is removed", folder.path().string());
        remove_folder(folder.path());
      }
    }
  }
}

}  // namespace heddle::serve::tinker
