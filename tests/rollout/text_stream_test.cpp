#include "rollout/text_stream.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "testing/paths.h"

namespace heddle::rollout {
namespace {

using ::testing::ElementsAre;

class TextStreamTest : public ::testing::Test {
 protected:
  /// The pieces that a stream gives out, one for each token, and what it held back.
  std::vector<std::string> pieces(const std::string& text, std::vector<std::string> stops = {}) {
    TextStream stream(tokenizer_, std::move(stops));
    std::vector<std::string> out;
    for (const std::int32_t id : tokenizer_->encode(text)) {
      if (stream.stopped()) break;
      out.push_back(stream.push(id));
    }
    out.push_back(stream.finish());
    return out;
  }
  static std::string joined(const std::vector<std::string>& pieces) {
    std::string all;
    for (const std::string& piece : pieces) all += piece;
    return all;
  }

  std::shared_ptr<const data::Tokenizer> tokenizer_ =
      data::Tokenizer::load(testing::source_path("examples/tokenizer-4k"));
};

TEST_F(TextStreamTest, GivesOutWholeCharactersOnly) {
  const std::string text = "day \xF0\x9F\x98\x80 caf\xC3\xA9 \xE6\x97\xA5\xE6\x9C\xAC";
  const std::vector<std::string> out = pieces(text);
  EXPECT_EQ(joined(out), text);
  for (const std::string& piece : out) {
    if (piece.empty()) continue;
    EXPECT_NE(static_cast<unsigned char>(piece.front()) & 0xC0, 0x80) << "begins inside";
    // A last byte of a longer character is a continuation; a lead byte would be cut off.
    EXPECT_LT(static_cast<unsigned char>(piece.back()), 0xC0) << "ends inside";
  }
}

TEST_F(TextStreamTest, LeavesOutSpecialTokensAndRowsWithoutAToken) {
  TextStream stream(tokenizer_, {});
  std::string out;
  for (const std::int32_t id : tokenizer_->encode("yes<|im_end|>no")) out += stream.push(id);
  out += stream.push(static_cast<std::int32_t>(tokenizer_->vocab_size()) + 3);
  EXPECT_EQ(out + stream.finish(), "yesno");
}

TEST_F(TextStreamTest, SpecialTokensAreTextIfAskedFor) {
  TextStream stream(tokenizer_, {}, /*skip_special_tokens=*/false);
  std::string out;
  for (const std::int32_t id : tokenizer_->encode("yes<|im_end|>no")) out += stream.push(id);
  EXPECT_EQ(out + stream.finish(), "yes<|im_end|>no");
}

TEST_F(TextStreamTest, EndsWhereTheFirstStopStringBegins) {
  EXPECT_EQ(joined(pieces("one two three four", {"three", " two"})), "one");
  EXPECT_EQ(joined(pieces("one two three four", {"five", ""})), "one two three four");
  TextStream stream(tokenizer_, {"END"});
  for (const std::int32_t id : tokenizer_->encode("a END b")) stream.push(id);
  EXPECT_TRUE(stream.stopped());
  EXPECT_EQ(stream.finish(), "");
}

TEST_F(TextStreamTest, AStopStringThatMayNotStopIsText) {
  const std::vector<std::int32_t> ids = tokenizer_->encode("a END b END c");
  for (std::size_t first = 0; first <= ids.size(); ++first) {
    TextStream stream(tokenizer_, {"END"});
    std::string out;
    for (std::size_t i = 0; i < ids.size(); ++i) out += stream.push(ids[i], i >= first);
    out += stream.finish();
    // The first one ends before the middle of the text, the second one before its end.
    const std::string until =
        tokenizer_->decode({ids.begin(), ids.begin() + static_cast<std::ptrdiff_t>(first)});
    const std::size_t whole = until.rfind("END");
    const std::string expected = whole == std::string::npos ? "a "
                                 : whole < 4                ? "a END b "
                                                            : "a END b END c";
    EXPECT_EQ(out, expected) << first;
  }
}

TEST_F(TextStreamTest, HoldsBackWhatMayBecomeAStopString) {
  TextStream stream(tokenizer_, {"\n\nUser"});
  std::string out;
  for (const std::int32_t id : tokenizer_->encode("yes\n\nUs")) out += stream.push(id);
  EXPECT_EQ(out, "yes");
  EXPECT_FALSE(stream.stopped());
  // It did not become one.
  for (const std::int32_t id : tokenizer_->encode("ual")) out += stream.push(id);
  EXPECT_EQ(out + stream.finish(), "yes\n\nUsual");
}

}  // namespace
}  // namespace heddle::rollout
