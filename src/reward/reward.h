#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "reward/combine.h"

namespace heddle::reward {

using Json = nlohmann::ordered_json;

/// A turn before the one that is judged.
struct PastTurn {
  std::string completion, observation;
};

/// Questions to a judge. Environments alone are asked for more than scores.
enum class Ask {
  kScore,
  kOpening,  ///< An episode begins: its prompt, if it is not the row's.
  kClosing,  ///< It is over; nothing is answered.
};

/// One completion to be judged. Strings are UTF-8; a completion may hold anything that a model
/// prints.
struct Sample {
  std::string id;  ///< Names the sample in messages and in answers of a process, and its episode.
  std::string place = {};  ///< Names its row for messages: "prompts.jsonl:7".
  std::int64_t group = 0;  ///< Samples of one prompt share it.
  std::string prompt = {}, completion = {};
  std::vector<PastTurn> turns = {};       ///< Turns before it, in their order.
  std::vector<std::int64_t> tokens = {};  ///< For the completion; empty: verifiers count bytes.
  Json truth = nullptr;                   ///< The row's answer.
  Json meta = nullptr;                    ///< Whatever else the row brings.
  /// The completion as a message of the chat template, with reasoning and calls of tools apart.
  Json message = nullptr;
  bool is_truncated = false;  ///< The completion ended at the limit of its length.
  Ask ask = Ask::kScore;
  std::uint64_t seed = 0;  ///< kOpening: episodes of a prompt have the same.
};

struct Score {
  double reward = 0;
  std::map<std::string, double> parts = {};  ///< By name, before weights.
  std::optional<std::string> error = {};     ///< Set: there is no reward, and why.
  /// Set: the policy goes on after this text with another turn, whose reward is added.
  std::optional<std::string> observation = {};
  /// Set in place of an observation: messages that the chat template puts there.
  Json messages = nullptr;
  bool is_truncated = false;  ///< The episode ended at a limit of its environment.
  /// The episode was lost with its worker, which another one ended: it may be played anew.
  bool is_lost = false;
  std::vector<std::string> unread = {};  ///< Keys of the answer that nothing reads.

  bool goes_on() const { return observation || !messages.is_null(); }
};

/// Judges completions. Safe to call from one thread at a time.
class Reward {
 public:
  virtual ~Reward() = default;
  /// One score for each sample, in their order. A sample that cannot be judged has an error; throws
  /// only where nothing can be (ConfigError: options; Error: the process cannot be started).
  virtual std::vector<Score> score(std::span<const Sample> samples) = 0;
};

/// A built-in verifier and its share of the reward.
struct Part {
  std::string verifier;  ///< See verifier_names() in reward/verifiers.h.
  double weight = 1;
  Json parameters = Json::object();
  std::string name = {};  ///< In Score::parts; empty: the verifier's.
};

/// Workers of the user that read samples and write scores, one JSON object a line.
struct ProcessOptions {
  std::string key = "rl.reward.command";  ///< Names the program in messages.
  std::vector<std::string> command = {};  ///< Program and arguments. Empty: none.
  std::int64_t workers = 2;
  std::size_t first_worker = 0;   ///< Its number in messages.
  double timeout_s = 30;          ///< For one sample, from the moment it is written.
  double start_timeout_s = 60;    ///< For the first answer of a new worker, besides `timeout_s`.
  std::int64_t memory_bytes = 0;  ///< Limit of one worker's address space; 0: none.
  std::int64_t cpu_seconds = 0;   ///< Limit of one worker's processor time; 0: none.
  std::optional<double> failed = {};  ///< Reward of what failed twice; none: an error.
  std::stop_token stop = {};          ///< Once it is asked for, nothing is waited for any more.
};

struct HttpOptions {
  std::string url;    ///< Empty: none.
  std::string token;  ///< Sent as a bearer token unless empty.
  double timeout_s = 30;
  std::int64_t batch = 32;       ///< Samples in one request.
  std::int64_t concurrency = 8;  ///< Requests at once.
  std::int64_t retries = 4;      ///< After 429, 5xx or a broken connection.
  double backoff_s = 0.5;        ///< Before the first retry; doubles each time.
  std::optional<double> failed = {};
  std::stop_token stop = {};
};

/// One source of rewards: built-in verifiers, a process, a server, or an environment.
struct RewardOptions {
  std::vector<Part> verifiers;
  Combine combine = Combine::kSum;
  ProcessOptions process;
  HttpOptions http;
  ProcessOptions environment;  ///< Workers that keep the state of episodes.
};

/// Throws ConfigError unless exactly one source is named and its parameters are right.
std::unique_ptr<Reward> make_reward(const RewardOptions& options);

}  // namespace heddle::reward
