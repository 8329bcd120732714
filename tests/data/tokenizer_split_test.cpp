#include "data/tokenizer/split.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/errors.h"
#include "base/rng.h"
#include "data/tokenizer/unicode_classes.h"
#include "data/tokenizer/utf8.h"

namespace heddle::data {
namespace {

const std::string kQwen2 =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
const std::string kQwen35 =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

std::string with_digits(std::string pattern) {
  return pattern.replace(pattern.find(R"(|\p{N}|)"), 7, R"(|\p{N}{1,3}|)");
}

std::vector<std::string> words(const Split& split, const std::string& text) {
  std::vector<std::string> out;
  SplitBudget budget(text.size());
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = split.next(text, at, budget);
    out.push_back(text.substr(at, end - at));
    at = end;
  }
  return out;
}

// The hand-written patterns against PCRE2, on characters that PCRE2's older Unicode version knows
// too.
TEST(Split, KnownPatternsEqualTheirRegularExpression) {
  const std::u32string alphabet =
      U"aZéяא日한ก  "
      U"\u00a0\u3000\u2028\t\n\r\v\f\u00851٣½Ⅷ-_.,!?'\"<>|"
      U"€😀\u0301\u0e33\u094d\u20dd\u200d\u00ad\x01\u017f\u017f"
      U"sStTmMdDlLrReEvV''''";
  const CounterRng rng(3, "split");
  std::uint64_t at = 0;
  for (const std::string& pattern : {kQwen2, kQwen35, with_digits(kQwen2), with_digits(kQwen35)}) {
    const auto known = make_known_split(pattern);
    ASSERT_NE(known, nullptr) << pattern;
    const auto regex = make_regex_split(pattern, "test");
    for (int trial = 0; trial < 4000; ++trial) {
      std::string text;
      for (std::uint64_t i = 1 + rng.below(at++, 30); i > 0; --i) {
        char32_t c = alphabet[rng.below(at++, alphabet.size())];
        const std::uint64_t repeats = rng.below(at++, 6) == 0 ? rng.below(at++, 6) : 1;
        for (std::uint64_t k = 0; k < repeats; ++k) utf8::append(text, c);
      }
      ASSERT_EQ(words(*known, text), words(*regex, text)) << pattern << "\n" << text;
    }
  }
}

TEST(Split, EveryAsciiPairAndTriple) {
  const auto known = make_known_split(kQwen35);
  const auto regex = make_regex_split(kQwen35, "test");
  for (int a = 0; a < 128; ++a) {
    for (int b = 0; b < 128; ++b) {
      for (const int c :
           {int{'a'}, int{'\''}, int{' '}, int{'\n'}, int{'1'}, int{'-'}, int{'\t'}}) {
        const std::string text = {static_cast<char>(a), static_cast<char>(b), static_cast<char>(c)};
        ASSERT_EQ(words(*known, text), words(*regex, text)) << a << " " << b << " " << c;
      }
    }
  }
}

TEST(Split, OtherPatternsAreNotTakenForKnownOnes) {
  EXPECT_EQ(make_known_split(kQwen2 + "|x"), nullptr);
  EXPECT_EQ(make_known_split(R"(\s+|\S+)"), nullptr);
}

TEST(Split, RegexKeepsWhatItDoesNotMatch) {
  using Words = std::vector<std::string>;
  EXPECT_EQ(words(*make_regex_split("[0-9]+", "t"), "ab12c3"), (Words{"ab", "12", "c", "3"}));
  EXPECT_EQ(words(*make_regex_split("x", "t"), "é日"), (Words{"é日"}));
  EXPECT_EQ(words(*make_regex_split("(?=日)", "t"), "é日a日"), (Words{"é", "日a", "日"}));
  EXPECT_EQ(words(*make_regex_split(R"(\s+)", "t"), "a\u180e b\u0085c"),
            (Words{"a\u180e", " ", "b", "\u0085", "c"}));
  EXPECT_THROW(make_regex_split("(", "t"), DataError);
}

// Backtracking without end and reading to the end of the text from each of its places are errors.
TEST(Split, HostilePatternsEndWithAnError) {
  struct Case {
    const char* pattern;
    std::string text;
  };
  const std::string run(300'000, 'a');
  for (const auto& [pattern, text] : std::vector<Case>{
           {"(a+)+[bc]", std::string(100, 'a') + "d"},
           {"(?:a|b)*[0-9]", run},
           {"a*[0-9]", run},
           {"[a-z]*(?:1|2)", run + "é"},
           {"(?=.*z)a", run},
           {"(?:(?:a|ab)*c|d)", run},
           {R"(\w+\s*:)", run},
       }) {
    try {
      words(*make_regex_split(pattern, "tokenizer.json"), text);
      ADD_FAILURE() << pattern;
    } catch (const DataError& error) {
      EXPECT_THAT(error.what(), testing::HasSubstr(pattern));
    }
  }
}

// A bound on work must not meet texts of one long word.
TEST(Split, LongWordsAreCutAsShortOnes) {
  const std::string o200k =
      R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
  using Words = std::vector<std::string>;
  for (const std::size_t length : {511, 512, 513, 4096, 100'000, 1'000'000}) {
    for (const char* letter : {"G", "g", "日", "-", " "}) {
      std::string word;
      while (word.size() < length) word += letter;
      EXPECT_EQ(
          words(*make_regex_split(o200k, "t"), "1" + word + "\n"),
          *letter == ' ' || *letter == '-' ? (Words{"1", word + "\n"}) : (Words{"1", word, "\n"}))
          << letter << " " << length;
      EXPECT_EQ(words(*make_regex_split(kQwen35, "t"), "1" + word + "\n"),
                words(*make_known_split(kQwen35), "1" + word + "\n"))
          << letter << " " << length;
    }
  }
}

TEST(UnicodeClasses, ACharacterHasAtMostOneClass) {
  const auto& classes = unicode_classes();
  for (char32_t c = 0; c < classes.size(); ++c) {
    const int kind = classes[c] & (kLetter | kNumber | kMark | kSpace);
    ASSERT_EQ(kind & (kind - 1), 0) << static_cast<unsigned>(c);
  }
  EXPECT_EQ(classes[U'é'], kLetter);
  EXPECT_EQ(classes[U'٣'], kNumber);
  EXPECT_EQ(classes[0x301], kMark | kNfcRelevant);
  EXPECT_EQ(classes[0x180E], 0);
}

TEST(Utf8, SuffixThatCouldBeCompleted) {
  for (const auto& [text, bytes] :
       std::vector<std::pair<std::string, std::size_t>>{{"", 0},
                                                        {"a", 0},
                                                        {"\xC3", 1},
                                                        {"a\xE2\x82", 2},
                                                        {"\xF0\x9F\x99", 3},
                                                        {"\xF0\x9F", 2},
                                                        {"\xC3\xA9", 0},
                                                        {"\x80", 0},
                                                        {"\x80\x80\x80\x80", 0},
                                                        {"\xC0", 0},
                                                        {"\xED\xA0", 0},
                                                        {"\xF4\x90", 0},
                                                        {"\xFF", 0}}) {
    EXPECT_EQ(utf8::incomplete_suffix(text), bytes) << testing::PrintToString(text);
  }
}

}  // namespace
}  // namespace heddle::data
