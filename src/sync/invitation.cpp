#include "sync/invitation.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <thread>
#include <utility>

#include <nlohmann/json.hpp>

#include "base/errors.h"
#include "base/json.h"

namespace heddle::sync {
namespace {

using Json = nlohmann::ordered_json;
using Kind = comm::Endpoint::Kind;

/// A meeting is looked at this often; an error is told within a second.
constexpr auto kSlice = std::chrono::milliseconds(5);

}  // namespace

std::string Invitation::to_text() const {
  return Json{{"endpoint", endpoint.to_string()},
              {"secret", secret},
              {"generation", generation},
              {"size", size}}
      .dump();
}

Invitation Invitation::from_text(const std::string& text) {
  constexpr const char* kWhat = "invitation to a weight sync group";
  const Json value = json::parse_as<ConfigError>(text, kWhat);
  try {
    Invitation invitation;
    invitation.endpoint =
        comm::parse_endpoint(value.at("endpoint").get_ref<const std::string&>(), kWhat);
    invitation.secret = value.at("secret").get<std::string>();
    invitation.generation = value.at("generation").get<std::int64_t>();
    invitation.size = value.at("size").get<std::int64_t>();
    return invitation;
  } catch (const Json::exception& error) {
    throw_error<ConfigError>("{}: {}", kWhat, error.what());
  }
}

comm::StandaloneOptions Invitation::options(std::int64_t rank, comm::Seconds timeout) const {
  return {"weights", endpoint, rank, size, secret, generation, timeout};
}

std::vector<comm::Group> await_all(std::vector<comm::StandaloneMeeting> meetings) {
  std::vector<std::optional<comm::Group>> groups(meetings.size());
  std::size_t waiting = meetings.size();
  while (waiting > 0) {
    for (std::size_t k = 0; k < meetings.size(); ++k) {
      if (groups[k] || !meetings[k].is_ready()) continue;
      try {
        groups[k] = meetings[k].wait();
        --waiting;
      } catch (const std::exception& error) {
        const std::string reason = error.what();
        meetings.erase(meetings.begin() + static_cast<std::ptrdiff_t>(k));
        // The end of a meeting waits for its thread, which ends at its own deadline.
        std::thread([rest = std::move(meetings)] {}).detach();
        throw_error<CommError>("weight sync: rank {} of the group: {}", k, reason);
      }
    }
    std::this_thread::sleep_for(kSlice);
  }
  std::vector<comm::Group> result;
  for (auto& group : groups) result.push_back(*std::move(group));
  return result;
}

}  // namespace heddle::sync
