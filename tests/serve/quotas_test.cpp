#include "serve/quotas.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>

namespace heddle::serve {
namespace {

using ::testing::HasSubstr;

/// The refusal of a request, if it is one.
std::optional<HttpError> refusal(Quotas& quotas, const Caller& caller, Cost cost) {
  try {
    quotas.admit(caller, cost);
  } catch (const HttpError& error) {
    return error;
  }
  return std::nullopt;
}

TEST(Quotas, CountRequestsOfATenantAgainstItsMinute) {
  Quotas quotas;
  const Caller ann{"ann", "", {}, {.requests_per_minute = 2}}, bob{"bob", "", {}, {}};
  const Headers first = quotas.admit(ann, Cost::kRequest).headers;
  EXPECT_EQ(first.at("x-ratelimit-limit-requests"), "2");
  EXPECT_EQ(first.at("x-ratelimit-remaining-requests"), "1");
  EXPECT_FALSE(first.contains("x-ratelimit-limit-tokens"));
  quotas.admit(ann, Cost::kGeneration);
  const auto refused = refusal(quotas, ann, Cost::kRequest);
  ASSERT_TRUE(refused);
  EXPECT_EQ(refused->status(), 429);
  EXPECT_THAT(refused->what(), HasSubstr("2 requests a minute"));
  // One of two a minute is there again after 30 seconds, all of them after 60.
  EXPECT_EQ(refused->headers().at("Retry-After"), "30");
  EXPECT_EQ(refused->headers().at("x-ratelimit-remaining-requests"), "0");
  EXPECT_THAT(refused->headers().at("x-ratelimit-reset-requests"),
              ::testing::AnyOf("1m0s", HasSubstr("59."), "60s"));
  for (int i = 0; i < 5; ++i) EXPECT_FALSE(refusal(quotas, bob, Cost::kRequest));
}

TEST(Quotas, TakeTokensWhenTheyAreKnownAndWaitForThemAfterwards) {
  Quotas quotas;
  const Caller ann{"ann", "", {}, {.tokens_per_minute = 60}};
  Admission long_one = quotas.admit(ann, Cost::kGeneration);
  EXPECT_EQ(long_one.headers.at("x-ratelimit-remaining-tokens"), "60");
  long_one.meter->add_tokens(Meter::Tokens::kTrained, 89);
  const auto refused = refusal(quotas, ann, Cost::kGeneration);
  ASSERT_TRUE(refused);
  EXPECT_THAT(refused->what(), HasSubstr("60 tokens a minute"));
  EXPECT_EQ(refused->headers().at("Retry-After"), "30");
  EXPECT_EQ(refused->headers().at("x-ratelimit-remaining-tokens"), "0");
}

TEST(Quotas, WorkWaitsForTokensInsteadOfBeingRefused) {
  Quotas quotas;
  const Caller ann{"ann", "", {}, {.tokens_per_minute = 60}}, bob{"bob", "", {}, {}};
  const Admission first = quotas.admit(ann, Cost::kRequest);
  EXPECT_FALSE(first.meter->wait());
  first.meter->add_tokens(Meter::Tokens::kTrained, 89);
  const Admission second = quotas.admit(ann, Cost::kRequest);
  const auto wait = second.meter->wait();
  ASSERT_TRUE(wait);
  EXPECT_GT(wait->seconds, 29);
  EXPECT_LE(wait->seconds, 30);
  EXPECT_THAT(wait->reason, HasSubstr("60 tokens a minute"));
  EXPECT_FALSE(quotas.admit(bob, Cost::kRequest).meter->wait());
}

TEST(Quotas, CountTokensByWhatTheyWereFor) {
  Quotas quotas;
  const Admission ann = quotas.admit({"ann", "", {}, {}}, Cost::kGeneration);
  ann.meter->add_tokens(Meter::Tokens::kRead, 5);
  ann.meter->add_tokens(Meter::Tokens::kGenerated, 2);
  ann.meter->add_tokens(Meter::Tokens::kTrained, 11);
  ann.meter->add_tokens(Meter::Tokens::kRead, 1);
  const Quotas::Use use = quotas.uses().at(0);
  EXPECT_EQ(use.read, 6);
  EXPECT_EQ(use.generated, 2);
  EXPECT_EQ(use.trained, 11);
  EXPECT_EQ(use.tokens(), 19);
}

TEST(Quotas, CountAnswersUnderWayUntilTheyEnd) {
  Quotas quotas;
  const Caller ann{"ann", "", {}, {.max_concurrent = 2}};
  Admission first = quotas.admit(ann, Cost::kGeneration),
            second = quotas.admit(ann, Cost::kGeneration);
  EXPECT_TRUE(refusal(quotas, ann, Cost::kGeneration));
  EXPECT_FALSE(refusal(quotas, ann, Cost::kRequest));
  first.meter->finish();
  first.meter->finish();  // counts once
  Admission third = quotas.admit(ann, Cost::kGeneration);
  EXPECT_TRUE(refusal(quotas, ann, Cost::kGeneration));
  second.meter.reset();
  EXPECT_FALSE(refusal(quotas, ann, Cost::kGeneration));
  const auto uses = quotas.uses();
  ASSERT_EQ(uses.size(), 1U);
  EXPECT_EQ(uses[0].tenant, "ann");
  EXPECT_EQ(uses[0].refused, 2);
}

}  // namespace
}  // namespace heddle::serve
