#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "serve/http/server.h"
#include "serve/store/database.h"

namespace heddle::serve::tinker {

/// Before the kind, in the database, of a request that failed and dropped the run's gradients.
inline constexpr const char* kDropped = "dropped_";

/// Outcome of an operation that a client was promised.
struct Outcome {
  /// JSON text, or which protobuf message. The database keeps the numbers.
  enum class Form : std::int64_t { kJson = 0, kForwardBackward = 1, kSample = 2 };

  bool is_failed = false;
  Form form = Form::kJson;
  std::string bytes;  ///< For a failure the object {error, category}.
  /// A failure after which the gradients of the run since its last step are gone.
  bool drops_gradients = false;

  bool is_proto() const { return form != Form::kJson; }
  static Outcome json(std::string text) { return {false, Form::kJson, std::move(text), false}; }
  static Outcome proto(Form form, std::string bytes) {
    return {false, form, std::move(bytes), false};
  }
  /// `category`: "user" for a wrong request, "server" for anything else.
  static Outcome failure(const std::string& message, const std::string& category);
};

/// Why an operation has not begun, as the SDK tells its user.
struct QueueState {
  enum class Kind { kActive, kPausedCapacity, kPausedRateLimit };
  Kind kind = Kind::kActive;
  std::string reason = {};  ///< Empty for kActive.
};

/// Long operations: a submission is answered with a promise, whose outcome the client polls for.
/// All calls are made on the loop's thread.
class Promises {
 public:
  struct Options {
    double poll_s = 25;                    ///< A poll is held so long at most.
    std::size_t metadata_bytes = 1 << 20;  ///< Larger results are announced before they are sent.
    double kept_s = 24 * 3600;             ///< An outcome that nobody fetches.
    double fetched_s = 300;  ///< A sample's that was fetched, as its client may ask again.
  };
  Promises(Server& server, Database& database, const Options& options);

  /// Identity of a submission. A second one of the same place and hash gets the first one's
  /// promise.
  struct Submission {
    std::string tenant;
    std::string owner;      ///< Run or sampling session, or what else numbers its requests.
    std::int64_t seq = -1;  ///< -1: the client does not number; every submission is a new one.
    std::string kind;
    std::string hash;  ///< Hash of the body.
    /// Its outcome survives the server. Sampling is not: the client sends the request again.
    bool is_durable = true;
    std::string body = {};  ///< Kept for a replay after a crash; empty: not kept.
  };
  struct Promise {
    std::string id;
    std::string answer;  ///< JSON text that the submission is answered with.
    bool is_new = true;
  };
  /// `answer`: of the promise with this id. Throws HttpError 409 where the place was taken by
  /// another body.
  Promise make(const Submission& submission,
               const std::function<std::string(const std::string& id)>& answer);

  /// make() of a request that is refused: the promise has failed when it is made.
  Promise make_failed(const Submission& submission,
                      const std::function<std::string(const std::string& id)>& answer,
                      const std::string& message);
  /// Fails the promise of this place unless it has an outcome.
  void fail(const std::string& owner, std::int64_t seq, const std::string& message);

  /// Takes a promise back whose entry in the database was taken back.
  void forget(const std::string& id) { erase(id); }

  /// Outcome of an unfinished promise, on the disk alone.
  void store(const std::string& id, const Outcome& outcome);
  /// Outcome of an unfinished promise that is on the disk, to those who wait for it.
  void tell(const std::string& id, const Outcome& outcome);
  void finish(const std::string& id, const Outcome& outcome);
  /// finish() of several, for which the host waits for the disk once. `enter`, before it, may
  /// change outcomes; its entries in the database are there with them or not at all.
  void finish(const std::vector<std::pair<std::string, const Outcome*>>& finished,
              const std::function<void()>& enter);
  /// Called if the client cancels the promise before its end, which the action brings about.
  void on_cancel(const std::string& id, std::function<void()> action);

  /// Asked for polls that end before the promise does.
  void on_wait(const std::string& id, std::function<QueueState()> state);

  /// POST retrieve_future, retrieve_futures, cancel_future.
  void retrieve(const Request& request, const Responder& responder);
  void retrieve_many(const Request& request, const Responder& responder);
  void cancel(const Request& request, const Responder& responder);

  /// Forgets outcomes of samples of owners whose names begin so.
  void forget_samples(const std::string& owners);

  /// Polls are answered at once from here on.
  void drain();
  /// Forgets outcomes that are too old.
  void sweep();
  std::int64_t pending() const;

 private:
  struct Poll {
    std::int64_t number;
    Responder responder;
    bool takes_proto, allows_metadata;
  };
  struct Entry {
    std::string tenant, owner, answer, hash;
    std::int64_t seq = -1;
    bool is_durable = true, is_finished = false;
    Outcome outcome = {};
    std::int64_t cursor = 0;  ///< Time of the end, among its owner's; microseconds.
    double fetched = 0;       ///< Time at which the outcome was sent; 0: not yet.
    std::vector<Poll> polls = {};
    std::function<void()> on_cancel = {};
    std::function<QueueState()> queue_state = {};  ///< Empty: active.
  };
  /// A poll for any promise of a sampling session.
  struct OwnerPoll {
    std::int64_t number;
    std::int64_t first_seq, last_seq, cursor;
    Responder responder;
  };

  Entry* stored(const std::string& id);
  /// Reads the entry of a place, if the database has one.
  void load_place(const std::string& owner, std::int64_t seq);
  void load(const std::string& id);
  /// Sends the entry's outcome, or says how large it is.
  void give(Entry& entry, const Poll& poll) const;
  /// Answer to a poll whose promise has no outcome.
  std::string try_again(const std::string& id) const;
  std::string completions(const std::string& owner, const OwnerPoll& poll);
  void acknowledge(const std::string& owner, const std::string& tenant,
                   const std::vector<std::string>& ids);
  void erase(const std::string& id);
  std::int64_t next_cursor();

  Server& server_;
  Database& database_;
  Options options_;
  std::unordered_map<std::string, Entry> entries_;
  std::map<std::pair<std::string, std::int64_t>, std::string> by_place_;  ///< For entries_.
  std::map<std::string, std::vector<OwnerPoll>> owner_polls_;
  std::int64_t last_cursor_ = 0, next_poll_ = 0;
  bool is_draining_ = false;
};

}  // namespace heddle::serve::tinker
