#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "comm/endpoint.h"

namespace heddle::comm {

/// Facts that a launcher told this process.
struct LaunchEnvironment {
  std::string launcher;  ///< "heddle launch", "torchrun", "Slurm", "OpenMPI", "PMI".
  std::int64_t rank = 0, world = 1;
  std::int64_t local_rank = 0, local_world = 1;  ///< Among the ranks of this host.
  Endpoint master;                               ///< Address of the rendezvous store.
  /// True if this rank serves the store; false if a launcher does.
  bool serves_store = false;
  /// True if this rank says which job the store belongs to, because no launcher of ours has.
  bool announces_job = false;
  /// Known to the ranks of this job only, so that a stranger or a stale process is recognised.
  std::string nonce;
  /// True if torchrun's agent serves the store, which is c10d's TCPStore then.
  bool has_agent_store = false;
  /// Secret that opens the store; "": whoever reaches the port is heard.
  std::string secret;
};

/// The value of a variable, nothing if it is not set.
using Getenv = std::function<std::optional<std::string>(const std::string&)>;

/// Reads the variables of `heddle launch`, torchrun (RANK, WORLD_SIZE, MASTER_ADDR, ...), Slurm
/// (SLURM_PROCID, ... inside `srun`), OpenMPI (OMPI_COMM_WORLD_RANK, ...) or PMI (PMI_RANK, ...;
/// MPICH, Intel MPI, Cray PALS), in this order. Nothing outside of a launcher. Throws ConfigError
/// that names the variable which is missing or does not fit.
std::optional<LaunchEnvironment> read_launch_environment(const Getenv& getenv);
/// Reads this process's environment.
std::optional<LaunchEnvironment> read_launch_environment();

/// The first host of a Slurm node list: "node[007-010,20],login1" -> "node007".
std::string first_slurm_host(const std::string& node_list);

/// The ranks on host `node` (from 0) of a Slurm list of them: "4(x2),3" -> 4, 4 and 3. Without
/// `node` the number must be the same on all. Throws ConfigError that names `variable`, where the
/// list comes from: malformed, or not of this host.
std::int64_t slurm_tasks_of_node(const std::string& variable, const std::string& list,
                                 std::optional<std::int64_t> node);

/// LaunchEnvironment::launcher of `heddle launch`.
inline constexpr const char* kHeddleLaunch = "heddle launch";
/// Set by `heddle launch` beside torchrun's names; its presence says that the launcher serves the
/// store.
inline constexpr const char* kNonceVariable = "HEDDLE_LAUNCH_NONCE";
/// The job's secret, which `heddle launch` makes and gives to its ranks; and a file that holds it,
/// for ranks that another launcher starts on several hosts.
inline constexpr const char* kSecretVariable = "HEDDLE_LAUNCH_SECRET";
inline constexpr const char* kSecretFileVariable = "HEDDLE_LAUNCH_SECRET_FILE";

/// The secret in a file, which nobody but its owner may read or write. Throws ConfigError that
/// begins with `what`.
std::string read_secret(const std::string& file, const std::string& what);
/// The file to which rank 0, whose messages go to the terminal, also writes them.
inline constexpr const char* kLogVariable = "HEDDLE_LAUNCH_LOG";

}  // namespace heddle::comm
