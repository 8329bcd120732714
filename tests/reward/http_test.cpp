#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <future>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/errors.h"
#include "reward/reward.h"
#include "reward/wire.h"

namespace heddle::reward {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

struct Response {
  int status = 200;
  std::string body, headers = {};
};
/// Header block and body of a request, and its number from 0.
using Handler = std::function<Response(const std::string& head, const Json& body, int number)>;

/// One connection after the other; each has one request.
class Server {
 public:
  explicit Server(Handler handler) : handler_(std::move(handler)) {
    listener_ = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address;
    ::bind(listener_, reinterpret_cast<sockaddr*>(&address), size);
    ::listen(listener_, 64);
    ::getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &size);
    url_ = "http://127.0.0.1:" + std::to_string(ntohs(address.sin_port)) + "/score";
    thread_ = std::thread([this] { serve(); });
  }
  ~Server() {
    is_ended_ = true;
    ::shutdown(listener_, SHUT_RDWR);
    thread_.join();
    for (std::thread& one : answering_) one.join();
    ::close(listener_);
  }
  const std::string& url() const { return url_; }
  int requests() const { return requests_; }
  int most_at_once() const { return most_; }

 private:
  void serve() {
    while (!is_ended_) {
      const int connection = ::accept(listener_, nullptr, nullptr);
      if (connection < 0) return;
      answering_.emplace_back([this, connection] { answer(connection); });
    }
  }

  void answer(int connection) {
    const int now = ++at_once_;
    for (int most = most_; now > most && !most_.compare_exchange_weak(most, now);) {
    }
    std::string text;
    std::size_t end = std::string::npos, length = 0;
    char buffer[4096];
    while (end == std::string::npos || text.size() < end + 4 + length) {
      const ssize_t count = ::recv(connection, buffer, sizeof buffer, 0);
      if (count <= 0) break;
      text.append(buffer, static_cast<std::size_t>(count));
      if (end == std::string::npos && (end = text.find("\r\n\r\n")) != std::string::npos) {
        length = std::stoul(text.substr(text.find("Content-Length: ") + 16));
        if (text.find("Expect: 100-continue") != std::string::npos)
          ::send(connection, "HTTP/1.1 100 Continue\r\n\r\n", 25, MSG_NOSIGNAL);
      }
    }
    const Response response =
        handler_(text.substr(0, end), Json::parse(text.substr(end + 4)), requests_++);
    --at_once_;
    const std::string reply =
        "HTTP/1.1 " + std::to_string(response.status) + " X\r\n" + response.headers +
        "Connection: close\r\nContent-Length: " + std::to_string(response.body.size()) +
        "\r\n\r\n" + response.body;
    if (response.status != 0) ::send(connection, reply.data(), reply.size(), MSG_NOSIGNAL);
    ::close(connection);
  }

  Handler handler_;
  int listener_ = -1;
  std::string url_;
  std::thread thread_;
  std::vector<std::thread> answering_;
  std::atomic<bool> is_ended_ = false;
  std::atomic<int> requests_ = 0, at_once_ = 0, most_ = 0;
};

/// The length of each completion, in reverse order.
std::string lengths(const Json& samples) {
  Json scores = Json::array();
  for (auto sample = samples.rbegin(); sample != samples.rend(); ++sample) {
    scores.push_back({{"id", (*sample)["id"]},
                      {"reward", (*sample)["completion"].get_ref<const std::string&>().size()}});
  }
  return scores.dump();
}

std::unique_ptr<Reward> reward_of(HttpOptions http) {
  RewardOptions options;
  options.http = std::move(http);
  return make_reward(options);
}

HttpOptions quick(const Server& server) {
  HttpOptions options;
  options.url = server.url();
  options.backoff_s = 0.01;
  options.timeout_s = 60;
  return options;
}

std::vector<Sample> samples(std::size_t count) {
  std::vector<Sample> samples(count);
  for (std::size_t k = 0; k < count; ++k) samples[k].completion = std::string(k, 'a');
  return samples;
}

