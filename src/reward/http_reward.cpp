#include "reward/http_reward.h"

#include <curl/curl.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "base/errors.h"
#include "base/json.h"
#include "base/log.h"
#include "base/quote.h"
#include "base/secret.h"
#include "reward/wire.h"

namespace heddle::reward {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kLongestResponse = 64 << 20;
constexpr double kLongestWait = 60;  ///< Between two tries, also if the server asks for more.

Clock::duration seconds(double count) {
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(count));
}

/// Samples that travel together.
struct Batch {
  std::size_t first = 0, count = 0;
  std::string body;
  std::int64_t tries = 0;
  Clock::time_point not_before = {};
};

std::size_t append(char* bytes, std::size_t size, std::size_t count, void* to) {
  auto& text = *static_cast<std::string*>(to);
  if (text.size() + size * count > kLongestResponse) return 0;
  text.append(bytes, size * count);
  return size * count;
}

/// A request under way.
class Transfer {
 public:
  Transfer(const HttpOptions& options, Batch batch) : batch_(std::move(batch)) {
    handle_ = curl_easy_init();
    if (handle_ == nullptr) throw_error<Error>("libcurl has no memory for a request");
    headers_ = curl_slist_append(nullptr, "Content-Type: application/json");
    if (!options.token.empty())
      headers_ = curl_slist_append(headers_, ("Authorization: Bearer " + options.token).c_str());
    curl_easy_setopt(handle_, CURLOPT_URL, options.url.c_str());
    curl_easy_setopt(handle_, CURLOPT_PROTOCOLS_STR, "http,https");
    curl_easy_setopt(handle_, CURLOPT_HTTPHEADER, headers_);
    curl_easy_setopt(handle_, CURLOPT_POSTFIELDSIZE_LARGE,
                     static_cast<curl_off_t>(batch_.body.size()));
    curl_easy_setopt(handle_, CURLOPT_POSTFIELDS, batch_.body.data());
    curl_easy_setopt(handle_, CURLOPT_TIMEOUT_MS, static_cast<long>(options.timeout_s * 1000));
    curl_easy_setopt(handle_, CURLOPT_NOSIGNAL, 1L);
    curl_easy_setopt(handle_, CURLOPT_WRITEFUNCTION, append);
    curl_easy_setopt(handle_, CURLOPT_WRITEDATA, &answer_);
  }
  ~Transfer() {
    curl_easy_cleanup(handle_);
    curl_slist_free_all(headers_);
  }
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;

  CURL* handle() const { return handle_; }
  Batch& batch() { return batch_; }
  const std::string& answer() const { return answer_; }
  long status() const {
    long status = 0;
    curl_easy_getinfo(handle_, CURLINFO_RESPONSE_CODE, &status);
    return status;
  }
  /// Where a redirection leads; empty: nowhere.
  std::string location() const {
    const char* url = nullptr;
    curl_easy_getinfo(handle_, CURLINFO_REDIRECT_URL, &url);
    return url == nullptr ? "" : url;
  }
  double retry_after() const {
    curl_off_t wait = 0;
    curl_easy_getinfo(handle_, CURLINFO_RETRY_AFTER, &wait);
    return static_cast<double>(wait);
  }

 private:
  CURL* handle_ = nullptr;
  curl_slist* headers_ = nullptr;
  Batch batch_;
  std::string answer_;
};

class HttpReward final : public Reward {
 public:
  explicit HttpReward(HttpOptions options) : options_(std::move(options)) {
    if (options_.batch < 1 || options_.concurrency < 1 || options_.retries < 0 ||
        options_.timeout_s <= 0 || options_.backoff_s < 0) {
      throw_error<ConfigError>(
          "rl.reward.url: expected batch and concurrency of at least 1, retries of at least 0 and "
          "a "
          "positive timeout");
    }
    if (options_.token.find_first_of("\r\n") != std::string::npos)
      throw_error<ConfigError>("rl.reward.token: expected one line");
    if (options_.token == text::kHidden || options_.url.find(text::kHidden) != std::string::npos) {
      throw_error<ConfigError>(
          "rl.reward: the token or the password of the URL was left out when this configuration "
          "was written: give it again, as rl.reward.token=TOKEN");
    }
    require_url();
    static std::once_flag once;
    std::call_once(once, [] { curl_global_init(CURL_GLOBAL_DEFAULT); });
    multi_ = curl_multi_init();
    if (multi_ == nullptr) throw_error<Error>("libcurl cannot be started");
  }
  ~HttpReward() override {
    drop_all();
    curl_multi_cleanup(multi_);
  }

