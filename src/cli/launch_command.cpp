#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <csignal>
#include <fstream>
#include <map>
#include <memory>
#include <optional>
#include <ostream>
#include <random>
#include <set>
#include <span>
#include <thread>
#include <vector>

#include "assembly/from_config.h"
#include "base/chosen_directory.h"
#include "base/errors.h"
#include "base/files.h"
#include "base/log.h"
#include "base/siphash.h"
#include "base/text.h"
#include "base/threads.h"
#include "cli/application.h"
#include "cli/command.h"
#include "cli/continuation.h"
#include "cli/lost_rollouts.h"
#include "cli/rank_logs.h"
#include "cli/rank_processes.h"
#include "comm/launch_environment.h"
#include "comm/mesh.h"
#include "comm/reach.h"
#include "comm/refusal.h"
#include "comm/store.h"
#include "comm/world.h"
#include "config/adapters.h"
#include "config/config.h"
#include "device/device.h"

namespace heddle::cli {
namespace {

using Clock = std::chrono::steady_clock;

// After the first failure: time to end well, then to end at all. Together below ten seconds.
constexpr std::chrono::seconds kGrace{9};
constexpr std::chrono::milliseconds kPoll{20};
constexpr comm::Seconds kStoreTimeout{60}, kTry{1};

// Beyond this a number of processes is a slip of the finger.
constexpr std::int64_t kFewProcesses = 64, kProcessesPerCore = 16, kMostNodes = 100'000;

struct LaunchOptions {
  std::int64_t processes = 1;  ///< on this host
  std::int64_t nodes = 1, node_rank = 0;
  std::string master;
  std::string job_id;
  std::string log_directory;
  std::string secret_file;
  std::vector<std::string> command;
};

/// A secret that strangers do not know. Several hosts cannot agree on a random number before they
/// have met, and one that was told something else must get as far as to be told what differs.
std::string nonce_of(const LaunchOptions& options) {
  if (!options.job_id.empty()) return options.job_id;
  if (options.nodes > 1) return kNoJobId;
  std::random_device random;
  return fmt::format("{:08x}{:08x}{:08x}", random(), random(), random());
}

/// The secret that ranks show the store: random for one host; for several, a host's file says it.
std::string secret_of(const LaunchOptions& options) {
  if (!options.secret_file.empty()) return comm::read_secret(options.secret_file, "--secret-file");
  if (options.nodes > 1) {
    log::warning(
        "launch: without --secret-file, whoever reaches {} can take part in the job; give each "
        "host the same file, or a network of their own",
        options.master);
    return "";
  }
  const hash::Key128 key = hash::random_key();
  return fmt::format("{:02x}", fmt::join(key, ""));
}

void check(const LaunchOptions& options) {
  const auto fail = [](const std::string& message) { throw ConfigError("launch: " + message); };
  if (options.processes < 1) fail("--nproc must be at least 1");
  const std::int64_t most = std::max(kFewProcesses, kProcessesPerCore * available_cores());
  if (options.processes > most) {
    fail(fmt::format(
        "--nproc is {}: that many processes would stop this host, which has {} cores; expected {} "
        "at most, one for each device or few cores",
        options.processes, available_cores(), most));
  }
  if (options.nodes < 1 || options.nodes > kMostNodes)
    fail(fmt::format("--nnodes is {}: expected 1 to {}", options.nodes, kMostNodes));
  if (options.node_rank < 0 || options.node_rank >= options.nodes) {
    fail(fmt::format("--node-rank is {}, with --nnodes {} it must be 0 to {}", options.node_rank,
                     options.nodes, options.nodes - 1));
  }
  if (options.nodes > 1 && options.master.empty()) {
    fail("--nnodes above 1 needs --master HOST:PORT, the host of --node-rank 0");
  }
  if (options.command.empty()) fail("no command; write it after the options: -- sft run.yaml");
  const std::string& command = options.command.front();
  std::vector<std::string> launched = launched_command_names();
  if (std::ranges::find(launched, command) == launched.end()) {
    const std::string last = std::move(launched.back());
    launched.pop_back();
    fail(fmt::format("'{}' runs as one process; several ranks are for {} and {}", command,
                     text::join(launched, ", "), last));
  }
}

/// Each rank of a host has a device of its own. Throws ConfigError if there are fewer; of a host
/// that shows none, the ranks say why.
void require_devices(const config::DeviceName& first, std::int64_t processes) {
  if (first == config::DeviceName{}) return;
  std::string why_none;
  const std::string type(config::to_string(first.type));
  const std::int64_t count = std::ranges::count_if(
      device::accelerators(why_none),
      [&](const device::Accelerator& found) { return found.device.starts_with(type); });
  if (count == 0 || first.index + processes <= count) return;
  throw_error<ConfigError>(
      "launch: --nproc is {}, and this host has {} device(s) for ranks from {} on; start no more "
      "ranks than that, or set device=cpu",
      processes, std::max<std::int64_t>(0, count - first.index), config::to_string(first));
}

struct CheckedCommand {
  LostRollouts rollouts = {};   ///< Ranks that the job may lose.
  bool only_generates = false;  ///< For the trainers of another job.
};

/// Errors that every rank would find in the command's words and configuration are reported once,
/// before any is started. Throws ConfigError, FileError.
CheckedCommand check_command(const std::vector<std::string>& command, std::int64_t processes,
                             std::int64_t ranks) {
  std::vector<std::string> words;
  for (const std::string& word : std::span(command).subspan(1)) {
    if (word == "--help" || word == "-h") return {};
    if (!word.starts_with("-")) words.push_back(word);
  }
  // Single operators have no layout; each rank says so.
  if (command.front() == "bench" && std::ranges::find(words, "step") == words.end()) return {};
  config::RunConfig config;
  if (is_training_command(command.front())) {
    ConfigArguments split = split_config_arguments(words);
    const std::vector<std::string> own = settings_of_training(command.front());
    split.overrides.insert(split.overrides.begin(), own.begin(), own.end());
    const auto adapters =
        command.front() == "sft"
            ? config::load_adapters(split.file, split.overrides, assembly::usual_device())
            : std::vector<config::AdapterRun>();
    config = !adapters.empty()
                 ? adapters.front().config
                 : config::load(split.file, split.overrides, config::Completeness::kComplete,
                                assembly::usual_device());
  } else {
    // The device of score and generate is no word of a configuration.
    const bool is_bench = command.front() == "bench";
    std::erase_if(words, [&](const std::string& word) {
      return !word.starts_with("parallel.") && !(is_bench && word.starts_with("device"));
    });
    config = config::parse("", "command line", words, config::Completeness::kPartial,
                           is_bench ? assembly::usual_device() : config::DeviceName{});
  }
  require_devices(config.device.name, processes);
  assembly::require_layout(config, ranks);
  return {{config, ranks}, assembly::only_generates(config)};
}

/// Blocks the signals that the launcher hands on, and takes them one by one.
class SignalQueue {
 public:
  SignalQueue() {
    sigemptyset(&set_);
    for (const int number : {SIGINT, SIGTERM, SIGHUP, SIGCHLD}) sigaddset(&set_, number);
    sigprocmask(SIG_BLOCK, &set_, &before_);
  }
  ~SignalQueue() { sigprocmask(SIG_SETMASK, &before_, nullptr); }
  /// The next signal within `time`, 0 if there is none.
  int wait(std::chrono::milliseconds time) const {
    const timespec limit = {time.count() / 1000, time.count() % 1000 * 1'000'000};
    const int number = sigtimedwait(&set_, nullptr, &limit);
    return number > 0 ? number : 0;
  }

