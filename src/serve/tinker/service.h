#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include <nlohmann/json.hpp>

#include "base/random_hex.h"
#include "serve/http/server.h"
#include "serve/metrics/generation_metrics.h"
#include "serve/model/model_thread.h"
#include "serve/model/wants_weights.h"
#include "serve/samples_in_flight.h"
#include "serve/store/audit.h"
#include "serve/store/data_directory.h"
#include "serve/tinker/checkpoints.h"
#include "serve/tinker/fields.h"
#include "serve/tinker/kept_weights.h"
#include "serve/tinker/promises.h"
#include "serve/tinker/runs.h"

namespace heddle::serve::tinker {

struct ServiceOptions {
  Promises::Options promises;
  Runs::Options runs;
  double session_timeout_s = 1800;  ///< Without a heart-beat.
  double tick_s = 10;               ///< Between looks at what has been silent or kept for too long.
  std::int64_t sessions_per_tenant = 1000;
  /// Shared with the other APIs of a server.
  std::shared_ptr<SamplesInFlight> samples = std::make_shared<SamplesInFlight>();
  std::int64_t max_rank = 256;
  bool shared_expert_factors = true;    ///< New runs have them, see tenants::SetOptions.
  std::size_t adapters_in_memory = 64;  ///< That samplers read; the others wait on the disk.
  /// A run's state is saved every so many optimizer steps, and what came since is run again after a
  /// crash: no promise is lost. 0: a run lives in memory, and in what its client saves.
  std::int64_t durable_steps = 0;
  std::shared_ptr<GenerationMetrics> metrics = {};  ///< For samples. Null: nobody counts.
  bool compresses_bodies = false;  ///< Asks clients for zstd: worth it but on loopback.
};

/// The training API of the tinker SDK below /api/v1. Its state is touched on the loop's thread
/// alone.
class Service {
 public:
  Service(Server& server, ModelThread& model, DataDirectory& data, const ServiceOptions& options);

  /// Adds the routes and, with durable_steps, the runs of a server before this one.
  void serve();
  /// Counts at the moment, for metrics.
  TrainingMetrics::Now now() const {
    return {promises_.pending(), runs_.waiting(), runs_.open_runs()};
  }
  /// The server ends: polls are answered, no operation is started.
  void drain();

  /// Weights of a checkpoint that the caller may read, for other APIs: called from any thread, and
  /// answered on the loop's.
  void find_weights(const std::string& path, const Caller& caller, WantsWeights wants);

  const Promises& promises() const { return promises_; }
  const Runs& runs() const { return runs_; }

 private:
  using Answer = std::function<void(const Request&, const Responder&)>;
  enum class On { kLoop, kWorker };
  using Method = void (Service::*)(const Request&, const Responder&);
  void route(const char* method, const std::string& path, const char* scope, Method handler,
             On on = On::kLoop, Cost cost = Cost::kNone);
  // service_refusals.cpp
  /// How a request of a run is refused for good.
  enum class Refusal {
    kStatus,   ///< By a status, on the loop's thread.
    kPromise,  ///< By a promise that has failed: a client that sends a call in several requests
               ///< stops in the middle of it where one of them has another answer.
  };
  /// A route whose requests have a place in the order of a run, which one that is refused gives up.
  void route_in_order(const char* path, Method handler, Refusal refusal, On on = On::kLoop);
  /// Answers the promise that has failed, or throws `error`.
  void refuse(const Request& request, const Responder& responder, const std::string& kind,
              Refusal refusal, const HttpError& error);
  void give_place_up(const std::string& run, std::int64_t seq);
  bool is_run_of(const Caller& caller, const std::string& run);
  /// Runs the work on the loop's thread; what it throws becomes the answer.
  void on_loop(const Responder& responder, std::function<void()> work);
  /// Turns what the work throws into an answer.
  static void answering(const Responder& responder, const std::function<void()>& work);
  void tick();
  /// Ends what has been silent for too long, forgets what is too old.
  void look_after();