  std::vector<Score> score(std::span<const Sample> samples) override {
    scores_.assign(samples.size(), Score{});
    waiting_.clear();
    drop_all();
    const auto size = static_cast<std::size_t>(options_.batch);
    for (std::size_t first = 0; first < samples.size(); first += size)
      waiting_.push_back(make_batch(samples, first, std::min(size, samples.size() - first)));
    while (!waiting_.empty() || !under_way_.empty()) {
      if (options_.stop.stop_requested()) throw_error<Error>("rl.reward.url: given up");
      start_ready();
      perform();
    }
    for (Score& score : scores_) score = or_failed(std::move(score), options_.failed);
    return std::move(scores_);
  }

 private:
  void require_url() const {
    const std::unique_ptr<CURLU, void (*)(CURLU*)> url(curl_url(), curl_url_cleanup);
    const CURLUcode code =
        curl_url_set(url.get(), CURLUPART_URL, options_.url.c_str(), CURLU_NON_SUPPORT_SCHEME);
    if (code != CURLUE_OK) {
      throw_error<ConfigError>("rl.reward.url: '{}' is no URL: {}",
                               text::shown(text::without_password(options_.url)),
                               curl_url_strerror(code));
    }
  }

  void drop_all() {
    for (const auto& [handle, transfer] : under_way_) curl_multi_remove_handle(multi_, handle);
    under_way_.clear();
  }

  static Batch make_batch(std::span<const Sample> samples, std::size_t first, std::size_t count) {
    Json list = Json::array();
    for (std::size_t k = first; k < first + count; ++k) {
      Json object = {{"id", std::to_string(k)}};
      object.update(to_wire(samples[k]));
      list.push_back(std::move(object));
    }
    return {first, count, wire_text(list)};
  }

  void start_ready() {
    const auto now = Clock::now();
    for (auto next = waiting_.begin();
         next != waiting_.end() &&
         under_way_.size() < static_cast<std::size_t>(options_.concurrency);) {
      if (next->not_before > now) {
        ++next;
        continue;
      }
      auto transfer = std::make_unique<Transfer>(options_, std::move(*next));
      next = waiting_.erase(next);
      curl_multi_add_handle(multi_, transfer->handle());
      CURL* const handle = transfer->handle();
      under_way_.emplace(handle, std::move(transfer));
    }
  }