 private:
  sigset_t set_{}, before_{};
};

class Launch {
 public:
  explicit Launch(LaunchOptions options) : options_(std::move(options)) {}

  int run() {
    check(options_);
    comm::Endpoint master;
    if (!options_.master.empty()) {
      master = comm::parse_endpoint(options_.master, "--master");
      if (options_.nodes > 1 && master.port == 0) {
        throw_error<ConfigError>(
            "--master {}: a port that the system chooses would be known to host 0 alone; expected "
            "1 to 65535",
            options_.master);
      }
      comm::require_resolvable(master, "--master");
    }
    const std::string nonce = nonce_of(options_);
    secret_ = secret_of(options_);
    try {
      CheckedCommand checked = check_command(options_.command, options_.processes, ranks());
      rollouts_ = std::move(checked.rollouts);
      // The trainers' job may have been started in the same folder.
      if (checked.only_generates && options_.log_directory.empty())
        options_.log_directory = std::string(kLaunchLogDirectory) + "/rollout";
    } catch (const std::exception& error) {
      tell_other_hosts(master, nonce, error.what());
      throw;
    }
    files::make_chosen_directory(log_directory(), "--log-dir");
    std::optional<comm::Listener> listener;
    if (options_.node_rank == 0) {
      listener.emplace(listening_place(master));
      master = options_.nodes > 1
                   ? comm::make_endpoint(master.address(), listener->port(), "--master")
                   : listener->local_endpoint();
    }
    const SignalQueue signals;  // before the first child, so that no SIGCHLD is missed
    if (const int signal = start_ranks(master, nonce, signals)) {
      log::error("ended by signal {} ({}) while the ranks were started", signal, strsignal(signal));
      return 128 + signal;
    }
    open_logs();
    // The store lives here and not in a rank: it outlives whatever kills one.
    std::optional<comm::Store> store;
    if (listener) {
      store = comm::Store::serve(std::move(*listener), kStoreTimeout, secret_)
                  .below(comm::kStorePrefix);
      store->set(comm::kJobKey, nonce);
    }
    master_ = master;
    rollouts_.set_place(master, secret_);
    const int status = watch(signals, store);
    if (store && options_.nodes > 1) wait_for_other_hosts(signals, *store);
    return status;
  }

