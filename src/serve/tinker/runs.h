#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <unordered_set>
#include <vector>

#include "serve/http/server.h"
#include "serve/metrics/training_metrics.h"
#include "serve/model/model_thread.h"
#include "serve/tinker/promises.h"

namespace heddle::serve::tinker {

/// One request of a training run. Exactly one of `work`, `make`, `update` and `act` is set, but
/// `act` may follow an update.
struct Operation {
  std::string promise;
  std::int64_t seq = -1;  ///< Its place in the run; -1: after all that have come.
  std::string kind;
  std::size_t bytes = 0;    ///< Memory that it holds while it waits.
  std::int64_t tokens = 0;  ///< Its cost, for fairness.
  std::shared_ptr<Meter> meter =
      {};  ///< Told of the tokens when their turn comes; null: nobody is.
  /// Makes a set only where the tenant has fewer; 0: no limit.
  std::int64_t most_runs = 0;

  /// Shares passes with the work of other runs; its set is filled in.
  std::optional<tenants::Work> work;
  /// Makes the run's set of adapters, or another in the place of the one it has.
  std::function<tenants::SetId(Backend&)> make;
  /// An optimizer step. It is short and makes its run ready for more: those of all runs go first,
  /// together.
  std::optional<tenants::AdamParams> update;
  /// Gives the outcome; after an update that succeeded, what else is to be done.
  std::function<Outcome(Backend&, tenants::SetId)> act;
  bool is_short = false;  ///< An act that shares its turn with such acts of other runs.
  /// Called before it is promised; throws HttpError for what the tenant may not do now.
  std::function<void()> check;
  /// Called on the loop's thread before its turn on the model's; what it throws is the outcome.
  std::function<void()> before;
  /// Called on the loop's thread before the promise is finished, again if the disk does not take
  /// the outcome; may replace the outcome. What it enters in the database and the outcome are there
  /// together or not at all: a replay after a crash would else find its own work in the way.
  std::function<void(Outcome&)> then;
  /// Called on the loop's thread once the promise is finished without failure.
  std::function<void()> after;
};

/// The training runs whose adapters are in memory. A run's operations run in the order of their
/// seq_ids, whatever order they come in; runs take turns by the tokens that their tenants had,
/// those of one tenant one after another.
/// forward_backwards of several runs share a pass, and their optimizer steps go before it together,
/// so that runs that train in step stay in step; a run that has fallen behind is caught up with, as
/// a turn waits a moment for those that are about to come back. All calls are made on the loop's
/// thread.
class Runs {
 public:
  struct Options {
    double gap_s = 300;  ///< So long is waited for a seq_id that is missing.
    std::size_t most_waiting_bytes = std::size_t{256} << 20;  ///< For one run.
    std::int64_t most_waiting = 4096;                         ///< Operations of one run.
    std::int64_t pass_tokens = 16384;                         ///< Joined from several runs.
    /// An idle model waits until nothing has come for so long, at most join_s in all.
    double arrival_s = 0.004;
    /// For runs that are expected by then a turn waits so long, or this part of the last pass's
    /// time.
    double join_s = 0.02, join_share = 0.25;
    std::shared_ptr<TrainingMetrics> metrics = {};  ///< Null: nobody counts.
  };
  Runs(Server& server, ModelThread& model, Promises& promises, const Options& options);

  bool has(const std::string& run) const { return runs_.contains(run); }
  /// Runs of a tenant, with those that wait for a place among `most_runs`.
  std::int64_t count(const std::string& tenant) const;
  /// Adds a run whose first operation makes its set; `first_seq`: of the next one.
  void open(const std::string& run, const std::string& tenant, Operation first,
            std::int64_t first_seq);
  /// Throws HttpError 404 for a run that is not open, 429 where too much waits, 409 for a seq_id
  /// that has had its turn.
  void check(const std::string& run, std::int64_t seq, std::size_t bytes) const;
  /// Whether new requests of these runs may be added a moment later: others are expected that would
  /// share their turn, or none of them could begin now.
  bool may_take_later(const std::unordered_set<std::string>& runs) const;
  void add(const std::string& run, Operation operation);
  /// A request of this number was refused, so later ones do not wait for it. Until one of them has
  /// come, another request of the number is taken. False where the number has had its turn.
  bool refuse(const std::string& run, std::int64_t seq);
  /// Place of the operation that runs or is next; past all of them for a run that is not open.
  std::int64_t next_seq(const std::string& run) const {
    const auto found = runs_.find(run);
    return found == runs_.end() ? INT64_MAX : found->second.next_seq;
  }
  /// Number of the run's next operation.
  QueueState queue_state(const std::string& run) const;
  /// Fails what waits, and gives the run's memory back.
  void close(const std::string& run, const std::string& reason);