  /// Waits for news, or until a batch may be asked again.
  void perform() {
    int running = 0;
    curl_multi_perform(multi_, &running);
    int left = 0;
    while (const CURLMsg* message = curl_multi_info_read(multi_, &left)) {
      if (message->msg == CURLMSG_DONE) finish(message->easy_handle, message->data.result);
    }
    if (waiting_.empty() && under_way_.empty()) return;
    // Looks at `stop` so often.
    constexpr int kNewsOnly = 200;
    auto until = Clock::now() + std::chrono::milliseconds(kNewsOnly);
    for (const Batch& batch : waiting_) until = std::min(until, batch.not_before);
    const auto wait = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now()).count();
    // A batch that is ready waits for a place: news of the others come first.
    const bool is_full = under_way_.size() >= static_cast<std::size_t>(options_.concurrency);
    curl_multi_poll(multi_, nullptr, 0,
                    is_full ? kNewsOnly : static_cast<int>(std::max<std::int64_t>(0, wait)),
                    nullptr);
  }

  void finish(CURL* handle, CURLcode result) {
    const std::unique_ptr<Transfer> transfer = std::move(under_way_.at(handle));
    under_way_.erase(handle);
    curl_multi_remove_handle(multi_, handle);
    const long status = transfer->status();
    if (result == CURLE_OK && status >= 200 && status < 300) return take(*transfer);
    // A longer answer than is read will be as long again.
    const bool may_pass =
        result == CURLE_OK ? status == 429 || status >= 500 : result != CURLE_WRITE_ERROR;
    const std::string reason = reason_of(*transfer, result);
    Batch& batch = transfer->batch();
    if (may_pass && batch.tries < options_.retries) {
      const double wait = std::max(
          options_.backoff_s * static_cast<double>(1ull << std::min<std::int64_t>(batch.tries, 16)),
          transfer->retry_after());
      ++batch.tries;
      log::warning("rl.reward.url {}: {}; try {} of {} in {:.1f} s",
                   text::without_password(options_.url), reason, batch.tries + 1,
                   options_.retries + 1, std::min(wait, kLongestWait));
      batch.not_before = Clock::now() + seconds(std::min(wait, kLongestWait));
      waiting_.push_back(std::move(batch));
      return;
    }
    fail(batch,
         batch.tries == 0 ? reason : fmt::format("{} (asked {} times)", reason, batch.tries + 1));
  }

  std::string reason_of(const Transfer& transfer, CURLcode result) const {
    if (result == CURLE_OPERATION_TIMEDOUT)
      return fmt::format("no answer within {} s (rl.reward.timeout_s)", options_.timeout_s);
    if (result == CURLE_WRITE_ERROR)
      return fmt::format("an answer of more than {} MiB", kLongestResponse >> 20);
    if (result != CURLE_OK) return curl_easy_strerror(result);
    const std::string location = transfer.location();
    if (!location.empty()) {
      // Another host would be sent the token; a POST may come there as a GET.
      return fmt::format(
          "HTTP status {}, redirects to {}, which is not followed; set rl.reward.url",
          transfer.status(), text::shown(text::without_password(location)));
    }
    return fmt::format("HTTP status {}: {}", transfer.status(), text::shown(transfer.answer()));
  }

  void fail(const Batch& batch, const std::string& why) {
    for (std::size_t k = batch.first; k < batch.first + batch.count; ++k)
      scores_[k] = {0, {}, text::without_password(options_.url) + ": " + why};
  }

  void take(Transfer& transfer) {
    const Batch& batch = transfer.batch();
    Json list;
    try {
      list = json::parse<Json>(transfer.answer());
    } catch (const DataError& error) {
      return fail(batch, fmt::format("expected a list of scores, found '{}' ({})",
                                     text::shown(transfer.answer()), error.what()));
    }
    if (!list.is_array())
      return fail(batch, "expected a list of scores, found " + json::shown(list));
    std::map<std::string, std::size_t> places;
    for (std::size_t k = batch.first; k < batch.first + batch.count; ++k)
      places[std::to_string(k)] = k;
    for (const Json& answer : list) {
      const auto id = answer.is_object() ? answer.find("id") : answer.end();
      if (id == answer.end()) return fail(batch, "a score without 'id': " + json::shown(answer));
      const auto place = places.find(id->is_string() ? id->get<std::string>() : id->dump());
      if (place == places.end())
        return fail(batch, "a score of an unknown id, or a second one: " + json::shown(answer));
      scores_[place->second] = from_wire(answer);
      places.erase(place);
    }
    for (const auto& [id, place] : places) {
      scores_[place].error =
          fmt::format("{}: the answer has {} of {} scores, none with the id {}",
                      text::without_password(options_.url), list.size(), batch.count, id);
    }
  }

  HttpOptions options_;
  CURLM* multi_ = nullptr;
  std::deque<Batch> waiting_;
  std::map<CURL*, std::unique_ptr<Transfer>> under_way_;
  std::vector<Score> scores_;
};

}  // namespace

std::unique_ptr<Reward> make_http_reward(const HttpOptions& options) {
  return std::make_unique<HttpReward>(options);
}

}  // namespace heddle::reward