 private:
  /// The ranks of other hosts read in the store why this one's have ended. A signal ends the wait.
  static void wait_for_other_hosts(const SignalQueue& signals, const comm::Store& store) {
    const auto deadline = Clock::now() + comm::kLeaving;
    try {
      while (Clock::now() < deadline && !store.find(comm::kEmptyKey)) {
        const int signal = signals.wait(kPoll);
        if (signal != 0 && signal != SIGCHLD) return;
      }
    } catch (const CommError&) {
      // Then they cannot read it either.
    }
  }

  std::int64_t ranks() const { return options_.nodes * options_.processes; }
  std::int64_t first_rank() const { return options_.node_rank * options_.processes; }
  std::filesystem::path log_directory() const {
    return options_.log_directory.empty() ? kLaunchLogDirectory : options_.log_directory;
  }
  std::filesystem::path log_of(std::int64_t rank) const {
    return log_directory() / fmt::format("rank-{}.log", rank);
  }

  /// One host: its loopback address, or what --master says. Several: the address that --master
  /// says, or, if that is a name, which may mean another address here than elsewhere, all.
  comm::Endpoint listening_place(const comm::Endpoint& master) const {
    if (options_.nodes > 1 && master.kind == comm::Endpoint::Kind::kName) {
      comm::Endpoint everywhere;
      everywhere.port = master.port;
      return everywhere;
    }
    if (options_.master.empty()) return comm::make_endpoint("127.0.0.1", 0, "loopback");
    return master;
  }

  /// That this host will not come. Host 0 has nobody to tell yet.
  void tell_other_hosts(const comm::Endpoint& master, const std::string& nonce,
                        const std::string& message) const {
    if (options_.node_rank == 0) return;
    comm::LaunchEnvironment environment;
    environment.rank = first_rank();
    environment.world = ranks();
    environment.master = master;
    environment.nonce = nonce;
    environment.launcher = comm::kHeddleLaunch;
    environment.secret = secret_;
    comm::refuse_to_join(environment, message, options_.processes);
  }

