#include "base/json.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>

#include "base/quote.h"
#include "testing/message_of.h"

namespace heddle {
namespace {

using ::testing::HasSubstr;
using testing::message_of;
using ::testing::Not;

std::string repeated(std::string_view text, int count) {
  std::string all;
  for (int i = 0; i < count; ++i) all += text;
  return all;
}

TEST(Json, NestingIsRefusedBeyondTheLimitAndReadUpToIt) {
  const std::vector<std::pair<std::string, std::string>> brackets = {
      {"[", "]"}, {"{\"a\":", "}"}, {"[{\"b\":", "}]"}};
  for (const auto& [open, close] : brackets) {
    for (const int depth : {100, 5'000, 1'000'000}) {
      const std::string text = repeated(open, depth) + "1" + repeated(close, depth);
      EXPECT_THAT(message_of([&] { json::parse(text); }), HasSubstr("nested deeper than 64"));
      EXPECT_THAT(message_of([&] { json::parse<nlohmann::json>(repeated(open, depth)); }),
                  HasSubstr("nested deeper than 64"));
    }
  }
  const std::string deepest = repeated("[", 64) + repeated("]", 64);
  EXPECT_EQ(json::parse(deepest).dump(), deepest);
  EXPECT_EQ(json::parse("[" + deepest + "]", {.depth = 65}).size(), 1u);
}

TEST(Json, ManyKeysTakeLinearTimeAndKeepTheirOrder) {
  std::string text = "{";
  for (int i = 0; i < 400'000; ++i) text += fmt::format("\"key {}\":{},", 1'000'000 - i, i);
  text.back() = '}';
  const auto begin = std::chrono::steady_clock::now();
  const auto value = json::parse(text);
  EXPECT_EQ(json::parse<nlohmann::json>(text).size(), 400'000u);
  // A scan for each key takes minutes; the bound leaves room for sanitizers and busy machines.
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20));
  EXPECT_EQ(value.begin().key(), "key 1000000");
  EXPECT_EQ(value.at("key 600001"), 399'999);
}

TEST(Json, KeysThatOccurTwiceAreNamed) {
  std::string many = "{";
  for (int i = 0; i < 100; ++i) many += fmt::format("\"k{}\":0,", i);
  for (const std::string& text :
       {std::string(R"({"a":1,"a":2})"), std::string(R"([{"b":{"a":1,"c":2,"\u0061":2}}])"),
        many + "\"k5\":1}", many + "\"k99\":1}", std::string(R"({"":1,"":1})")}) {
    EXPECT_THAT(message_of([&] { json::parse(text); }), HasSubstr("occurs twice")) << text;
    EXPECT_THAT(message_of([&] { json::parse<nlohmann::json>(text); }), HasSubstr("occurs twice"));
  }
  EXPECT_EQ(json::parse(R"([{"a":1},{"a":2}])").size(), 2u);
}

TEST(Json, LongNumbersKeysAndManyValuesAreRefused) {
  EXPECT_THAT(message_of([] { json::parse("0." + std::string(4999, '1')); }),
              HasSubstr("5001 digits"));
  EXPECT_THAT(message_of([] { json::parse(std::string(5000, '1')); }),
              HasSubstr("too large for a float"));
  EXPECT_THAT(message_of([] { json::parse("-0." + std::string(100'000, '1')); }),
              HasSubstr("at most 4300"));
  EXPECT_THAT(message_of([] { json::parse("{\"" + std::string(70'000, 'k') + "\":1}"); }),
              HasSubstr("a key has 70000 bytes"));
  EXPECT_THAT(message_of([] { json::parse("[1,[2,3],{\"a\":4}]", {.values = 4}); }),
              HasSubstr("more than 4 values"));
  EXPECT_THAT(message_of([] { json::parse("1e999"); }), HasSubstr("too large for a float"));
}

TEST(Json, IntegersBeyond64BitsKeepTheirDigitsWhereAsked) {
  const auto value =
      json::parse("[-9223372036854775809,18446744073709551616,1.5]", {.keeps_big_integers = true});
  EXPECT_TRUE(value[0].is_binary());
  EXPECT_EQ(std::string(value[1].get_binary().begin(), value[1].get_binary().end()),
            "18446744073709551616");
  EXPECT_EQ(value[2], 1.5);
  EXPECT_TRUE(json::parse("18446744073709551616").is_number_float());
}

TEST(Json, ErrorsNameThePlaceAndQuoteNothingLong) {
  EXPECT_EQ(message_of([] { json::parse("{\"a\": tru }"); }),
            "not valid JSON: unexpected ' ' at column 10");
  EXPECT_EQ(message_of([] { json::parse("{\n \"a\": }"); }),
            "not valid JSON: unexpected '}' at line 2, column 7");
  EXPECT_EQ(message_of([] { json::parse("[1, NaN]"); }),
            "not valid JSON: NaN at column 5 is no JSON number; write null (Python's json.dumps "
            "writes it unless allow_nan=False)");
  EXPECT_THAT(message_of([] { json::parse("[\"\xff\"]"); }), HasSubstr("byte 0xFF"));
  for (const char* half : {R"(["\ud83dx"])", R"(["\uDC00"])", R"(["\ud83d\n"])", R"(["\ud83d"])",
                           R"(["\ud83d\u0041"])", R"(["\ud83d\ud83d\ude00"])"}) {
    EXPECT_THAT(message_of([half] { json::parse(half); }),
                HasSubstr("column 3 is half of a surrogate pair"))
        << half;
  }
  EXPECT_EQ(json::parse(R"(["\ud83d\ude00"])")[0], "\xf0\x9f\x98\x80");
  for (const char* other :
       {R"(["\ud83d\ude00"x])", R"(["\ud83d\ude00" x])", "[\"\\\\ud83d\xff\"]"}) {
    EXPECT_THAT(message_of([other] { json::parse(other); }), Not(HasSubstr("surrogate"))) << other;
  }
  EXPECT_THAT(message_of([] { json::parse("[\"" + std::string(1 << 20, 'x')); }),
              HasSubstr("the text ends inside a value"));
  EXPECT_THAT(message_of([] { json::parse("[\x1b]"); }), HasSubstr("unexpected '\\x1b'"));
  EXPECT_LT(message_of([] {
              json::parse("{\"" + std::string(60'000, 'x') + "\":1,\"" + std::string(60'000, 'x') +
                          "\":1}");
            }).size(),
            400u);
}

TEST(Quote, NothingReachesATerminalAsACommand) {
  EXPECT_EQ(text::shown("plain, Grüße, 好, 🙂"), "plain, Grüße, 好, 🙂");
  EXPECT_EQ(text::shown("a\nerror: forged"), "a\\nerror: forged");
  EXPECT_EQ(text::shown("\x1b[31mred\x1b[0m"), "\\x1b[31mred\\x1b[0m");
  EXPECT_EQ(text::shown("bell\a, tab\t, nul" + std::string(1, '\0')),
            "bell\\x07, tab\\t, nul\\x00");
  EXPECT_EQ(text::shown("\xc2\x9b"
                        "31m"),
            "\\x9b31m");  // CSI of 8 bits
  EXPECT_EQ(text::shown("\xe2\x80\xae"
                        "txt.exe"),
            "\\u202etxt.exe");                                  // right to left
  EXPECT_EQ(text::shown("\xff\xfe \xc3"), "\\xff\\xfe \\xc3");  // not UTF-8
  EXPECT_EQ(text::shown("\xc0\x8a \xed\xa0\x80"), "\\xc0\\x8a \\xed\\xa0\\x80");
  EXPECT_EQ(text::shown(std::string(1 << 20, 'x')).size(), 203u);
  EXPECT_EQ(text::shown(std::string(200, 'x')).size(), 200u);
}

}  // namespace
}  // namespace heddle
