#include "comm/launch_environment.h"

#include <sys/stat.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <string_view>
#include <utility>

#include "base/errors.h"
#include "base/files.h"
#include "base/hash.h"
#include "base/secret.h"
#include "base/text.h"

namespace heddle::comm {
namespace {

/// Names of the variables in which a launcher says where a process stands.
struct Spelling {
  const char* launcher;
  const char *rank, *world, *local_rank, *local_world;
  const char* job;  ///< Identifies the job.
};

/// Ten times the largest jobs there are: what is kept for each rank stays small.
constexpr std::int64_t kMostRanks = 1 << 20;

constexpr Spelling kTorchrun = {
    "torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"};
constexpr Spelling kSlurm = {"Slurm",         "SLURM_PROCID",          "SLURM_NTASKS",
                             "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE", "SLURM_JOB_ID"};
constexpr Spelling kOpenMpi = {"OpenMPI",
                               "OMPI_COMM_WORLD_RANK",
                               "OMPI_COMM_WORLD_SIZE",
                               "OMPI_COMM_WORLD_LOCAL_RANK",
                               "OMPI_COMM_WORLD_LOCAL_SIZE",
                               "PMIX_NAMESPACE"};
constexpr Spelling kPmi = {"PMI",      "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS",
                           "PMI_JOBID"};

class Reader {
 public:
  Reader(const Getenv& getenv, const Spelling& names) : getenv_(getenv), names_(names) {}

  std::optional<std::int64_t> number(const char* name) const {
    const auto text = getenv_(name);
    if (!text) return std::nullopt;
    std::int64_t value = 0;
    const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), value);
    if (error != std::errc() || end != text->data() + text->size() || value < 0) {
      throw_error<ConfigError>("{}: '{}' is no count (environment of {})", name, *text,
                               names_.launcher);
    }
    return value;
  }

  std::int64_t required(const char* name) const {
    if (const auto value = number(name)) return *value;
    throw_error<ConfigError>("{} is not set, though {} is (environment of {})", name, names_.rank,
                             names_.launcher);
  }

  /// `local_world`: the ranks of this host, where the launcher says it in another way.
  LaunchEnvironment place(std::optional<std::int64_t> local_world = {}) const {
    LaunchEnvironment e;
    e.launcher = names_.launcher;
    e.rank = required(names_.rank);
    e.world = required(names_.world);
    if (!local_world) local_world = number(names_.local_world);
    e.local_world = local_world.value_or(1);
    e.local_rank =
        number(names_.local_rank).value_or(e.rank % std::max<std::int64_t>(1, e.local_world));
    if (e.world > kMostRanks || e.local_world > e.world) {
      throw_error<ConfigError>(
          "{}={}, {} of them on this host: expected at most {} (environment of {})", names_.world,
          e.world, e.local_world, kMostRanks, names_.launcher);
    }
    if (e.world < 1 || e.rank >= e.world) {
      throw_error<ConfigError>("{}={} with {}={}: the rank must be below the number of ranks",
                               names_.rank, e.rank, names_.world, e.world);
    }
    return e;
  }

 private:
  const Getenv& getenv_;
  const Spelling& names_;
};

/// A port from the job's name, the same on every rank, outside the range that systems give out.
std::uint16_t port_of(const std::string& job) {
  const std::string digest = hash::Hasher().append(job).hex();
  return static_cast<std::uint16_t>(15000 + std::stoul(digest.substr(0, 8), nullptr, 16) % 10000);
}

/// MASTER_ADDR and MASTER_PORT, else `host` and a port that follows from the job.
Endpoint master_of(const Getenv& getenv, const std::string& host, const std::string& job) {
  const auto address = getenv("MASTER_ADDR"), port = getenv("MASTER_PORT");
  return make_endpoint(address.value_or(host),
                       port ? parse_port(*port, "MASTER_PORT") : port_of(job),
                       address ? "MASTER_ADDR" : "host of rank 0 (MASTER_ADDR can name it)");
}

