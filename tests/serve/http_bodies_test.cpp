// Bodies of requests: how large they may be, where they end, and how they are encoded.

#include <string>
#include <utility>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "bytes.h"
#include "client.h"
#include "http_fixture.h"
#include "serve/http/body.h"
#include "testing/gzip.h"

namespace heddle::serve {
namespace {

using heddle::testing::gzip_of;
using testing::body_of;
using testing::Client;
using testing::echo;
using testing::error_text;
using testing::Http;
using testing::status_of;
using testing::zstd_of;

std::string decoded(std::string body, const std::string& encoding) {
  decode_body(body, encoding, 1000);
  return body;
}

int status_of_body(const std::string& body, const std::string& encoding) {
  try {
    decoded(body, encoding);
    return 200;
  } catch (const HttpError& error) {
    return error.status();
  }
}

TEST_F(Http, LimitsBodiesAndHeaders) {
  add("POST", "/echo", echo());
  start();
  Client client(port_);
  EXPECT_EQ(body_of(client.ask("POST", "/echo", std::string(100'001, 'x'))),
            "413: the body has 100001 bytes: 100000 are allowed");
  EXPECT_EQ(status_of(client.ask("POST", "/echo", std::string(100'000, 'x'))), 200);
  const std::string long_header = "X-Long: " + std::string(20'000, 'x') + "\r\n";
  EXPECT_NE(status_of(Client(port_).ask("POST", "/echo", "", long_header)), 200);
  EXPECT_EQ(status_of(Client(port_).ask("POST", "/echo", "x")), 200);
}

// One that is cut off while it sends sees no answer, and would send again.
TEST_F(Http, AClientThatSendsFarTooMuchGetsItsAnswer) {
  add("POST", "/echo", echo());
  start();
  Client client(port_);
  EXPECT_TRUE(client.send("POST /echo HTTP/1.1\r\nHost: test\r\nContent-Length: 30000000\r\n\r\n" +
                          std::string(30'000'000, 'x')));
  EXPECT_EQ(status_of(client.answer()), 413);
}

TEST_F(Http, ARouteMayAnswerForABodyThatIsTooLargeOrBroken) {
  const auto refused = [](Request&& request, const Responder& responder, const HttpError& error) {
    responder.answer(200, std::to_string(error.status()) + " " + request.body.substr(0, 6) + " " +
                              std::to_string(request.body.size()));
  };
  server_.route({"POST", "/work", echo(), error_text, "", true, true, Cost::kNone, refused});
  start();
  Client client(port_);
  const std::string text = "begin " + std::string(150'000, 'x'),
                    zstd = "Content-Encoding: zstd\r\n";
  EXPECT_EQ(body_of(client.ask("POST", "/work", text)), "413 begin  150006");
  EXPECT_EQ(body_of(client.ask("POST", "/work", zstd_of(text), zstd)), "413 begin  100000");
  EXPECT_EQ(body_of(client.ask("POST", "/work", zstd_of(text.substr(0, 100)) + "rest", zstd)),
            "400 begin  100");
  EXPECT_EQ(body_of(client.ask("POST", "/work", "text")), "text");
}

// Bytes after the headers would be taken for the next request, be they the body of this one.
TEST_F(Http, WhereABodyEndsIsKnownOrTheConnectionEnds) {
  add("POST", "/echo", echo());
  start();
  const std::string inner = "POST /echo HTTP/1.1\r\nHost: test\r\nContent-Length: 2\r\n\r\n{}";
  for (const auto& [headers, status] : std::initializer_list<std::pair<std::string, int>>{
           {"Transfer-Encoding: gzip\r\n", 501},
           {"Transfer-Encoding: gzip, chunked\r\n", 501},
           {"Content-Length: 0\r\nContent-Length: 75\r\n", 400}}) {
    Client client(port_);
    client.send("POST /echo HTTP/1.1\r\nHost: test\r\n" + headers + "\r\n0\r\n\r\n" + inner);
    EXPECT_EQ(status_of(client.answer()), status) << headers;
    EXPECT_EQ(client.read_until("more"), "") << headers;
  }
}

TEST(Body, UndoesEncodingsWithinTheLimit) {
  const std::string text(1000, 'a');
  for (const auto& [encoding, encode] :
       {std::pair{"zstd", &zstd_of}, std::pair{"gzip", &gzip_of}}) {
    EXPECT_EQ(decoded(encode(text), encoding), text);
    EXPECT_EQ(status_of_body(encode(text + "a"), encoding), 413);
    EXPECT_EQ(status_of_body(encode(std::string(50'000'000, '\0')), encoding), 413);
    for (std::size_t cut = 0; cut < encode(text).size(); ++cut)
      EXPECT_EQ(status_of_body(encode(text).substr(0, cut), encoding), 400) << encoding << cut;
    EXPECT_EQ(status_of_body("nonsense", encoding), 400);
    EXPECT_EQ(decoded(encode("one ") + encode("two"), encoding), "one two");
    EXPECT_EQ(status_of_body(encode("one ") + "rest", encoding), 400) << encoding;
  }
  EXPECT_EQ(status_of_body("x", "br"), 415);
  EXPECT_EQ(decoded("x", "identity"), "x");
}

}  // namespace
}  // namespace heddle::serve
