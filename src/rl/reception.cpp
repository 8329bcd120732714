#include "rl/reception.h"

#include <chrono>
#include <exception>
#include <thread>
#include <utility>

#include <nlohmann/json.hpp>

#include "base/errors.h"
#include "base/log.h"
#include "base/random_hex.h"

namespace heddle::rl {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kPoll{50};
/// A rollout job that was called answers within this time; it looks ten times a second.
constexpr comm::Seconds kAnswer{5};
constexpr int kSecretBytes = 24;

/// The secret of the file of an earlier start, or a new one.
std::string secret_for(const std::string& file) {
  const std::optional<Place> before = read_place(file);
  return before ? before->secret : random_hex(kSecretBytes);
}

OpenedStore open(const config::RunConfig& config) {
  const std::string file = rendezvous_file(config);
  OpenedStore opened = open_store(comm::parse_endpoint(config.sync.listen, "sync.listen"),
                                  secret_for(file), comm::Seconds(config.sync.timeout_s));
  write_place(file, opened.place);
  return opened;
}

}  // namespace

Reception::Reception(const config::RunConfig& config, const comm::World* own, Facts facts)
    : config_(config), own_(own), facts_(std::move(facts)), opened_(open(config)) {}

Reception::~Reception() {
  // After an error the run may go on from a checkpoint, and those that wait with it.
  if (std::uncaught_exceptions() > 0) return;
  try {
    opened_.store.set(kNoMoreKey, "1");
    // Jobs that wait read it here. One that has died does not, and all share the time.
    const auto deadline = Clock::now() + comm::kLeaving;
    for (std::int64_t number = last_ + 1; number <= arrived(); ++number) {
      const comm::Seconds left = deadline - Clock::now();
      opened_.store.wait(gone_key(number), left);
    }
  } catch (const std::exception&) {
    // They find the store gone.
  }
}

bool Reception::has_guest() const { return arrived() > last_; }

Guest Reception::await(const std::string& lost) {
  joint_.reset();
  const double patience = config_.sync.rendezvous_timeout_s;
  const std::string where = fmt::format(
      "waits at {} for a job of rl.role rollout, {:.3g} s at most "
      "(sync.rendezvous_timeout_s); it finds the way by {}",
      opened_.place.endpoint.to_string(), patience, rendezvous_file(config_));
  if (lost.empty()) {
    log::info("rl: {}", where);
  } else {
    log::warning("rl: rollout job {} is lost: {}; the run {}", last_, lost, where);
  }
  const auto deadline =
      Clock::now() + std::chrono::duration_cast<Clock::duration>(comm::Seconds(patience));
  while (Clock::now() < deadline) {
    if (const auto guest = next_guest()) return *guest;
    if (own_ != nullptr) {
      if (const auto failure = own_->failure_of_another()) throw CommError(*failure);
    }
    std::this_thread::sleep_for(kPoll);
  }
  throw_error<CommError>(
      "rl: no job of rl.role rollout came to {} within {:.3g} s (sync.rendezvous_timeout_s){}{}",
      opened_.place.endpoint.to_string(), patience, lost.empty() ? "" : ", after: ", lost);
}

std::optional<Guest> Reception::next_guest() {
  if (!has_guest()) return std::nullopt;
  const std::int64_t number = ++last_;
  const comm::Store& store = opened_.store;
  if (store.find(gone_key(number))) return std::nullopt;
  const auto pass = [&] {
    log::warning("rl: rollout job {} is passed over: it gave no answer within {:.3g} s", number,
                 kAnswer.count());
    store.set(passed_key(number), "1");
  };
  const auto text = store.wait(job_key(number), kAnswer);
  if (!text) {
    pass();
    return std::nullopt;
  }
  const auto job = nlohmann::json::parse(*text);
  const std::string why = difference(facts_, job.at("facts").get<Facts>());
  if (!why.empty()) {
    log::warning("rl: rollout job {} is refused: {}", number, why);
    store.set(refused_key(number), why);
    return std::nullopt;
  }
  store.set(called_key(number), "1");
  // One that was killed while it waited says nothing.
  if (!store.wait(here_key(number), kAnswer)) {
    pass();
    return std::nullopt;
  }
  return Guest{number, job.at("ranks").get<std::int64_t>()};
}

std::shared_ptr<comm::World> Reception::admit(const Guest& guest) {
  comm::Endpoint where = opened_.place.endpoint;
  where.port = 0;
  const comm::Seconds timeout(config_.sync.rendezvous_timeout_s);
  joint_ = open_store(where, random_hex(kSecretBytes), timeout);
  joint_->store.set(comm::kJobKey, joint_nonce(guest.number));
  opened_.store.set(place_key(guest.number), joint_->place.to_text());
  auto joint = join_as_trainer(joint_->place, guest.number, guest.ranks, timeout);
  log::info("rl: rollout job {} generates, on {} rank(s)", guest.number, guest.ranks);
  return joint;
}

void Reception::wait_until_empty() const {
  try {
    if (joint_) joint_->store.wait(comm::kEmptyKey, comm::kLeaving);
  } catch (const CommError&) {
    // This process serves it.
  }
}

}  // namespace heddle::rl