LaunchEnvironment from_torchrun(const Getenv& getenv) {
  LaunchEnvironment e = Reader(getenv, kTorchrun).place();
  if (e.world == 1) return e;
  for (const char* name : {"MASTER_ADDR", "MASTER_PORT"}) {
    if (!getenv(name)) {
      throw_error<ConfigError>("{} is not set, though WORLD_SIZE is {} (environment of torchrun)",
                               name, e.world);
    }
  }
  e.master = master_of(getenv, "", "");
  if (const auto nonce = getenv(kNonceVariable)) {
    e.launcher = kHeddleLaunch;
    e.nonce = *nonce;
    return e;
  }
  // Under torchrun its agent already serves the port; other programs only set the variables.
  e.announces_job = e.rank == 0;
  e.has_agent_store = getenv("TORCHELASTIC_USE_AGENT_STORE").value_or("") == "True";
  e.serves_store = e.rank == 0 && !e.has_agent_store;
  e.nonce = getenv(kTorchrun.job).value_or("none") + "/" +
            getenv("TORCHELASTIC_RESTART_COUNT").value_or("0");
  return e;
}

/// The ranks of this host as Slurm tells them of every host. That of the step comes first, as a
/// step may have fewer than the job asks for; the job's list stands where both other variables are
/// missing.
std::optional<std::int64_t> slurm_local_world(const Getenv& getenv) {
  const char* variable = "SLURM_STEP_TASKS_PER_NODE";
  auto list = getenv(variable);
  if (!list && !getenv(kSlurm.local_world)) list = getenv(variable = "SLURM_TASKS_PER_NODE");
  if (!list) return std::nullopt;
  return slurm_tasks_of_node(variable, *list, Reader(getenv, kSlurm).number("SLURM_NODEID"));
}

/// first_slurm_host() of a list that stands in `variable`.
std::string first_host(const std::string& node_list, const std::string& variable) {
  std::string host;
  for (std::size_t at = 0; at < node_list.size() && node_list[at] != ',';) {
    if (node_list[at] != '[') {
      host += node_list[at++];
      continue;
    }
    const auto close = node_list.find(']', at);
    if (close == std::string::npos) {
      throw_error<ConfigError>("{}: '{}' has no closing bracket; MASTER_ADDR can name the host",
                               variable, node_list);
    }
    host += node_list.substr(at + 1, std::min(close, node_list.find_first_of(",-", at)) - at - 1);
    at = close + 1;
  }
  return host;
}

/// One rank that trains alone beside others that do the same is found too late.
void refuse_half_a_launch(const Getenv& getenv) {
  const bool has_rank = getenv(kTorchrun.rank).has_value();
  const auto world = getenv(kTorchrun.world);
  if (has_rank == world.has_value() || world == "1") return;
  throw_error<ConfigError>(
      "{} is set and {} is not: a launcher sets both (environment of torchrun); unset it to run as "
      "one process",
      has_rank ? kTorchrun.rank : kTorchrun.world, has_rank ? kTorchrun.world : kTorchrun.rank);
}

LaunchEnvironment from_scheduler(const Getenv& getenv, const Spelling& names,
                                 const std::string& host,
                                 std::optional<std::int64_t> local_world = {}) {
  LaunchEnvironment e = Reader(getenv, names).place(local_world);
  if (e.world == 1) return e;
  const std::string job = getenv(names.job).value_or("none");
  if (host.empty() && !getenv("MASTER_ADDR")) {
    throw_error<ConfigError>(
        "MASTER_ADDR is not set: {} started {} ranks on several hosts, name that of rank 0 in it",
        names.launcher, e.world);
  }
  e.nonce = job + "." + getenv("SLURM_STEP_ID").value_or("0");
  e.master = master_of(getenv, host, e.nonce);
  e.serves_store = e.announces_job = e.rank == 0;
  return e;
}

}  // namespace

std::string first_slurm_host(const std::string& node_list) {
  return first_host(node_list, "SLURM_STEP_NODELIST");
}

