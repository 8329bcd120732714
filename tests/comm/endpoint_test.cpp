#include "comm/endpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/errors.h"

namespace heddle::comm {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

TEST(Endpoint, IsWrittenAsItIsRead) {
  for (const char* text : {"node7:29500", "10.0.0.1:1", "[::1]:29500", "[fe80::1%eth0]:0"}) {
    EXPECT_EQ(parse_endpoint(text, "--master").to_string(), text);
  }
}

TEST(Endpoint, KnowsItsKindAndScope) {
  EXPECT_EQ(parse_endpoint("node7:1", "x").kind, Endpoint::Kind::kName);
  EXPECT_EQ(parse_endpoint("10.0.0.1:1", "x").kind, Endpoint::Kind::kIpv4);
  const Endpoint link_local = parse_endpoint("[fe80::1%eth0]:1", "x");
  EXPECT_EQ(link_local.kind, Endpoint::Kind::kIpv6);
  EXPECT_EQ(link_local.host, "fe80::1");
  EXPECT_EQ(link_local.scope, "eth0");
  EXPECT_EQ(link_local.address(), "fe80::1%eth0");
}

TEST(Endpoint, RefusesWhatIsAmbiguous) {
  for (const char* text : {"node7", "node7:", ":29500", "::1:29500", "[10.0.0.1]:1", "node7:65536",
                           "node7:-1", "no de:1", "node%eth0:1", "[::1]29500"}) {
    EXPECT_THAT([&] { parse_endpoint(text, "--master"); },
                ThrowsMessage<ConfigError>(HasSubstr("--master")))
        << text;
  }
}

}  // namespace
}  // namespace heddle::comm