  // service.cpp
  void client_config(const Request& request, const Responder& responder);
  void dynamic_config(const Request& request, const Responder& responder);
  void capabilities(const Request& request, const Responder& responder);
  void telemetry(const Request& request, const Responder& responder);
  void health(const Request& request, const Responder& responder);
  void who(const Request& request, const Responder& responder);
  void retrieve_future(const Request& request, const Responder& responder);
  void retrieve_futures(const Request& request, const Responder& responder);
  void cancel_future(const Request& request, const Responder& responder);
  // service_sessions.cpp
  void create_session(const Request& request, const Responder& responder);
  void heartbeat(const Request& request, const Responder& responder);
  void finish_session(const Request& request, const Responder& responder);
  void list_sessions(const Request& request, const Responder& responder);
  void search_sessions(const Request& request, const Responder& responder);
  void get_session(const Request& request, const Responder& responder);
  void end_session(const std::string& session, const std::string& reason);
  /// Throws HttpError 404 for a session that is not the caller's, 410 for one that has ended.
  void require_session(const Request& request, const std::string& session);

  // service_training.cpp
  void create_model(const Request& request, const Responder& responder);
  void get_info(const Request& request, const Responder& responder);
  void forward_backward(const Request& request, const Responder& responder);
  void forward(const Request& request, const Responder& responder);
  void optim_step(const Request& request, const Responder& responder);
  void unload_model(const Request& request, const Responder& responder);
  void add_work(const Request& request, const Responder& responder, tenants::Work work,
                const std::string& run, std::int64_t seq, std::size_t bytes);
  /// Promises a new run that `make` makes the set of.
  void open_run(const Request& request, const Responder& responder, const Fields& fields,
                const tenants::SetOptions& options, const std::string& path,
                const std::function<tenants::SetId(Backend&)>& make);
  /// Numbers that a submission keeps for a replay.
  std::string kept_body(const Request& request) const;
  /// Throws HttpError 404 for a run that is not the caller's.
  tenants::SetOptions require_run(const Request& request, const std::string& run);

  // service_submit.cpp
  /// A request whose promise is not on the disk yet.
  struct Submitted {
    Promises::Submission submission;
    Operation operation;
    Responder responder;
    std::shared_ptr<Meter> meter;
    bool is_replay;
    std::optional<Outcome> failure = {};  ///< The run is not in memory.
  };
  /// Promises an operation of a run and puts it in its place, at the end of this turn of the loop.
  void submit(const Request& request, const Responder& responder, const std::string& run,
              Operation operation);
  /// All that came in one turn of the loop: one wait for the disk, then the answers. If the disk
  /// takes them not, none is promised and each is answered with 500.
  void promise_submitted();
  /// None for a request that is refused, which is answered.
  std::optional<Promises::Promise> promise(Submitted& submitted);
  void accept(Submitted& submitted, const Promises::Promise& promise);

  // service_restore.cpp
  void restore();
  void restore_run(const std::string& run, const std::string& tenant);
  /// The numbers between these two are not waited for.
  void refuse_between(const std::string& run, std::int64_t before, std::int64_t next);
  /// After its end: what was kept to run it again is removed.
  void forget_run(const std::string& run, const std::string& tenant);
  /// Removes the saved states of a run but one.
  void remove_states(const std::string& run, const std::string& tenant, const std::string& kept);
  /// `owner`, `seq`: place of its promise, which fails where the request is refused now.
  void replay(const std::string& kind, const std::string& tenant, const std::string& body,
              const std::string& owner, std::int64_t seq);
  /// On the model's thread: weights without a name that lie in a state go back to memory.
  void load_unnamed(Backend& backend, const std::string& run, const std::filesystem::path& folder);
  /// On the model's thread: writes them into the folder of a state. Files of the state before it
  /// are shared.
  static void save_unnamed_into(
      Backend& backend, const std::filesystem::path& folder, const std::filesystem::path& before,
      const std::vector<std::pair<std::string, KeptWeights::Weights>>& unnamed);
  /// Every durable_steps an optimizer step saves the state after it too.
  void keep_state(const std::string& run, const std::string& tenant, Operation& operation);