std::int64_t slurm_tasks_of_node(const std::string& variable, const std::string& list,
                                 std::optional<std::int64_t> node) {
  const auto fail = [&](const std::string& problem) {
    throw_error<ConfigError>("{}: '{}' {} (environment of Slurm)", variable, list, problem);
  };
  const auto count = [&](std::string_view digits) {
    std::int64_t value = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
    if (error != std::errc() || end != digits.data() + digits.size() || value < 1)
      fail("is no list of counts such as 4(x2),3");
    return value;
  };
  std::int64_t nodes = 0, first = 0;
  std::optional<std::int64_t> found;
  bool is_same_everywhere = true;
  for (const std::string& run : text::split(list, ',')) {
    const auto open = run.find("(x");
    const std::int64_t tasks = count(std::string_view(run).substr(0, open));
    std::int64_t repeats = 1;
    if (open != std::string::npos) {
      if (run.back() != ')') fail("is no list of counts such as 4(x2),3");
      repeats = count(std::string_view(run).substr(open + 2, run.size() - open - 3));
    }
    if (nodes == 0) first = tasks;
    is_same_everywhere = is_same_everywhere && tasks == first;
    if (node && *node >= nodes && *node - nodes < repeats) found = tasks;
    nodes += repeats;
  }
  if (found) return *found;
  if (node) fail(fmt::format("is of {} hosts, and SLURM_NODEID is {}", nodes, *node));
  if (!is_same_everywhere) fail("differs from host to host, and SLURM_NODEID is not set");
  return first;
}

static_assert(kSecretVariable == text::kJobSecretVariable);

std::string read_secret(const std::string& file, const std::string& what) {
  struct stat status {};
  if (stat(file.c_str(), &status) == 0 && (status.st_mode & 077) != 0) {
    throw_error<ConfigError>("{}: others may read {}: chmod 600 {}", what, file, file);
  }
  std::string secret;
  try {
    secret = text::trim(files::read(file, {"a secret", 4096}));
  } catch (const Error& error) {
    throw_error<ConfigError>("{}: {}", what, error.what());
  }
  constexpr std::size_t kShortest = 16;
  if (secret.size() < kShortest) {
    throw_error<ConfigError>(
        "{}: the secret in {} has {} characters, expected at least {}: head -c 24 /dev/urandom | "
        "base64 > {}",
        what, file, secret.size(), kShortest, file);
  }
  return secret;
}

namespace {

std::optional<LaunchEnvironment> read_place(const Getenv& getenv) {
  if (getenv(kTorchrun.rank) && getenv(kTorchrun.world)) return from_torchrun(getenv);
  // A Slurm allocation without srun (salloc, sbatch) has a node list but no step.
  if (getenv(kSlurm.rank) && getenv("SLURM_STEP_ID")) {
    const char* list = getenv("SLURM_STEP_NODELIST") ? "SLURM_STEP_NODELIST" : "SLURM_JOB_NODELIST";
    return from_scheduler(getenv, kSlurm, first_host(getenv(list).value_or(""), list),
                          slurm_local_world(getenv));
  }
  for (const Spelling& names : {kOpenMpi, kPmi}) {
    if (!getenv(names.rank)) continue;
    const auto local = getenv(names.local_world);
    const bool one_host = local && local == getenv(names.world);
    return from_scheduler(getenv, names, one_host ? "127.0.0.1" : "");
  }
  refuse_half_a_launch(getenv);
  return std::nullopt;
}

}  // namespace

std::optional<LaunchEnvironment> read_launch_environment(const Getenv& getenv) {
  auto environment = read_place(getenv);
  if (!environment || environment->world == 1) return environment;
  if (const auto secret = getenv(kSecretVariable)) {
    environment->secret = *secret;
  } else if (const auto file = getenv(kSecretFileVariable)) {
    environment->secret = read_secret(*file, kSecretFileVariable);
  }
  return environment;
}

std::optional<LaunchEnvironment> read_launch_environment() {
  return read_launch_environment([](const std::string& name) -> std::optional<std::string> {
    const char* value = std::getenv(name.c_str());
    return value == nullptr ? std::nullopt : std::optional<std::string>(value);
  });
}

}  // namespace heddle::comm