  /// Returns the signal that came while it did, 0 if none. Starts no more once a rank has ended.
  int start_ranks(const comm::Endpoint& master, const std::string& nonce,
                  const SignalQueue& signals) {
    for (std::int64_t local = 0; local < options_.processes; ++local) {
      const int signal = signals.wait(std::chrono::milliseconds(0));
      if (signal != 0 && signal != SIGCHLD) return signal;
      if ((early_end_ = ranks_.poll())) return 0;
      const std::int64_t rank = first_rank() + local;
      std::map<std::string, std::string> environment = {
          {"RANK", std::to_string(rank)},
          {"WORLD_SIZE", std::to_string(ranks())},
          {"LOCAL_RANK", std::to_string(local)},
          {"LOCAL_WORLD_SIZE", std::to_string(options_.processes)},
          {"MASTER_ADDR", master.address()},
          {"MASTER_PORT", std::to_string(master.port)},
          {comm::kNonceVariable, nonce},
          {comm::kSecretVariable, secret_}};
      keep_earlier(log_of(rank));
      files::write_atomically(log_of(rank), "");
      if (rank == 0) environment[comm::kLogVariable] = log_of(rank).string();
      ranks_.start(rank, options_.command, environment, rank == 0 ? "" : log_of(rank));
    }
    return 0;
  }

  /// To be read whatever name a later start gives them.
  void open_logs() {
    for (std::int64_t rank = first_rank(); rank < first_rank() + options_.processes; ++rank) {
      std::ifstream log(log_of(rank));
      if (log) logs_[rank] = std::move(log);
    }
  }

  /// Until the last rank has ended.
  int watch(const SignalQueue& signals, const std::optional<comm::Store>& store) {
    std::optional<RankEnd> first;
    bool is_reported = false;
    Clock::time_point deadline = Clock::time_point::max();
    const auto take = [&](const RankEnd& end) {
      if (end.status != 0 && !first && !rollouts_.survives(end)) {
        first = end;
        deadline = Clock::now() + kGrace;
      }
      if (end.signal != 0) speak_for(end, first.has_value(), store);
    };
    if (early_end_) take(*early_end_);
    while (!ranks_.empty()) {
      const int signal = signals.wait(kPoll);
      if (signal != 0 && signal != SIGCHLD) ranks_.signal_all(signal == SIGHUP ? SIGTERM : signal);
      // Ranks that a killed one leaves alone may have ended as well since the last look.
      std::vector<RankEnd> ends;
      while (const auto end = ranks_.poll()) ends.push_back(*end);
      std::ranges::stable_partition(ends, [](const RankEnd& end) { return end.signal != 0; });
      for (const RankEnd& end : ends) take(end);
      for (const std::int64_t rank : rollouts_.given_up()) ranks_.signal(rank, SIGKILL);
      // The others' messages show whether it is one rank's failure or a mistake that all found.
      const bool is_over = ranks_.empty() || Clock::now() >= deadline;
      if (first && !is_reported && (is_over || first->signal != 0)) {
        report(*first, store);
        is_reported = true;
      }
      if (Clock::now() < deadline) continue;
      ranks_.signal_all(SIGKILL);
      deadline = Clock::time_point::max();
    }
    if (first && !is_reported) report(*first, store);
    if (!first) rollouts_.report();
    return first ? first->status : 0;
  }

  /// Tells the job what a killed rank could not: why the others lost it, and that it is gone.
  void speak_for(const RankEnd& killed, bool is_failure, const std::optional<comm::Store>& own) {
    try {
      const comm::Store store =
          own ? *own : comm::Store::connect(master_, kTry, secret_).below(comm::kStorePrefix);
      if (is_failure) {
        store.set_if_absent(comm::kFailureKey,
                            fmt::format("{} it was ended by signal {} ({})", killed.rank,
                                        killed.signal, strsignal(killed.signal)));
      }
      comm::LaunchEnvironment environment;
      environment.rank = killed.rank;
      environment.world = ranks();
      comm::count_out(store, environment);
    } catch (const CommError&) {
      // The others find its connections closed.
    }
  }

