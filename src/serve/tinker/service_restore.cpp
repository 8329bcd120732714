#include <filesystem>
#include <map>
#include <utility>

#include "base/files.h"
#include "base/log.h"
#include "base/random_hex.h"
#include "serve/tinker/service.h"

// Runs after a restart. Their requests since the last saved state lie in the database and are run
// again, in their order.
namespace heddle::serve::tinker {
namespace {

using nlohmann::json;

constexpr const char* kStatePrefix =
    "state-";  ///< Folders of states in a run's directory begin so.
/// Folders of weights without a name, in a state, are called so and their sampler's number.
constexpr const char* kUnnamedPrefix = "unnamed-";
constexpr char kProtobuf = 'p', kJson = 'j';  ///< First byte of a body that is kept.

/// Nobody waits for the answer to a replayed request, but somebody may for its promise.
class Nobody final : public Responder::Exchange {
 public:
  using Refused = std::function<void(const std::string& message)>;
  explicit Nobody(Refused refused) : refused_(std::move(refused)) {}
  void answer(int status, std::string body, const std::string&, Headers) override {
    if (status >= 400) refused_(json::parse(body).value("detail", ""));
  }
  void answer_file(std::filesystem::path) override {}
  void start(int, const std::string&, Headers) override {}
  void write(std::string) override {}
  void end() override {}
  bool is_gone() const override { return true; }
  void on_gone(std::function<void()>) override {}

