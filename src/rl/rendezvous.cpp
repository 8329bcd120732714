#include "rl/rendezvous.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <utility>

#include <nlohmann/json.hpp>

#include "assembly/from_config.h"
#include "base/errors.h"
#include "base/files.h"
#include "base/json.h"
#include "base/random_hex.h"

namespace heddle::rl {
namespace {

constexpr const char* kKey = "sync.rendezvous";

std::shared_ptr<comm::World> join(comm::LaunchEnvironment environment, const Place& where,
                                  std::int64_t number, comm::Seconds timeout,
                                  const comm::JobPart& part) {
  environment.launcher = comm::kHeddleLaunch;
  environment.master = where.endpoint;
  environment.secret = where.secret;
  environment.nonce = joint_nonce(number);
  environment.serves_store = environment.announces_job = environment.has_agent_store = false;
  return comm::World::join(environment, timeout, part);
}

std::string key_of(const char* what, std::int64_t number) {
  return fmt::format("{}/{}", what, number);
}

}  // namespace

std::string Place::to_text() const {
  return nlohmann::ordered_json{{"endpoint", endpoint.to_string()}, {"secret", secret}}.dump();
}

Place Place::from_text(const std::string& text, const std::string& what) {
  const auto value = json::parse_as<ConfigError>(text, what);
  try {
    return {comm::parse_endpoint(value.at("endpoint").get<std::string>(), what),
            value.at("secret").get<std::string>()};
  } catch (const nlohmann::json::exception&) {
    throw_error<ConfigError>(
        "{}: expected an object with the texts 'endpoint' and 'secret', as the trainer writes it; "
        "copy it anew from the trainer's train.output_dir",
        what);
  }
}

std::string rendezvous_file(const config::RunConfig& config) {
  if (!config.sync.rendezvous.empty()) return config.sync.rendezvous;
  return (std::filesystem::path(config.train.output_dir) / "rendezvous.json").string();
}

std::optional<Place> read_place(const std::string& file) {
  std::error_code error;
  if (!std::filesystem::exists(file, error)) return std::nullopt;
  return Place::from_text(comm::read_secret(file, kKey), fmt::format("{}: {}", kKey, file));
}

void write_place(const std::string& file, const Place& place) {
  const std::filesystem::path folder = std::filesystem::path(file).parent_path();
  if (!folder.empty()) files::make_writable_directory(folder);
  const std::string temporary = fmt::format("{}.tmp-{}", file, random_hex(8)),
                    text = place.to_text() + "\n";
  const int descriptor =
      ::open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
  bool is_written = descriptor >= 0 && ::write(descriptor, text.data(), text.size()) ==
                                           static_cast<ssize_t>(text.size());
  if (descriptor >= 0) is_written = ::close(descriptor) == 0 && is_written;
  if (is_written && ::rename(temporary.c_str(), file.c_str()) == 0) return;
  const std::string reason = std::strerror(errno);
  if (descriptor >= 0) ::unlink(temporary.c_str());
  throw_error<FileError>("{}: cannot write {}: {}", kKey, file, reason);
}

OpenedStore open_store(const comm::Endpoint& where, std::string secret, comm::Seconds timeout) {
  comm::Endpoint listened = where;
  if (where.kind == comm::Endpoint::Kind::kName) {
    listened = {};
    listened.port = where.port;
  }
  comm::Listener listener(listened);
  Place place{where, std::move(secret)};
  place.endpoint.port = listener.port();
  comm::Store store =
      comm::Store::serve(std::move(listener), timeout, place.secret).below(comm::kStorePrefix);
  return {std::move(store), std::move(place)};
}

std::shared_ptr<comm::World> join_as_trainer(const Place& where, std::int64_t number,
                                             std::int64_t rollouts, comm::Seconds timeout) {
  comm::LaunchEnvironment environment;
  environment.world = 1 + rollouts;
  return join(environment, where, number, timeout, {assembly::kTrainers, 0, 1});
}

std::shared_ptr<comm::World> join_as_rollout(const Place& where, std::int64_t number,
                                             const comm::World* own, comm::Seconds timeout) {
  comm::LaunchEnvironment environment;
  if (own != nullptr) environment = own->environment();
  const std::int64_t rollouts = environment.world;
  ++environment.rank;
  ++environment.world;
  return join(environment, where, number, timeout, {assembly::kRollouts, 1, rollouts});
}

std::string joint_nonce(std::int64_t number) { return fmt::format("rollout job {}", number); }

std::string job_key(std::int64_t number) { return key_of("job", number); }
std::string refused_key(std::int64_t number) { return key_of("refused", number); }
std::string called_key(std::int64_t number) { return key_of("called", number); }
std::string here_key(std::int64_t number) { return key_of("here", number); }
std::string passed_key(std::int64_t number) { return key_of("passed", number); }
std::string gone_key(std::int64_t number) { return key_of("gone", number); }
std::string place_key(std::int64_t number) { return key_of("place", number); }

}  // namespace heddle::rl