  /// Prints why the job ends: the failure that the ranks agree on, else how this one ended.
  void report(const RankEnd& end, const std::optional<comm::Store>& store) {
    std::set<std::string> said;
    for (auto& [rank, log] : logs_) said.insert(last_error_line(log));
    if (end.signal == 0 && said.size() == 1 && !said.begin()->empty()) {
      log::error("{}", *said.begin());
      return;
    }
    std::optional<std::string> failure;
    try {
      if (store) failure = store->find(comm::kFailureKey);
    } catch (const CommError&) {
    }
    if (end.signal != 0) {
      log::error("rank {} was ended by signal {} ({})", end.rank, end.signal,
                 strsignal(end.signal));
    } else if (failure) {
      const auto space = failure->find(' ');
      log::error("rank {}: {}", failure->substr(0, space), failure->substr(space + 1));
    } else {
      const std::string line = last_error_line(logs_.at(end.rank));
      log::error("rank {} ended with status {}{}", end.rank, end.status,
                 line.empty() ? "" : ": " + line);
    }
    log::info("the other ranks end now; what each said is in {}", log_directory().string());
  }

  LaunchOptions options_;
  std::string secret_;
  comm::Endpoint master_;  ///< Where the job's store is.
  RankProcesses ranks_;
  LostRollouts rollouts_;
  std::map<std::int64_t, std::ifstream> logs_;
  std::optional<RankEnd> early_end_;  ///< End of a rank before all were started.
};

}  // namespace

std::vector<std::string> launched_command_names() {
  std::vector<std::string> names = training_command_names();
  for (const char* other : {"score", "generate", "bench"}) names.emplace_back(other);
  return names;
}

void add_launch_command(CLI::App& app, Action& action) {
  auto options = std::make_shared<LaunchOptions>();
  CLI::App* command = app.add_subcommand(
      "launch", "Run training, generate, score or bench on several ranks of this host");
  command->add_option("--nproc", options->processes, "Ranks of this host")->type_name("N");
  command->add_option("--nnodes", options->nodes, "Hosts of the job")->type_name("M");
  command->add_option("--node-rank", options->node_rank, "Number of this host, from 0")
      ->type_name("R");
  command->add_option("--master", options->master, "Where host 0 listens; one host needs none")
      ->type_name("HOST:PORT");
  command->add_option("--job-id", options->job_id, "Tells the ranks of this job from strangers")
      ->type_name("TEXT");
  command
      ->add_option("--secret-file", options->secret_file,
                   "Several hosts: a file with the job's secret, the same on each")
      ->type_name("FILE");
  command->add_option("--log-dir", options->log_directory, "One file per rank (heddle-logs)")
      ->type_name("DIR");
  command->add_option("command", options->command, "The command of every rank")
      ->type_name("-- sft CONFIG.yaml [key=value ...]");
  command->positionals_at_end();
  command->prefix_command();
  command->footer(
      "The product of parallel.* must be the number of ranks; parallel.dp=auto takes what is "
      "left.\n"
      "Rank 0 writes to this terminal, every rank to its file. When one rank fails, its message "
      "is\n"
      "printed, the others end within 10 s, and the exit status is that rank's.\n"
      "Rollouts of rl that are killed or freeze are left behind while others are left.\n"
      "\n"
      "Examples:\n"
      "  heddle launch --nproc 4 -- sft run.yaml parallel.fsdp=4\n"
      "  heddle launch --nproc 8 --nnodes 2 --node-rank 0 --master node1:29500 -- sft run.yaml");
  command->callback([command, options, &action] {
    for (const std::string& word : command->remaining()) {
      if (word != "--") options->command.push_back(word);
    }
    action = [options](const Session&) { return Launch(*options).run(); };
  });
}

}  // namespace heddle::cli