 private:
  Refused refused_;
};

}  // namespace

std::string Service::kept_body(const Request& request) const {
  if (options_.durable_steps == 0) return "";
  const bool is_proto = request.header("content-type").starts_with("application/x-protobuf");
  return (is_proto ? kProtobuf : kJson) + request.body;
}

void Service::restore() {
  Database& database = data_.database();
  std::vector<std::pair<std::string, std::string>> kept;
  if (options_.durable_steps > 0) {
    Statement rows(
        database,
        "SELECT r.id, r.tenant FROM run r JOIN session s ON s.id = r.session WHERE "
        "r.is_live = 1 AND s.finished IS NULL AND (r.durable_name IS NOT NULL OR EXISTS "
        "(SELECT 1 FROM request q WHERE q.owner = r.session || '/runs' AND q.seq >= 0 AND "
        "q.body != x'' AND r.id = r.session || ':train:' || q.seq)) ORDER BY r.created");
    while (rows.step()) kept.emplace_back(rows.text(0), rows.text(1));
  }
  // Other work under way had its effects in memory alone.
  Statement(database,
            "UPDATE request SET state = 2, result = ?, finished = ? WHERE state = 0 AND (? = 0 OR "
            "body = x'')")
      .bind_blob(Outcome::failure("the server was restarted: this run lost the steps that were not "
                                  "saved; load its last checkpoint into a new run",
                                  "server")
                     .bytes)
      .bind(now_s())
      .bind(options_.durable_steps)
      .run();
  // In one step: a start that is killed leaves the next one the same runs.
  Transaction change(database);
  Statement(database, "UPDATE run SET is_live = 0").run();
  for (const auto& [run, tenant] : kept)
    Statement(database, "UPDATE run SET is_live = 1 WHERE id = ?").bind(run).run();
  Statement(database, "DELETE FROM refused WHERE run NOT IN (SELECT id FROM run WHERE is_live = 1)")
      .run();
  change.commit();
  for (const auto& [run, tenant] : kept) restore_run(run, tenant);
}

void Service::restore_run(const std::string& run, const std::string& tenant) {
  Database& database = data_.database();
  Statement state(database, "SELECT durable_seq, durable_name, session FROM run WHERE id = ?");
  state.bind(run).step();
  const std::int64_t durable_seq = state.integer(0);
  remove_states(run, tenant, state.text(1));
  if (!state.is_null(1)) {
    Operation load;
    load.kind = "restore";
    load.make = [this, run,
                 folder = data_.run_directory(tenant, run) / state.text(1)](Backend& backend) {
      load_unnamed(backend, run, folder);
      return backend.load(folder, true);
    };
    runs_.open(run, tenant, std::move(load), durable_seq + 1);
  } else {
    Statement made(database,
                   "SELECT kind, body, seq FROM request WHERE owner = ? AND seq >= 0 AND ? = ? || "
                   "':train:' || seq");
    const std::string owner = state.text(2) + "/runs";
    made.bind(owner).bind(run).bind(state.text(2));
    if (made.step()) replay(made.text(0), tenant, made.text(1), owner, made.integer(2));
  }
  // One that failed changed nothing but perhaps the gradients, and was perhaps refused: it is not
  // run again.
  Statement rows(database,
                 "SELECT CASE WHEN state = 2 AND instr(kind, ?) != 1 THEN '' ELSE kind END, body, "
                 "seq FROM request WHERE "
                 "owner = ? AND seq > ? AND seq >= 0 AND (body != x'' OR state = 2) UNION SELECT "
                 "'', x'', seq FROM refused WHERE run = ? AND seq > ? AND seq NOT IN (SELECT seq "
                 "FROM request WHERE owner = ? AND seq >= 0) ORDER BY seq");
  rows.bind(kDropped);
  rows.bind(run).bind(durable_seq).bind(run).bind(durable_seq).bind(run);
  Statement ended(database,
                  "SELECT coalesce(max(seq), 0) FROM request WHERE owner = ? AND state > 0");
  ended.bind(run).step();
  std::int64_t count = 0;
  replayed_[run] = durable_seq;
  for (; rows.step(); ++count) {
    const std::int64_t before = std::exchange(replayed_[run], rows.integer(2));
    // A number that is missing below a request that had its turn was refused.
    if (ended.integer(0) >= rows.integer(2)) refuse_between(run, before, rows.integer(2));
    if (rows.text(0).empty()) {
      refuse_between(run, rows.integer(2) - 1, rows.integer(2) + 1);
    } else if (rows.text(0).starts_with(kDropped)) {
      Operation drop;
      drop.seq = rows.integer(2);
      drop.kind = rows.text(0);
      drop.act = [after_pass = drop.kind.ends_with("forward_backward")](Backend& backend,
                                                                        tenants::SetId set) {
        backend.drop_gradients(set, after_pass);
        return Outcome();
      };
      server_.post([this, run, drop] {
        if (runs_.has(run)) runs_.add(run, drop);
      });
    } else {
      replay(rows.text(0), tenant, rows.text(1), run, rows.integer(2));
    }
  }
  log::info("run {} goes on from its state after request {}; {} later requests run again", run,
            durable_seq, count);
}

void Service::refuse_between(const std::string& run, std::int64_t before, std::int64_t next) {
  if (next - before - 1 > options_.runs.most_waiting) return;
  for (std::int64_t seq = before + 1; seq < next; ++seq)
    server_.post([this, run, seq] { runs_.refuse(run, seq); });
}

void Service::remove_states(const std::string& run, const std::string& tenant,
                            const std::string& kept) {
  std::error_code ignored;
  for (const auto& entry :
       std::filesystem::directory_iterator(data_.run_directory(tenant, run), ignored)) {
    const std::string name = entry.path().filename();
    if (name.starts_with(kStatePrefix) && name != kept)
      std::filesystem::remove_all(entry.path(), ignored);
  }
}

void Service::forget_run(const std::string& run, const std::string& tenant) {
  steps_.erase(run);
  replayed_.erase(run);
  Database& database = data_.database();
  Transaction change(database);
  Statement(database, "UPDATE run SET is_live = 0, durable_name = NULL WHERE id = ?")
      .bind(run)
      .run();
  Statement(database, "UPDATE request SET body = x'' WHERE owner = ? AND seq >= 0").bind(run).run();
  Statement(database, "DELETE FROM refused WHERE run = ?").bind(run).run();
  change.commit();
  if (options_.durable_steps > 0) remove_states(run, tenant, "");
}

void Service::replay(const std::string& kind, const std::string& tenant, const std::string& body,
                     const std::string& owner, std::int64_t seq) {
  Request request;
  request.is_replay = true;
  request.caller.tenant = tenant;
  request.headers["content-type"] =
      body.front() == kProtobuf ? "application/x-protobuf" : "application/json";
  request.body = body.substr(1);
  const Responder responder(std::make_shared<Nobody>([this, owner,
                                                      seq](const std::string& message) {
    log::warning("request {} of {} from before the restart is refused: {}", seq, owner, message);
    runs_.refuse(owner, seq);
    try {
      promises_.fail(owner, seq, message);
    } catch (const FileError& error) {
      log::error("{}; the promise of request {} of {} has no outcome", error.what(), seq, owner);
    }
  }));
  void (Service::*handler)(const Request&, const Responder&) =
      kind == "create_model"                       ? &Service::create_model
      : kind == "load_weights"                     ? &Service::load_weights
      : kind == "optim_step"                       ? &Service::optim_step
      : kind == "save_weights"                     ? &Service::save_weights
      : kind == "save_sampler_weights"             ? &Service::save_weights_for_sampler
      : kind == "save_external_weights"            ? &Service::save_weights_external
      : kind == "forward" && body.front() == kJson ? &Service::forward
                                                   : &Service::forward_backward;
  on_loop(responder, [this, handler, request, responder] { (this->*handler)(request, responder); });
}

void Service::load_unnamed(Backend& backend, const std::string& run,
                           const std::filesystem::path& folder) {
  // Later numbers were saved later, and go last where there are too many.
  std::map<std::int64_t, std::filesystem::path> found;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    const std::string name = entry.path().filename();
    if (name.starts_with(kUnnamedPrefix))
      found[std::stoll(name.substr(std::string_view(kUnnamedPrefix).size()))] = entry.path();
  }
  for (const auto& [number, path] : found) {
    server_.post([this, run, number, set = backend.load_snapshot(path)] {
      auto weights = std::make_shared<SamplerWeights>();
      weights->name = unnamed_name(run, number);
      weights->version = next_version_++;
      weights->set = set;
      weights_.add_unnamed(run, sampler_id(session_of(run), number), std::move(weights));
    });
  }
}

