#include <unistd.h>

#include <CLI/CLI.hpp>
#include <csignal>
#include <fstream>
#include <memory>
#include <optional>
#include <ostream>
#include <random>
#include <thread>

#include "base/chosen_directory.h"
#include "base/errors.h"
#include "base/files.h"
#include "base/hash.h"
#include "base/log.h"
#include "cli/application.h"
#include "cli/command.h"
#include "cli/rank_processes.h"
#include "comm/launch_environment.h"
#include "comm/store.h"
#include "comm/world.h"

namespace heddle::cli {
namespace {

using Clock = std::chrono::steady_clock;

// After the first failure: time to end well, then to end at all. Together below ten seconds.
constexpr std::chrono::seconds kGrace{5};
constexpr std::chrono::milliseconds kPoll{20};
constexpr comm::Seconds kStoreTimeout{60};

struct LaunchOptions {
  std::int64_t processes = 1;  ///< on this host
  std::int64_t nodes = 1, node_rank = 0;
  std::string master;
  std::string job_id;
  std::string log_directory;
  std::vector<std::string> command;
};

/// What strangers do not know. Several hosts cannot agree on a random number before they have met:
/// theirs follows from what they were all told.
std::string nonce_of(const LaunchOptions& options) {
  if (!options.job_id.empty()) return options.job_id;
  if (options.nodes > 1) {
    hash::Hasher hasher;
    hasher.add(options.master).add(std::to_string(options.nodes * options.processes));
    for (const std::string& word : options.command) hasher.add(word);
    return hasher.hex();
  }
  std::random_device random;
  return fmt::format("{:08x}{:08x}{:08x}", random(), random(), random());
}

void check(const LaunchOptions& options) {
  const auto fail = [](const std::string& message) { throw ConfigError("launch: " + message); };
  if (options.processes < 1) fail("--nproc must be at least 1");
  if (options.nodes < 1) fail("--nnodes must be at least 1");
  if (options.node_rank < 0 || options.node_rank >= options.nodes) {
    fail(fmt::format("--node-rank is {}, with --nnodes {} it must be 0 to {}", options.node_rank,
                     options.nodes, options.nodes - 1));
  }
  if (options.nodes > 1 && options.master.empty()) {
    fail("--nnodes above 1 needs --master HOST:PORT, the host of --node-rank 0");
  }
  if (options.command.empty()) fail("no command; write it behind the options: -- sft run.yaml");
  const std::string& command = options.command.front();
  if (command != "sft" && command != "pt" && command != "score" && command != "bench") {
    fail(fmt::format("'{}' runs as one process; several ranks are for sft, pt, score and bench",
                     command));
  }
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

std::string last_error_line(const std::filesystem::path& log) {
  std::ifstream file(log);
  std::string line, found;
  while (std::getline(file, line)) {
    const auto at = line.find("error: ");
    if (at != std::string::npos) found = line.substr(at + 7);
  }
  return found;
}

class Launch {
 public:
  explicit Launch(LaunchOptions options) : options_(std::move(options)) {}

  int run() {
    check(options_);
    files::make_chosen_directory(log_directory(), "--log-dir");
    comm::Endpoint master;
    std::optional<comm::Listener> listener;
    if (!options_.master.empty()) master = comm::parse_endpoint(options_.master, "--master");
    if (options_.node_rank == 0) {
      listener.emplace(master.port);
      master = options_.nodes > 1
                   ? comm::make_endpoint(master.address(), listener->port(), "--master")
                   : listener->local_endpoint();
    }
    const SignalQueue signals;  // before the first child, so that no SIGCHLD is missed
    const std::string nonce = nonce_of(options_);
    start_ranks(master, nonce);
    // The store lives here and not in a rank: it outlives whatever kills one.
    std::optional<comm::Store> store;
    if (listener) {
      store = comm::Store::serve(std::move(*listener), kStoreTimeout).below(comm::kStorePrefix);
      store->set(comm::kJobKey, nonce);
    }
    return watch(signals, store);
  }

 private:
  std::filesystem::path log_directory() const {
    return options_.log_directory.empty() ? kLaunchLogDirectory : options_.log_directory;
  }
  std::filesystem::path log_of(std::int64_t rank) const {
    return log_directory() / fmt::format("rank-{}.log", rank);
  }

  void start_ranks(const comm::Endpoint& master, const std::string& nonce) {
    for (std::int64_t local = 0; local < options_.processes; ++local) {
      const std::int64_t rank = options_.node_rank * options_.processes + local;
      std::map<std::string, std::string> environment = {
          {"RANK", std::to_string(rank)},
          {"WORLD_SIZE", std::to_string(options_.nodes * options_.processes)},
          {"LOCAL_RANK", std::to_string(local)},
          {"LOCAL_WORLD_SIZE", std::to_string(options_.processes)},
          {"MASTER_ADDR", master.address()},
          {"MASTER_PORT", std::to_string(master.port)},
          {comm::kNonceVariable, nonce}};
      if (rank == 0) {
        files::write_atomically(log_of(rank), "");
        environment[comm::kLogVariable] = log_of(rank).string();
      }
      ranks_.start(rank, options_.command, environment, rank == 0 ? "" : log_of(rank));
    }
  }

  /// Until the last rank has ended.
  int watch(const SignalQueue& signals, const std::optional<comm::Store>& store) {
    std::optional<RankEnd> first;
    Clock::time_point deadline = Clock::time_point::max();
    while (!ranks_.empty()) {
      const int signal = signals.wait(kPoll);
      if (signal != 0 && signal != SIGCHLD) ranks_.signal_all(signal == SIGHUP ? SIGTERM : signal);
      while (const auto end = ranks_.poll()) {
        if (end->status == 0 || first) continue;
        first = end;
        deadline = Clock::now() + kGrace;
        report(*end, store);
      }
      if (Clock::now() < deadline) continue;
      ranks_.signal_all(SIGKILL);
      deadline = Clock::time_point::max();
    }
    return first ? first->status : 0;
  }

  /// Prints why the job ends: the failure that the ranks agree on, else how this one ended.
  void report(const RankEnd& end, const std::optional<comm::Store>& store) const {
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
      const std::string line = last_error_line(log_of(end.rank));
      log::error("rank {} ended with status {}{}", end.rank, end.status,
                 line.empty() ? "" : ": " + line);
    }
    log::info("the other ranks end now; what each said is in {}", log_directory().string());
  }

  LaunchOptions options_;
  RankProcesses ranks_;
};

}  // namespace

void add_launch_command(CLI::App& app, Action& action) {
  auto options = std::make_shared<LaunchOptions>();
  CLI::App* command =
      app.add_subcommand("launch", "Run sft, pt, score or bench on several ranks of this host");
  command->add_option("--nproc", options->processes, "Ranks of this host")->type_name("N");
  command->add_option("--nnodes", options->nodes, "Hosts of the job")->type_name("M");
  command->add_option("--node-rank", options->node_rank, "Number of this host, from 0")
      ->type_name("R");
  command->add_option("--master", options->master, "Where host 0 listens; one host needs none")
      ->type_name("HOST:PORT");
  command->add_option("--job-id", options->job_id, "Tells the ranks of this job from strangers")
      ->type_name("TEXT");
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