  /// Fails the waiting operations of runs that miss a seq_id for too long.
  void tick();
  /// Starts nothing more.
  void drain() { is_draining_ = true; }
  bool is_busy() const { return is_busy_ || is_storing_; }
  std::int64_t waiting() const;
  std::int64_t open_runs() const { return static_cast<std::int64_t>(runs_.size()); }

  struct Status {
    std::string id, tenant, state;
    std::int64_t waiting = 0, next_seq = 0, steps = 0, tokens = 0;
    std::vector<double> losses = {};  ///< Means by token before each of the last optimizer steps.
  };
  std::vector<Status> status() const;

 private:
  using Clock = std::chrono::steady_clock;
  /// Numbers of a run for those who look at it.
  struct Progress {
    std::int64_t steps = 0, tokens = 0;
    double loss_sum = 0;  ///< Since the last step, over loss_tokens.
    std::int64_t loss_tokens = 0;
    std::deque<double> losses;
  };
  struct Run {
    std::string tenant;
    Progress progress;
    std::optional<tenants::SetId> set;
    std::int64_t next_seq = 1;
    std::map<std::int64_t, Operation> waiting;
    std::size_t waiting_bytes = 0;
    std::set<std::int64_t> refused;   ///< Numbers that are not waited for.
    Clock::time_point blocked_since;  ///< The operation that is next has been missing.
    Clock::time_point idle_since;     ///< All that had come was done.
    std::int64_t last_turn = 0;       ///< Its number; the run that waits longest comes first.
    double pause_s = 1e9;             ///< From then to its next operation, the last time.
    bool is_running = false;          ///< One of its operations is on the model's thread.
    bool is_closed = false;           ///< Goes as soon as that one is done.
  };
  /// An operation on its way through the model's thread.
  struct Running {
    std::string run;
    Operation operation;
    Outcome outcome;
    std::optional<tenants::SetId> set;  ///< That the run has after it.
    double loss = 0;                    ///< Sum of a forward_backward.
  };

  /// Throws DataError if the run could not be made.
  static tenants::SetId set_of(const Running& running);
  /// The request that is next has come.
  static bool has_next(const Run& run) { return run.waiting.contains(run.next_seq); }
  bool is_ready(const Run& run) const;
  /// Why the operation that is next may not begin; nothing if it may.
  std::optional<QueueState> pause_of(const Run& run) const;
  bool has_place(const Run& run) const;
  /// Goes past refused requests to one that has come.
  static void pass_refused(Run& run);
  static double seconds_since(Clock::time_point then) {
    return std::chrono::duration<double>(Clock::now() - then).count();
  }
  double join_s() const { return std::max(options_.join_s, options_.join_share * pass_s_); }
  /// Whether a run that has nothing to do comes back, as after its last pause, before a turn that
  /// has waited for `waited_s` is to begin.
  bool is_expected(const Run& run, double waited_s) const;
  /// The operation that a ready run waits for.
  const Operation& next(const std::string& id) const;
  /// Runs that wait for the model: after a pass, those with an optimizer step first.
  std::vector<std::string> ready_runs() const;
  Running take(const std::string& id);
  void pump();
  /// Starts a turn unless runs are awaited that would share it.
  void join();
  void join_after(double seconds);
  /// Looks again when the first of the paused runs may go on.
  void join_after_pauses();
  bool awaits_others();
  /// Outcomes on the disk, and told; then `then`. What the disk does not take is tried again.
  void store(const std::shared_ptr<std::vector<Running>>& batch, std::function<void()> then);
  void done(const std::shared_ptr<std::vector<Running>>& batch);
  void go_on(std::vector<Running>& finished);
  /// Finds those of a batch whose run was made; the others' outcomes say that theirs was not.
  static std::vector<Running*> with_sets(std::vector<Running>& batch);
  /// The work of a batch in passes that its runs share.
  static void pass(Backend& backend, std::vector<Running>& batch);
  /// The optimizer steps of a batch together.
  static void step(Backend& backend, std::vector<Running>& batch);
  void note(Run& run, const Running& finished) const;
  void fail_waiting(Run& run, const std::string& message);
  void release(tenants::SetId set);

  Server& server_;
  ModelThread& model_;
  Promises& promises_;
  Options options_;
  std::map<std::string, Run> runs_;
  std::map<std::string, std::int64_t> served_;  ///< Tokens that each tenant had.
  std::int64_t turns_ = 0;
  bool is_busy_ = false;     ///< A turn is on the model's thread.
  bool is_storing_ = false;  ///< Outcomes of the turn before are on their way to the disk.
  bool is_draining_ = false, is_join_due_ = false, is_look_due_ = false, is_pause_due_ = false;
  std::optional<Clock::time_point> waits_since_;  ///< A turn for others.
  Clock::time_point last_arrival_;                ///< When work came and the model was idle.
  bool was_step_ = false;                         ///< The last turn was one of optimizer steps.
  double pass_s_ = 0;                             ///< The last forward_backwards took so long.
};

}  // namespace heddle::serve::tinker