void Service::save_unnamed_into(
    Backend& backend, const std::filesystem::path& folder, const std::filesystem::path& before,
    const std::vector<std::pair<std::string, KeptWeights::Weights>>& unnamed) {
  for (const auto& [sampler, weights] : unnamed) {
    const std::string name = kUnnamedPrefix + weights->name.substr(weights->name.rfind('/') + 1);
    if (!before.empty() && std::filesystem::exists(before / name)) {
      link_folder(before / name, folder / name);
    } else {
      backend.save_snapshot(weights->set, folder / name);
    }
  }
  files::sync_directory(folder);
}

void Service::keep_state(const std::string& run, const std::string& tenant, Operation& operation) {
  const auto seq = operation.seq;
  // Counted where the steps run, in their order.
  struct State {
    std::string name, before;  ///< Folders; an empty name: none is kept this time.
    std::vector<std::pair<std::string, KeptWeights::Weights>> unnamed;
  };
  auto state = std::make_shared<State>();
  operation.before = [this, run, state] {
    if (++steps_[run] < options_.durable_steps) return;
    steps_[run] = 0;
    state->name = kStatePrefix + random_hex(6);
    state->unnamed = weights_.unnamed_of(run);
    Statement row(data_.database(), "SELECT durable_name FROM run WHERE id = ?");
    if (row.bind(run).step()) state->before = row.text(0);
  };
  operation.act = [this, state, run, tenant](Backend& backend, tenants::SetId set) {
    if (state->name.empty()) return Outcome();
    const std::filesystem::path folder = data_.run_directory(tenant, run);
    try {
      backend.save(set, folder / state->name, tenants::SavedFor::kTraining);
      save_unnamed_into(backend, folder / state->name,
                        state->before.empty() ? "" : folder / state->before,
                        std::exchange(state->unnamed, {}));
    } catch (const std::exception& error) {  // the step was made, whatever became of its state
      log::error("the state of run {} is not saved, the one before it stays: {}", run,
                 error.what());
      state->name.clear();
    }
    return Outcome();
  };
  operation.after = [this, state, run, tenant, seq] {
    if (state->name.empty()) return;
    Database& database = data_.database();
    Transaction change(database);
    Statement live(database,
                   "UPDATE run SET durable_seq = ?, durable_name = ? WHERE id = ? AND is_live = 1");
    live.bind(seq).bind(state->name).bind(run).run();
    // The run may have ended during the step.
    const bool is_live = live.changes() > 0;
    Statement(database, "UPDATE request SET body = x'' WHERE owner = ? AND seq <= ? AND seq >= 0")
        .bind(run)
        .bind(seq)
        .run();
    Statement(database, "DELETE FROM refused WHERE run = ? AND seq <= ?").bind(run).bind(seq).run();
    change.commit();
    remove_states(run, tenant, is_live ? state->name : "");
  };
}

}  // namespace heddle::serve::tinker
