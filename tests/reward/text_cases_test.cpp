#include "base/errors.h"
#include "verifier_cases.h"

namespace heddle::reward::testing {
namespace {

TEST(ExactVerifier, TrimsAndNormalises) {
  expect_all("exact", "{}",
             {
                 {"Paris", "\"Paris\"", 1},
                 {"  Paris\n", "\"Paris\"", 1},
                 {"paris", "\"Paris\"", 0},
                 {"Paris.", "\"Paris\"", 0},
                 {"caf\u00e9", "\"cafe\u0301\"", 1},
                 {"cafe", "\"caf\u00e9\"", 0},
                 {"", "\"\"", 1},
                 {"12", "12", 1},
                 {"true", "true", 1},
                 {"b", "[\"a\", \"b\"]", 1},
                 {"c", "[\"a\", \"b\"]", 0},
                 {"\xff", "\"\ufffd\"", 1},
                 {"a  b", "\"a b\"", 0},
             });
  expect_all("exact", R"({"ignore_case": true})",
             {
                 {"paris", "\"PARIS\"", 1},
                 {"STRASSE", "\"stra\u00dfe\"", 1},
                 {"\u00c9T\u00c9", "\"\u00e9t\u00e9\"", 1},
                 {"lyon", "\"Paris\"", 0},
             });
  expect_all("exact", R"({"from": "tag"})",
             {
                 {"<think>no</think><answer> Paris </answer>", "\"Paris\"", 1},
                 {"Paris", "\"Paris\"", 0},
             });
}

TEST(ContainsVerifier, LooksForTheTruth) {
  expect_all("contains", "{}",
             {
                 {"It is Paris, of course", "\"Paris\"", 1},
                 {"It is paris", "\"Paris\"", 0},
                 {"Lyon", "\"Paris\"", 0},
                 {"b", "[\"a\", \"b\"]", 1},
                 {"anything", "\"\"", 0},
             });
  expect_all("contains", R"({"ignore_case": true})", {{"it is PARIS", "\"Paris\"", 1}});
}

TEST(ChoiceVerifier, FindsTheOneLetter) {
  expect_all("choice", "{}",
             {
                 {"C", "\"C\"", 1},
                 {"(C)", "\"C\"", 1},
                 {"C.", "\"C\"", 1},
                 {"**C**", "\"C\"", 1},
                 {"D", "\"C\"", 0},
                 {"The answer is C", "\"C\"", 1},
                 {"The answer is (C).", "\"C\"", 1},
                 {"Answer: C", "\"C\"", 1},
                 {"answer: **C**", "\"C\"", 1},
                 {"The answer is B. No, the answer is C", "\"C\"", 1},
                 {"The answer is C. No, the answer is B", "\"C\"", 0},
                 {"The answer is A or C", "\"C\"", 0},
                 {"A B C D", "\"C\"", 0},
                 {"A, B, C, D", "\"D\"", 0},
                 {"\\boxed{C}", "\"C\"", 1},
                 {"\\boxed{\\text{C}}", "\"C\"", 1},
                 {"\\boxed{C, D}", "\"C\"", 0},
                 {"<answer>C</answer>", "\"C\"", 1},
                 {"<answer>C. a dog</answer>", "\"C\"", 1},
                 {"<answer>A) a dog</answer>", "\"A\"", 1},
                 {"C", "2", 1},
                 {"A", "0", 1},
                 {"A", "1", 0},
                 {"C", "\"(C)\"", 1},
                 {"I think that\nC) Mercury", "\"C\"", 1},
                 {"c", "\"C\"", 0},
                 {"CAB", "\"C\"", 0},
                 {"", "\"C\"", 0},
                 {"First A looks good\nB", "\"B\"", 1},
             });
  expect_all("choice", R"({"choices": "YN"})", {{"Y", "\"Y\"", 1}, {"A", "\"Y\"", 0}});
}

TEST(RegexVerifier, SearchesOrMatchesWhole) {
  expect_all("regex", R"j({"pattern": "\\d+ apples"})j",
             {{"I have 12 apples", "null", 1}, {"I have apples", "null", 0}});
  expect_all("regex", R"j({"pattern": "\\d+", "match": "full"})j",
             {{"12", "null", 1}, {"12 apples", "null", 0}, {"", "null", 0}});
  expect_all("regex", R"j({"pattern": "yes", "ignore_case": true})j",
             {{"YES", "null", 1}, {"no", "null", 0}});
  expect_all(
      "regex", R"j({"pattern": "answer: (\\w+)", "compare_group": true})j",
      {{"answer: blue", "\"blue\"", 1}, {"answer: red", "\"blue\"", 0}, {"blue", "\"blue\"", 0}});
  expect_all("regex", R"j({"pattern": "^.$"})j", {{"\u00e9", "null", 1}, {"ab", "null", 0}});
  // Would take for ever without a bound; counts as no match.
  expect_all("regex", R"j({"pattern": "(a+)+$"})j", {{std::string(60000, 'a') + "b", "null", 0}});
  expect_all("regex", R"j({"pattern": "(x+x+)+y"})j", {{std::string(60000, 'x'), "null", 0}});
}

// No reader of data makes such a truth; whoever links the library may.
TEST(JsonVerifier, TakesATruthThatIsNotUtf8) {
  const auto verifier = make_verifier("json", Json::object(), "test");
  for (const std::string truth : {"\xFF", "{\"\xFF\": [1, 2]}", "\xC3", "a\xED\xA0\x80"}) {
    Sample sample;
    sample.completion = "{\"a\": [1, 2]}";
    sample.truth = truth;
    EXPECT_EQ(verifier->judge(sample).reward, 0);
  }
}

TEST(JsonVerifier, ReadsWholeTextOrFence) {
  expect_all("json", "{}",
             {
                 {"{\"a\": 1}", "null", 1},
                 {"{\"a\": 1", "null", 0},
                 {"hello", "null", 0},
                 {"[1, 2]", "[1, 2]", 1},
                 {"[2, 1]", "[1, 2]", 0},
                 {"{\"a\":1,\"b\":2}", "{\"b\": 2, \"a\": 1}", 1},
                 {"{\"a\":1}", "{\"a\": 2}", 0},
                 {"{\"a\":1}", "\"{\\\"a\\\": 1}\"", 1},
                 {"Here:\n```json\n{\"a\": 1}\n```", "{\"a\": 1}", 1},
                 {"Here:\n```\n{\"a\": 1}\n```\nDone", "{\"a\": 1}", 1},
                 {"```json\n{\"a\": 1}", "{\"a\": 1}", 0},
                 {"{\"a\": 1, \"a\": 2}", "null", 0},
                 {"NaN", "null", 0},
             });
  expect_all("json", R"({"keys": ["name", "age"]})",
             {
                 {"{\"name\": \"x\", \"age\": 3}", "null", 1},
                 {"{\"name\": \"x\"}", "null", 0},
                 {"[\"name\", \"age\"]", "null", 0},
             });
  expect_all("json", R"({"compare": false})", {{"{\"a\": 1}", "{\"a\": 2}", 1}});
}

TEST(FormatVerifier, WantsEachTagOnceInOrder) {
  expect_all("format", "{}",
             {
                 {"<think>a</think><answer>b</answer>", "null", 1},
                 {"<think>a</think>\n <answer>b</answer>\n", "null", 1},
                 {"<think></think><answer></answer>", "null", 1},
                 {"<answer>b</answer><think>a</think>", "null", 0},
                 {"<think>a</think>", "null", 0},
                 {"<answer>b</answer>", "null", 0},
                 {"<think>a<answer>b</answer></think>", "null", 0},
                 {"<think>a</think><answer>b</answer><answer>c</answer>", "null", 0},
                 {"<think>a</think><think>a</think><answer>b</answer>", "null", 0},
                 {"well <think>a</think><answer>b</answer>", "null", 0},
                 {"<think>a</think> so <answer>b</answer>", "null", 0},
                 {"<think>a</think><answer>b</answer> end", "null", 0},
                 {"<think>a</think><answer>b", "null", 0},
                 {"</think><think><answer>b</answer>", "null", 0},
                 {"", "null", 0},
             });
  expect_all("format", R"({"opened_by_prompt": true})",
             {
                 {"a</think><answer>b</answer>", "null", 1},
                 {"<think>a</think><answer>b</answer>", "null", 0},
                 {"<answer>b</answer>", "null", 0},
             });
  expect_all("format", R"({"text_outside": true})",
             {{"x <think>a</think> y <answer>b</answer> z", "null", 1}});
  expect_all("format", R"({"tags": ["code"]})", {{"<code>1</code>", "null", 1}, {"1", "null", 0}});
}

TEST(ShapingVerifiers, FollowTheirFormulas) {
  const auto bytes = [](std::size_t count) { return std::string(count, 'a'); };
  expect_all("length", R"({"target": 10, "max": 20})",
             {{bytes(0), "null", 1},
              {bytes(10), "null", 1},
              {bytes(15), "null", 0.5},
              {bytes(20), "null", 0},
              {bytes(99), "null", 0}});
  expect_all("length", R"({"min": 4, "target": 10, "max": 20})",
             {{bytes(2), "null", 0.5}, {bytes(4), "null", 1}});
  expect_all("overlong", R"({"max": 20, "buffer": 10})",
             {{bytes(5), "null", 0},
              {bytes(10), "null", 0},
              {bytes(15), "null", -0.5},
              {bytes(20), "null", -1},
              {bytes(30), "null", -1}});
  expect_all("overlong", R"({"max": 20, "buffer": 10, "penalty": 2})", {{bytes(15), "null", -1}});
  expect_all("repetition", R"({"n": 1})",
             {{"a b c d", "null", 1}, {"a a a a", "null", 0.25}, {"", "null", 1}});
  expect_all("repetition", R"({"n": 2})",
             {{"a b a b a", "null", 0.5}, {"a", "null", 1}, {"a b c", "null", 1}});
}

TEST(ShapingVerifiers, CountTokensWhereThereAreSome) {
  Sample sample;
  sample.completion = std::string(100, 'a');
  sample.tokens = {1, 2, 3, 4, 5};
  const auto verifier = make_verifier("length", Json::parse(R"({"target": 0, "max": 10})"), "test");
  EXPECT_DOUBLE_EQ(verifier->judge(sample).reward, 0.5);
}

TEST(Verifiers, LookAtTheEndOfALongCompletion) {
  const std::string filler(2 * kBytesLookedAt, 'x');
  expect_all("numeric", "{}", {{"41 " + filler + " 42", "42", 1}, {"42 " + filler, "42", 0}});
}

TEST(Verifiers, RefuseUnknownNamesAndParameters) {
  EXPECT_THROW(make_verifier("nunmeric", {}, "reward"), ConfigError);
  EXPECT_THROW(make_verifier("numeric", Json::parse(R"({"tolerence": 1})"), "reward"), ConfigError);
  EXPECT_THROW(make_verifier("numeric", Json::parse(R"({"tolerance": "1"})"), "reward"),
               ConfigError);
  EXPECT_THROW(make_verifier("regex", {}, "reward"), ConfigError);
  EXPECT_THROW(make_verifier("regex", Json::parse(R"j({"pattern": "("})j"), "reward"), ConfigError);
  EXPECT_THROW(make_verifier("length", {}, "reward"), ConfigError);
  EXPECT_THROW(make_verifier("format", Json::parse(R"({"tags": []})"), "reward"), ConfigError);
  EXPECT_THROW(make_verifier("choice", Json::parse(R"({"choices": "a"})"), "reward"), ConfigError);
  EXPECT_THROW(make_verifier("exact", Json::parse(R"({"from": "end"})"), "reward"), ConfigError);
}

}  // namespace
}  // namespace heddle::reward::testing
