#include "serve/admin/state.h"

namespace heddle::serve::admin {
namespace {

using Json = nlohmann::json;

constexpr std::size_t kMostSamples = 300;  ///< Ten minutes.
constexpr std::int64_t kMostRows = 200;    ///< Rows of a table, the newest.

}  // namespace

std::int64_t State::tokens() const {
  std::int64_t sum = 0;
  for (const Quotas::Use& use : sources_.quotas.uses()) sum += use.tokens();
  return sum;
}

void State::sample() {
  const Clock::time_point now = Clock::now();
  const std::int64_t all = tokens();
  const double passed = std::chrono::duration<double>(now - last_time_).count();
  samples_.push_back({now, passed > 0 ? static_cast<double>(all - last_tokens_) / passed : 0,
                      sources_.tinker.runs().waiting(), sources_.model.generations()});
  if (samples_.size() > kMostSamples) samples_.pop_front();
  last_time_ = now;
  last_tokens_ = all;
}

Json State::runs() const {
  Json list = Json::array();
  for (const tinker::Runs::Status& run : sources_.tinker.runs().status()) {
    Json entry{{"run", run.id},
               {"tenant", run.tenant},
               {"steps", run.steps},
               {"tokens", run.tokens},
               {"waiting", run.waiting},
               {"state", run.state},
               {"next_seq", run.next_seq},
               {"loss", run.losses}};
    Statement row(sources_.data.database(),
                  "SELECT r.options, s.display_name FROM run r JOIN session s ON s.id = r.session "
                  "WHERE r.id = ?");
    if (row.bind(run.id).step()) {
      entry["rank"] = tinker::set_options_of(Json::parse(row.text(0))).rank;
      entry["session_name"] = row.text(1);
    }
    list.push_back(std::move(entry));
  }
  return list;
}

Json State::checkpoints() const {
  Statement rows(sources_.data.database(),
                 "SELECT path, tenant, bytes, created, is_public, expires FROM checkpoint ORDER BY "
                 "created DESC LIMIT ?");
  rows.bind(kMostRows);
  Json list = Json::array();
  while (rows.step()) {
    Json entry{{"path", rows.text(0)},
               {"tenant", rows.text(1)},
               {"bytes", rows.integer(2)},
               {"created", as_utc(rows.real(3))},
               {"public", rows.integer(4) != 0}};
    if (!rows.is_null(5)) entry["expires"] = as_utc(rows.real(5));
    list.push_back(std::move(entry));
  }
  return list;
}

Json State::keys() const {
  Json list = Json::array();
  for (const Keys::Entry& key : sources_.keys.list()) {
    Json entry{{"number", key.id},     {"begins", key.prefix}, {"tenant", key.tenant},
               {"scopes", key.scopes}, {"limits", key.limits}, {"created", as_utc(key.created)}};
    if (key.revoked) entry["revoked"] = as_utc(*key.revoked);
    if (key.expires) entry["expires"] = as_utc(*key.expires);
    list.push_back(std::move(entry));
  }
  return list;
}

Json State::series() const {
  Json ago = Json::array(), rate = Json::array(), waiting = Json::array(), answers = Json::array();
  const Clock::time_point now = Clock::now();
  for (const Sample& sample : samples_) {
    ago.push_back(std::chrono::duration<double>(now - sample.time).count());
    rate.push_back(sample.tokens_per_s);
    waiting.push_back(sample.waiting);
    answers.push_back(sample.answers);
  }
  return {{"seconds_ago", ago}, {"tokens_per_s", rate}, {"waiting", waiting}, {"answers", answers}};
}

Json State::json() const {
  const ModelFacts& facts = sources_.model.facts();
  Json tenants = Json::array();
  for (const Quotas::Use& use : sources_.quotas.uses())
    tenants.push_back({{"tenant", use.tenant},
                       {"requests", use.requests},
                       {"tokens", use.tokens()},
                       {"trained", use.trained},
                       {"read", use.read},
                       {"generated", use.generated},
                       {"answers_under_way", use.concurrent},
                       {"refused", use.refused}});
  return {{"time", as_utc(now_s())},
          {"model",
           {{"name", facts.name},
            {"architecture", facts.architecture},
            {"max_context", facts.max_context}}},
          {"queue",
           {{"training_requests", sources_.tinker.runs().waiting()},
            {"answers", sources_.model.generations()},
            {"promises", sources_.tinker.promises().pending()}}},
          {"runs", runs()},
          {"tenants", tenants},
          {"adapters", sources_.adapters ? sources_.adapters() : std::vector<std::string>()},
          {"checkpoints", checkpoints()},
          {"keys", keys()},
          {"series", series()}};
}

}  // namespace heddle::serve::admin