TEST(HttpReward, SendsBatchesAndKeepsTheOrder) {
  std::mutex mutex;
  std::size_t largest = 0;
  Server server([&](const std::string& head, const Json& body, int) {
    const std::lock_guard lock(mutex);
    EXPECT_NE(head.find("POST /score"), std::string::npos);
    EXPECT_NE(head.find("Authorization: Bearer secret"), std::string::npos);
    largest = std::max(largest, body.size());
    return Response{200, lengths(body)};
  });
  HttpOptions options = quick(server);
  options.token = "secret";
  options.batch = 4;
  options.concurrency = 3;
  const auto scores = reward_of(options)->score(samples(30));
  for (std::size_t k = 0; k < scores.size(); ++k) {
    EXPECT_FALSE(scores[k].error) << *scores[k].error;
    EXPECT_EQ(scores[k].reward, static_cast<double>(k));
  }
  EXPECT_EQ(server.requests(), 8);
  EXPECT_EQ(largest, 4u);
  EXPECT_LE(server.most_at_once(), 3);
}

TEST(HttpReward, AsksAgainAfterPassingFailures) {
  for (const int status : {429, 500, 503, 0}) {
    Server server([&](const std::string&, const Json& body, int number) {
      return number < 2 ? Response{status, "busy"} : Response{200, lengths(body)};
    });
    const auto scores = reward_of(quick(server))->score(samples(3));
    EXPECT_FALSE(scores[2].error) << status << ": " << *scores[2].error;
    EXPECT_EQ(server.requests(), 3) << status;
  }
}

TEST(HttpReward, WaitsAsLongAsTheServerSays) {
  Server server([&](const std::string&, const Json& body, int number) {
    return number == 0 ? Response{429, "", "Retry-After: 1\r\n"} : Response{200, lengths(body)};
  });
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_FALSE(reward_of(quick(server))->score(samples(1))[0].error);
  EXPECT_GE(std::chrono::steady_clock::now() - begin, std::chrono::milliseconds(900));
}

TEST(HttpReward, GivesUpWithTheReason) {
  Server refuses([&](const std::string&, const Json&, int) { return Response{401, "no token"}; });
  auto scores = reward_of(quick(refuses))->score(samples(2));
  EXPECT_NE(scores[1].error.value_or("").find("HTTP status 401: no token"), std::string::npos);
  EXPECT_EQ(refuses.requests(), 1);

  Server busy([&](const std::string&, const Json&, int) { return Response{503, "busy"}; });
  HttpOptions options = quick(busy);
  options.retries = 2;
  scores = reward_of(options)->score(samples(1));
  EXPECT_NE(scores[0].error.value_or("").find("asked 3 times"), std::string::npos);
  options.failed = 0.5;
  EXPECT_EQ(reward_of(options)->score(samples(1))[0].reward, 0.5);
}

TEST(HttpReward, HasADeadline) {
  std::promise<void> has_given_up;
  Server slow(
      [&, given_up = has_given_up.get_future().share()](const std::string&, const Json& body, int) {
        given_up.wait();
        return Response{200, lengths(body)};
      });
  HttpOptions options = quick(slow);
  options.timeout_s = 0.1;
  options.retries = 0;
  EXPECT_THAT(reward_of(options)->score(samples(1))[0].error.value_or(""),
              HasSubstr("no answer within 0.1 s (rl.reward.timeout_s)"));
  has_given_up.set_value();
}

TEST(HttpReward, SaysWhatToDo) {
  const auto error_of = [](const Response& response) {
    Server server([&](const std::string&, const Json&, int) { return response; });
    return reward_of(quick(server))->score(samples(2))[1].error.value_or("");
  };
  EXPECT_THAT(error_of({307, "", "Location: /score/\r\n"}),
              AllOf(HasSubstr("HTTP status 307, redirects to http://127.0.0.1:"),
                    HasSubstr("/score/, which is not followed; set rl.reward.url")));
  EXPECT_THAT(error_of({200, "<html>sign in"}), HasSubstr("found '<html>sign in'"));
  EXPECT_THAT(error_of({200, R"([{"id": "0", "reward": 1}])"}),
              HasSubstr("/score: the answer has 1 of 2 scores, none with the id 1"));
}

TEST(HttpReward, RefusesAUrlThatIsNone) {
  for (const char* url : {"http://", "http://no such host/score", "http://host:port/"}) {
    HttpOptions options;
    options.url = url;
    EXPECT_THROW(reward_of(options), ConfigError) << url;
  }
}

