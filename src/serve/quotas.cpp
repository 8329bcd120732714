#include "serve/quotas.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <mutex>

namespace heddle::serve {
namespace {

using Clock = std::chrono::steady_clock;

constexpr double kMinute_s = 60;

/// Tokens or requests that are left; filled evenly, at `limit` a minute and up to `limit`.
struct Bucket {
  double level = 0;
  std::int64_t limit = 0;  ///< For the last request; 0 before the first.
  Clock::time_point filled;

  void fill(std::int64_t new_limit, Clock::time_point now) {
    if (limit == 0) level = static_cast<double>(new_limit);
    const double passed = limit == 0 ? 0 : std::chrono::duration<double>(now - filled).count();
    limit = new_limit;
    filled = now;
    level = std::min(static_cast<double>(limit), level + passed * rate());
  }
  double rate() const { return static_cast<double>(limit) / kMinute_s; }
  double seconds_until(double wanted) const { return std::max(0.0, (wanted - level) / rate()); }
};

/// A duration in OpenAI's form: "20ms", "1.5s", "6m0s".
std::string duration_text(double seconds) {
  if (seconds < 1) return fmt::format("{:.0f}ms", std::ceil(seconds * 1000));
  if (seconds < kMinute_s) return fmt::format("{:.3g}s", seconds);
  const auto whole = static_cast<std::int64_t>(std::ceil(seconds));
  return fmt::format("{}m{}s", whole / 60, whole % 60);
}

std::string used_up(std::int64_t tokens) {
  return fmt::format("{} tokens a minute are used up", tokens);
}

void put_headers(std::map<std::string, std::string>& headers, const char* what,
                 const Bucket& bucket) {
  headers[fmt::format("x-ratelimit-limit-{}", what)] = std::to_string(bucket.limit);
  headers[fmt::format("x-ratelimit-remaining-{}", what)] =
      std::to_string(static_cast<std::int64_t>(std::max(0.0, bucket.level)));
  headers[fmt::format("x-ratelimit-reset-{}", what)] =
      duration_text(bucket.seconds_until(static_cast<double>(bucket.limit)));
}

}  // namespace

class Quotas::State {
 public:
  struct Tenant {
    Use use;
    Bucket requests, tokens;
  };

  std::mutex mutex;
  std::map<std::string, Tenant> tenants;
};

/// One request that was let in.
class Quotas::Ticket final : public Meter {
 public:
  Ticket(std::shared_ptr<State> state, const Caller& caller, bool is_generation)
      : state_(std::move(state)),
        tenant_(caller.tenant),
        tokens_per_minute_(caller.limits.tokens_per_minute),
        is_generation_(is_generation) {}
  ~Ticket() override { finish(); }

  void add_tokens(Tokens kind, std::int64_t count) override {
    const std::lock_guard lock(state_->mutex);
    State::Tenant& tenant = state_->tenants[tenant_];
    Use& use = tenant.use;
    (kind == Tokens::kTrained ? use.trained
     : kind == Tokens::kRead  ? use.read
                              : use.generated) += count;
    tenant.tokens.level -= static_cast<double>(count);
  }
  std::optional<Wait> wait() override {
    if (tokens_per_minute_ == 0) return std::nullopt;
    const std::lock_guard lock(state_->mutex);
    Bucket& tokens = state_->tenants[tenant_].tokens;
    tokens.fill(tokens_per_minute_, Clock::now());
    if (tokens.level > 0) return std::nullopt;
    const double seconds = tokens.seconds_until(1);
    return Wait{seconds, fmt::format("{}, which is the limit of this key's tenant: work goes on in "
                                     "{:.0f} s",
                                     used_up(tokens_per_minute_), std::ceil(seconds))};
  }
  void finish() override {
    const std::lock_guard lock(state_->mutex);
    if (!std::exchange(is_generation_, false)) return;
    --state_->tenants[tenant_].use.concurrent;
  }

 private:
  std::shared_ptr<State> state_;
  std::string tenant_;
  std::int64_t tokens_per_minute_;
  bool is_generation_;  ///< Counted among the concurrent ones.
};

Quotas::Quotas() : state_(std::make_shared<State>()) {}

Admission Quotas::admit(const Caller& caller, Cost cost) {
  const Limits& limits = caller.limits;
  const bool is_generation = cost == Cost::kGeneration;
  const std::lock_guard lock(state_->mutex);
  State::Tenant& tenant = state_->tenants[caller.tenant];
  const Clock::time_point now = Clock::now();
  Admission admission;
  std::string refusal;
  double wait_s = 1;
  if (limits.tokens_per_minute > 0) {
    tenant.tokens.fill(limits.tokens_per_minute, now);
    put_headers(admission.headers, "tokens", tenant.tokens);
    if (tenant.tokens.level <= 0 && is_generation) {
      refusal = used_up(limits.tokens_per_minute);
      wait_s = tenant.tokens.seconds_until(1);
    }
  }
  if (limits.requests_per_minute > 0) {
    tenant.requests.fill(limits.requests_per_minute, now);
    if (tenant.requests.level < 1) {
      refusal = fmt::format("{} requests a minute are used up", limits.requests_per_minute);
      wait_s = std::max(wait_s, tenant.requests.seconds_until(1));
    }
  }
  if (is_generation && limits.max_concurrent > 0 && tenant.use.concurrent >= limits.max_concurrent)
    refusal = fmt::format("{} requests for answers are under way", tenant.use.concurrent);
  if (refusal.empty() && limits.requests_per_minute > 0) tenant.requests.level -= 1;
  if (limits.requests_per_minute > 0) put_headers(admission.headers, "requests", tenant.requests);
  if (!refusal.empty()) {
    ++tenant.use.refused;
    throw HttpError(429, refusal + ", which is the limit of this key's tenant: try again later",
                    static_cast<int>(std::ceil(wait_s)), admission.headers);
  }
  ++tenant.use.requests;
  if (is_generation) ++tenant.use.concurrent;
  admission.meter = std::make_shared<Ticket>(state_, caller, is_generation);
  return admission;
}

std::vector<Quotas::Use> Quotas::uses() const {
  const std::lock_guard lock(state_->mutex);
  std::vector<Use> uses;
  for (const auto& [name, tenant] : state_->tenants) {
    uses.push_back(tenant.use);
    uses.back().tenant = name;
  }
  return uses;
}

}  // namespace heddle::serve