  // service_weights.cpp
  void save_weights(const Request& request, const Responder& responder);
  void save_weights_for_sampler(const Request& request, const Responder& responder);
  void save_weights_external(const Request& request, const Responder& responder);
  void load_weights(const Request& request, const Responder& responder);
  /// The tenant whose weights a request may read: the caller's, or that of the key it brings as
  /// weights_access_token. Throws HttpError 403.
  std::string reader_of(const Request& request, const Fields& fields,
                        const std::string& path) const;
  /// A request as it is remembered: with that tenant in the place of the key.
  static Request as_kept(Request request, const std::string& reader);
  void weights_info(const Request& request, const Responder& responder);
  void list_runs(const Request& request, const Responder& responder);
  void get_run(const Request& request, const Responder& responder);
  void list_run_checkpoints(const Request& request, const Responder& responder);
  void list_checkpoints(const Request& request, const Responder& responder);
  /// The caller's checkpoint that the parameters of the address name. Throws HttpError 404.
  Checkpoint own_checkpoint(const Request& request);
  void delete_checkpoint(const Request& request, const Responder& responder);
  void publish_checkpoint(const Request& request, const Responder& responder);
  void unpublish_checkpoint(const Request& request, const Responder& responder);
  void set_ttl(const Request& request, const Responder& responder);
  // service_copies.cpp
  void copy_weights(const Request& request, const Responder& responder);
  /// Run of a copy: that of a session's number, or one in a session of its own.
  std::string open_copy(const Request& request, const Fields& fields, const Checkpoint& source);
  bool is_copy(const std::string& run);
  void audit_log(const Request& request, const Responder& responder);
  // service_downloads.cpp
  void external_weights_urls(const Request& request, const Responder& responder);
  void download(const Request& request, const Responder& responder);
  /// Proves that a download was allowed until then.
  std::string download_signature(const Checkpoint& checkpoint, const std::string& file,
                                 const std::string& expires) const;
  void not_built(const Request& request, const Responder& responder);
  /// Throws HttpError 429 where the caller's saved weights are at its limit.
  void require_disk(const Caller& caller);
  void save(const Request& request, const Responder& responder, const Fields& fields,
            Checkpoint::Kind kind, const std::string& name,
            const std::function<std::string(const Checkpoint&)>& answer);
  /// Weights for the one sampler of this number, in memory and in the states that are kept.
  void save_unnamed(const Request& request, const Responder& responder, const Fields& fields,
                    std::int64_t number);
  nlohmann::json run_json(const std::string& tenant, const std::string& run);

  // service_sampling.cpp
  /// Throws HttpError for another base_model than the one that is served, and where it is needed
  /// and not given.
  void require_base(const Fields& fields, bool is_needed) const;
  void create_sampling_session(const Request& request, const Responder& responder);
  void join_sampling_session(const Request& request, const Responder& responder);
  void get_sampler(const Request& request, const Responder& responder);
  void sample(const Request& request, const Responder& responder);
  /// Throws HttpError 409 where the number is another sampler's.
  std::string add_sampler(const std::string& tenant, const std::string& session, std::int64_t seq,
                          const std::optional<std::string>& model_path);
  /// Throws HttpError 404 for weights that were saved without a name and are gone, 503 while the
  /// run goes back to where it was before a restart.
  KeptWeights::Weights unnamed_weights(const std::string& sampler, const std::string& name);
  /// State of a sample that waits or has begun.
  QueueState queue_state(bool has_begun) const;
  /// From memory or the disk, from which all samples that come meanwhile have them by one load.
  void with_weights(const Checkpoint& checkpoint, WantsWeights wants);
  /// Null: they cannot be loaded.
  void weights_came(const Checkpoint& checkpoint,
                    const std::shared_ptr<const SamplerWeights>& weights);

  Server& server_;
  ModelThread& model_;
  DataDirectory& data_;
  Audit audit_;
  ServiceOptions options_;
  Promises promises_;
  Runs runs_;
  Checkpoints checkpoints_;
  std::vector<Submitted> submitted_;  ///< Requests that are promised together.
  std::unordered_set<std::string> submitted_runs_;
  std::map<std::string, double> beats_;  ///< For living sessions.
  KeptWeights weights_;
  std::map<std::string, std::vector<WantsWeights>> loading_;  ///< By the checkpoint's folder.
  std::string download_key_ = random_hex(32);  ///< Signs addresses until the server ends.
  std::int64_t next_version_ = 1;
  std::map<std::string, std::int64_t> steps_;  ///< Since the last kept state, by run.
  /// Last requests from before a restart, by run.
  std::map<std::string, std::int64_t> replayed_;
};

}  // namespace heddle::serve::tinker