TEST(HttpReward, RefusesAnswersThatAreNoScores) {
  for (const char* body : {"", "{}", "[1]", "[{\"reward\": 1}]",
                           "[{\"id\": \"77\", \"reward\": 1}]", "[{\"id\": \"0\"}]", "[]",
                           "[{\"id\": \"0\", \"reward\": 1}, {\"id\": \"0\", \"reward\": 0}]"}) {
    Server server([&](const std::string&, const Json&, int) { return Response{200, body}; });
    EXPECT_TRUE(reward_of(quick(server))->score(samples(1))[0].error) << body;
  }
}

TEST(RewardWire, RefusesWhatNoMetricCanHave) {
  const auto error_of = [](const std::string& text) {
    return from_wire(Json::parse(text)).error.value_or("");
  };
  EXPECT_EQ(error_of(R"({"reward": -1e9, "parts": {"format": 0.5, "a b/é": -2}})"), "");
  for (const char* text :
       {R"({"reward": 1e300})", R"({"reward": -2e9})", R"({"reward": true})", R"({"reward": "1"})",
        R"({"reward": 1, "parts": [1]})", R"({"reward": 1, "parts": {"a": "1"}})",
        R"({"reward": 1, "parts": {"a": 1e308}})", R"({"reward": 1, "parts": {"": 1}})",
        R"({"reward": 1, "parts": {"\u001b[2J": 1}})",
        R"({"reward": 1, "parts": {"a\nerror: b": 1}})",
        R"({"reward": 1, "parts": {"a": {"b": 1}}})", "[]", "1", "null"}) {
    EXPECT_NE(error_of(text), "") << text;
  }
  // Neither a reason nor the absence of one.
  for (const char* text : {R"({"reward": 1, "error": ""})", R"({"reward": 1, "error": false})"})
    EXPECT_THAT(error_of(text), HasSubstr("'error' must say what is wrong")) << text;
  Json many = {{"reward", 1}, {"parts", Json::object()}};
  for (int i = 0; i < 257; ++i) many["parts"]["p" + std::to_string(i)] = 1;
  EXPECT_NE(error_of(many.dump()).find("at most 256"), std::string::npos);
  many["parts"] = {{std::string(101, 'n'), 1}};
  EXPECT_NE(error_of(many.dump()).find("1 to 100"), std::string::npos);
  EXPECT_EQ(error_of(R"({"error": "\u001b[2J\nerror: forged"})").find_first_of("\x1b\n"),
            std::string::npos);
  EXPECT_LT(error_of("{\"error\": \"" + std::string(100'000, 'e') + "\"}").size(), 300u);
}

TEST(RewardWire, NamesKeysThatNothingReads) {
  const Json misspelt = {{"id", "1"}, {"reward", 1}, {"obsrvation", "on"}, {"done", false}};
  EXPECT_EQ(from_wire(misspelt).unread, (std::vector<std::string>{"obsrvation", "done"}));
  EXPECT_EQ(episode_from_wire({{"reward", 1}, {"done", true}, {"info", {}}}, Ask::kScore).unread,
            (std::vector<std::string>{"info"}));
}

TEST(HttpReward, RefusesOptionsOutOfRange) {
  HttpOptions options;
  options.url = "http://127.0.0.1:1/";
  options.batch = 0;
  EXPECT_THROW(reward_of(options), ConfigError);
}

TEST(HttpReward, ShowsNoPasswordAndTakesNoPlaceholder) {
  HttpOptions options;
  options.retries = 1;
  options.backoff_s = 0;
  options.token = "t0ken";
  for (const char* url : {"http://ann:passw0rd@127.0.0.1:1/score", "http://passw0rd@127.0.0.1:1/",
                          "http://ann:passw0rd@no.such.host.invalid/", "ftp://a:passw0rd@host/"}) {
    options.url = url;
    ::testing::internal::CaptureStderr();
    const auto scores = reward_of(options)->score(std::vector<Sample>(1));
    const std::string said = ::testing::internal::GetCapturedStderr() + *scores[0].error;
    EXPECT_NE(said.find("(hidden)"), std::string::npos) << url;
    EXPECT_EQ(said.find("passw0rd"), std::string::npos) << url;
    EXPECT_EQ(said.find("t0ken"), std::string::npos) << url;
  }
  // A written configuration has these in the place of what nobody else may know.
  options.url = "http://127.0.0.1:1/";
  options.token = "(hidden)";
  EXPECT_THROW(reward_of(options), ConfigError);
  options.token = "";
  options.url = "http://(hidden)@127.0.0.1:1/";
  EXPECT_THROW(reward_of(options), ConfigError);
}

}  // namespace
}  // namespace heddle::reward
