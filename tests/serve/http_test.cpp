#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <future>
#include <mutex>
#include <optional>
#include <span>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "client.h"
#include "http_fixture.h"
#include "serve/http/server.h"

namespace heddle::serve {
namespace {

using testing::body_of;
using testing::Client;
using testing::echo;
using testing::error_text;
using ::testing::HasSubstr;
using testing::Http;
using ::testing::StartsWith;
using testing::status_of;

TEST_F(Http, RoutesByMethodAndPattern) {
  add("POST", "/runs/{run}", echo());
  add("DELETE", "/runs/{run}/checkpoints/{id+}/publish", echo());
  start();
  Client client(port_);
  EXPECT_EQ(body_of(client.ask("POST", "/runs/a%20b?x=1%2B1", "hello")), "hello|run=a b|x=1+1");
  EXPECT_EQ(body_of(client.ask("DELETE", "/runs/r/checkpoints/weights/n/publish")),
            "|id=weights/n|run=r");
  const std::string wrong = client.ask("GET", "/runs/a");
  EXPECT_EQ(status_of(wrong), 405);
  EXPECT_THAT(wrong, HasSubstr("\r\nAllow: POST\r\n"));
  EXPECT_THAT(client.ask("POST", "/nothing"), HasSubstr("404: no such address: POST /nothing"));
  EXPECT_EQ(status_of(client.ask("POST", "/runs/a%00b")), 404);
  EXPECT_EQ(status_of(client.ask("POST", "/runs/a?x=%zz")), 400);
}

TEST_F(Http, WordsErrorsOfHandlersAndAnswersForSilentOnes) {
  add("GET", "/known", [](Request&&, const Responder&) { throw HttpError(429, "too many", 7); });
  add("GET", "/user", [](Request&&, const Responder&) { throw DataError("field 'x' is missing"); });
  add("GET", "/defect", [](Request&&, const Responder&) { throw std::runtime_error("secret"); });
  add(
      "GET", "/silent", [](Request&&, const Responder&) {}, true);
  start();
  Client client(port_);
  const std::string busy = client.ask("GET", "/known");
  EXPECT_THAT(busy, StartsWith("HTTP/1.1 429"));
  EXPECT_THAT(busy, HasSubstr("Retry-After: 7"));
  EXPECT_EQ(body_of(busy), "429: too many");
  EXPECT_EQ(body_of(client.ask("GET", "/user")), "400: field 'x' is missing");
  const std::string defect = client.ask("GET", "/defect", "", "x-request-id: mine\r\n");
  EXPECT_THAT(defect, HasSubstr("x-request-id: mine"));
  EXPECT_THAT(defect, HasSubstr("request mine"));
  EXPECT_THAT(defect, Not(HasSubstr("secret")));
  EXPECT_EQ(body_of(client.ask("GET", "/silent")), "500: internal error");
}

TEST_F(Http, AsksForTheKeyAndItsScope) {
  server_.authenticate_by([](const Request& request) {
    if (request.header("x-api-key") != "good") throw HttpError(401, "no such key");
    return Caller{"tenant", "go", {"sample"}};
  });
  add("GET", "/open", echo());
  add("GET", "/sample", echo(), false, "sample", false);
  add("GET", "/train", echo(), false, "train", false);
  start();
  Client client(port_);
  EXPECT_EQ(status_of(client.ask("GET", "/open")), 200);
  EXPECT_EQ(status_of(client.ask("GET", "/sample")), 401);
  EXPECT_EQ(status_of(client.ask("GET", "/sample", "", "X-API-Key: good\r\n")), 200);
  EXPECT_EQ(body_of(client.ask("GET", "/train", "", "X-API-Key: good\r\n")),
            "403: the key lacks the scope 'train'");
}

TEST_F(Http, AnswersParkedRequestsFromAnotherThread) {
  std::mutex mutex;
  std::vector<Responder> parked;
  add("POST", "/park", [&](Request&&, const Responder& responder) {
    const std::lock_guard lock(mutex);
    parked.push_back(responder);
  });
  add("POST", "/now", echo());
  start();
  std::vector<std::unique_ptr<Client>> clients;
  for (int i = 0; i < 300; ++i) {
    clients.push_back(std::make_unique<Client>(port_));
    clients.back()->send("POST /park HTTP/1.1\r\nHost: t\r\nContent-Length: 0\r\n\r\n");
  }
  while (true) {
    const std::lock_guard lock(mutex);
    if (parked.size() == 300) break;
  }
  EXPECT_EQ(body_of(Client(port_).ask("POST", "/now", "x")), "x");
  for (const Responder& responder : parked) responder.answer(200, "later");
  for (const auto& client : clients) EXPECT_EQ(body_of(client->answer()), "later");
  parked.clear();
}

TEST_F(Http, KeepsOrderOnOneConnection) {
  add("POST", "/slow", [this](Request&&, const Responder& responder) {
    server_.post_after(0.05, [responder] { responder.answer(200, "slow"); });
  });
  add("POST", "/now", echo());
  start();
  Client client(port_);
  client.send(
      "POST /slow HTTP/1.1\r\nHost: t\r\nContent-Length: 0\r\n\r\n"
      "POST /now HTTP/1.1\r\nHost: t\r\nContent-Length: 1\r\n\r\n2");
  EXPECT_EQ(body_of(client.answer()), "slow");
  EXPECT_EQ(body_of(client.answer()), "2");
}

TEST_F(Http, ALongAnswerComesWithoutAPause) {
  add("GET", "/long", [](Request&&, const Responder& responder) {
    responder.answer(200, std::string(20'000, 'x'), "text/plain");
  });
  start();
  Client client(port_);
  std::vector<double> times_s;
  for (int i = 0; i < 11; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    EXPECT_EQ(body_of(client.ask("GET", "/long")).size(), 20'000U);
    times_s.push_back(
        std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }
  // The pause would be in each but the first, whose acknowledgement is not delayed yet; what a busy
  // machine adds is not in all of them.
  EXPECT_LT(std::ranges::min(std::span(times_s).subspan(1)), 0.03)
      << "the time of a delayed acknowledgement is 0.04 s";
}

TEST_F(Http, StreamsAndNoticesAClientThatGoes) {
  std::promise<void> gone;
  std::optional<Responder> stream;
  std::promise<void> started;
  add("GET", "/stream", [&](Request&&, const Responder& responder) {
    stream = responder;
    responder.start(200, "text/event-stream", {{"Cache-Control", "no-cache"}});
    responder.write("data: 1\n\n");
    responder.on_gone([&] { gone.set_value(); });
    started.set_value();
  });
  start();
  {
    Client client(port_);
    client.send("GET /stream HTTP/1.1\r\nHost: t\r\n\r\n");
    EXPECT_THAT(client.read_until("data: 1\n\n"), HasSubstr("Transfer-Encoding: chunked"));
    started.get_future().wait();
    stream->write("data: 2\n\n");
    client.read_until("data: 2\n\n");
    EXPECT_FALSE(stream->is_gone());
  }
  ASSERT_EQ(gone.get_future().wait_for(std::chrono::seconds(60)), std::future_status::ready);
  EXPECT_TRUE(stream->is_gone());
  stream->write("data: 3\n\n");
  stream->end();
  stream.reset();
}

TEST_F(Http, NoticesThatAParkedClientGoes) {
  std::promise<void> arrived, gone;
  std::vector<Responder> parked;
  add("POST", "/park", [&](Request&&, const Responder& responder) {
    parked.push_back(responder);
    responder.on_gone([&] { gone.set_value(); });
    arrived.set_value();
  });
  start();
  {
    Client client(port_);
    client.send("POST /park HTTP/1.1\r\nHost: t\r\nContent-Length: 0\r\n\r\n");
    arrived.get_future().wait();
  }
  EXPECT_EQ(gone.get_future().wait_for(std::chrono::seconds(60)), std::future_status::ready);
  parked.clear();
}

TEST_F(Http, RequestsThatCannotBeReadGetTheWordsOfTheApi) {
  add("POST", "/echo", echo());
  std::vector<int> statuses;
  server_.observe_by([&](const std::string&, int status, double) { statuses.push_back(status); });
  start();
  const std::string post = "POST /echo HTTP/1.1\r\nHost: test\r\n";
  const struct {
    std::string request;
    int status;
    const char* message;
  } cases[] = {
      {post + "Content-Length: 200001\r\n\r\n" + std::string(200'001, 'x'), 413,
       "413: the body has more than 200000 bytes"},
      {post + "Transfer-Encoding: chunked\r\n\r\n40000\r\n", 413, "413: the body has more"},
      {post + "Content-Length: two\r\n\r\n", 400, "400: the request is not HTTP/1.1 that can"},
      {post + "Expect: much\r\nContent-Length: 1\r\n\r\nx", 417, "expected 100-continue"},
      {"nothing\r\n\r\n", 400, "its first line"},
      {"FROB /echo HTTP/1.1\r\n\r\n", 501, "501: the method is not known"},
      {post + "X-Long: " + std::string(20'000, 'x') + "\r\n\r\n", 400, "more than 16384 bytes"},
  };
  for (const bool had_another : {false, true}) {
    for (const auto& [request, status, message] : cases) {
      Client client(port_);
      if (had_another) client.ask("POST", "/echo", "x");
      client.send(request);
      const std::string answer = client.answer();
      EXPECT_EQ(status_of(answer), status) << answer;
      EXPECT_THAT(answer, HasSubstr("\r\nContent-Type: application/json\r\n"));
      EXPECT_THAT(body_of(answer), HasSubstr(message));
      EXPECT_EQ(client.read_until("more"), "") << "the connection ends";
    }
  }
  EXPECT_EQ(status_of(Client(port_).ask("POST", "/echo", "x")), 200);
  stop();
  std::erase(statuses, 200);
  EXPECT_EQ(statuses, (std::vector{413, 413, 400, 417, 400, 501, 400,  //
                                   413, 413, 400, 417, 400, 501, 400}));
}

/// A process that keeps `count` connections without a whole request: silent ones, ones that stop in
/// a header or in a body, and ones that say a byte now and then. Returns when all of them have
/// asked for their connections; the process ends when it is killed.
pid_t start_crowd(int port, int count) {
  int begun[2];
  if (pipe(begun) != 0) throw std::runtime_error("no pipe");
  const pid_t crowd = fork();
  if (crowd != 0) {
    char byte;
    close(begun[1]);
    const bool is_there = read(begun[0], &byte, 1) == 1;
    close(begun[0]);
    if (!is_there) throw std::runtime_error("the crowd ended");
    return crowd;
  }
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<std::uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  std::vector<int> connections(static_cast<std::size_t>(count), -1);
  for (int round = 0;; ++round) {
    for (std::size_t k = 0; k < connections.size(); ++k) {
      int& mine = connections[k];
      const bool is_drop = k % 4 == 3;
      if (mine >= 0 && !(is_drop && send(mine, "x", 1, MSG_NOSIGNAL | MSG_DONTWAIT) < 0)) continue;
      if (mine >= 0) close(mine);
      mine = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
      connect(mine, reinterpret_cast<sockaddr*>(&address), sizeof address);
      constexpr std::array<std::string_view, 4> kBegun = {
          "", "POST /echo HTTP/1.1\r\nHost: t\r\nX-Long: ",
          "POST /echo HTTP/1.1\r\nHost: t\r\nContent-Length: 9\r\n\r\n1", "P"};
      send(mine, kBegun[k % 4].data(), kBegun[k % 4].size(), MSG_NOSIGNAL);
    }
    if (round == 0 && write(begun[1], "x", 1) != 1) _exit(1);
    poll(nullptr, 0, 50);  // its pace: nobody waits for it
  }
}

TEST_F(Http, ConnectionsThatAskNothingKeepNobodyOut) {
  add("POST", "/echo", echo());
  add("POST", "/slow", [this](Request&&, const Responder& responder) {
    server_.post_after(3, [responder] { responder.answer(200, "slow"); });
  });
  start();
  rlimit before{};
  getrlimit(RLIMIT_NOFILE, &before);
  const rlimit few{200, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
  Client waiting(port_);
  waiting.send("POST /slow HTTP/1.1\r\nHost: t\r\nContent-Length: 0\r\n\r\n");
  const pid_t crowd = start_crowd(port_, 500);
  // A client may find no descriptor, of this process too, or be taken for one of them: it comes
  // again.
  for (int answered = 0; answered < 20;) {
    try {
      answered += body_of(Client(port_).ask("POST", "/echo", "x")) == "x";
    } catch (const std::runtime_error&) {
      std::this_thread::yield();
    }
  }
  kill(crowd, SIGKILL);
  waitpid(crowd, nullptr, 0);
  EXPECT_EQ(body_of(waiting.answer()), "slow");
  setrlimit(RLIMIT_NOFILE, &before);
}

TEST_F(Http, DrainsBeforeItEnds) {
  std::promise<void> arrived;
  add("POST", "/slow", [&](Request&&, const Responder& responder) {
    server_.post_after(0.3, [responder] { responder.answer(200, "slow"); });
    arrived.set_value();
  });
  start();
  Client client(port_);
  client.send("POST /slow HTTP/1.1\r\nHost: t\r\nContent-Length: 0\r\n\r\n");
  arrived.get_future().wait();
  stop_ = true;
  EXPECT_EQ(body_of(client.answer()), "slow");
  stop();
  EXPECT_TRUE(drained_);
  EXPECT_THROW(Client{port_}, std::runtime_error);
}

TEST_F(Http, AServerThatEndsTakesNoNewWorkOnOldConnections) {
  std::optional<Responder> parked;
  add("POST", "/park", [&](Request&&, const Responder& responder) { parked = responder; });
  server_.route({"POST", "/work", echo(), error_text, "", true, false, Cost::kGeneration});
  add("GET", "/look", echo());
  start();
  Client waits(port_), works(port_), looks(port_);
  for (Client* client : {&works, &looks})
    EXPECT_EQ(status_of(client->ask("POST", "/work", "x")), 200);
  waits.request("POST", "/park");
  EXPECT_EQ(status_of(looks.ask("GET", "/look")), 200);  // the one before it has been read too
  stop_ = true;
  while (!drained_) std::this_thread::yield();
  const std::string refused = works.ask("POST", "/work", "x");
  EXPECT_EQ(status_of(refused), 503);
  EXPECT_THAT(refused, HasSubstr("Retry-After: 5"));
  const std::string answer = looks.ask("GET", "/look");
  EXPECT_EQ(status_of(answer), 200);
  for (const std::string& last : {refused, answer})
    EXPECT_THAT(last, HasSubstr("Connection: close"));
  server_.post([&] { parked->answer(200, "done"); });
  EXPECT_EQ(body_of(waits.answer()), "done");
  stop();
  parked.reset();
}

// Who observes may go before the server does.
TEST(HttpEnd, RequestsWithoutAnAnswerEndWithTheLoop) {
  std::optional<Responder> parked;
  std::promise<void> has_arrived;
  std::vector<int> told;
  ServerOptions options;
  options.drain_s = 0;
  Server server(options);
  server.observe_by([&](const std::string&, int status, double) { told.push_back(status); });
  server.route({"POST", "/park",
                [&](Request&&, const Responder& responder) {
                  parked = responder;
                  has_arrived.set_value();
                },
                error_text, "", true});
  Client client(server.listen("127.0.0.1", 0));
  std::atomic<bool> stop = false;
  std::thread thread([&] { server.run(stop); });
  client.request("POST", "/park");
  has_arrived.get_future().wait();
  stop = true;
  thread.join();
  EXPECT_EQ(told, std::vector{0});
  parked.reset();
}

TEST_F(Http, HeadIsGetWithoutItsBody) {
  add("GET", "/known", echo());
  add("POST", "/known", echo());
  start();
  Client client(port_);
  client.send("HEAD /known?a=b HTTP/1.1\r\nHost: test\r\n\r\n");
  const std::string head = client.read_until("\r\n\r\n");
  EXPECT_EQ(status_of(head), 200);
  EXPECT_THAT(head, HasSubstr("Content-Length: 4\r\n"));
  EXPECT_EQ(body_of(client.ask("GET", "/known?a=b")), "|a=b")
      << "the next answer on the connection";
  const std::string options = client.ask("OPTIONS", "/known");
  EXPECT_EQ(status_of(options), 405);
  EXPECT_THAT(options, HasSubstr("\r\nAllow: GET, POST\r\n"));
}

}  // namespace
}  // namespace heddle::serve
