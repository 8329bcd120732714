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

/// Between two looks at the meetings, and for failures elsewhere.
constexpr auto kSlice = std::chrono::milliseconds(5), kLook = std::chrono::milliseconds(500);

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

std::vector<comm::Group> await_all(std::vector<comm::StandaloneMeeting> meetings,
                                   const std::function<void()>& look) {
  std::vector<std::optional<comm::Group>> groups(meetings.size());
  auto next_look = std::chrono::steady_clock::now();
  try {
    for (std::size_t waiting = meetings.size(); waiting > 0;) {
      for (std::size_t k = 0; k < meetings.size(); ++k) {
        if (groups[k] || !meetings[k].is_ready()) continue;
        groups[k] = meetings[k].wait();
        --waiting;
      }
      if (const auto now = std::chrono::steady_clock::now(); now >= next_look) {
        next_look = now + kLook;
        look();
      }
      std::this_thread::sleep_for(kSlice);
    }
  } catch (const std::exception&) {
    // The end of a meeting waits for its thread, which ends at its own deadline.
    std::thread([rest = std::move(meetings)] {}).detach();
    throw;
  }
  std::vector<comm::Group> result;
  for (auto& group : groups) result.push_back(*std::move(group));
  return result;
}

}  // namespace heddle::sync
