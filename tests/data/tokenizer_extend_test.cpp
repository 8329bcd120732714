#include "data/tokenizer/extend.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "base/errors.h"
#include "base/files.h"
#include "data/tokenizer/byte_level.h"
#include "testing/temporary_directory.h"

namespace heddle::data {
namespace {

using nlohmann::ordered_json;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;

/// 256 bytes, one merge ("ab", id 256) and one added token (id 257).
class ExtendTokenizer : public ::testing::Test {
 protected:
  void SetUp() override {
    for (int byte = 0; byte < 256; ++byte)
      file_["model"]["vocab"][byte_level::spelling(static_cast<unsigned char>(byte))] = byte;
    file_["model"]["vocab"]["ab"] = 256;
    file_["model"]["merges"] = {"a b"};
    file_["pre_tokenizer"] = {
        {"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}};
    // A key of the same name deeper down, and a string that holds brackets, must not be mistaken.
    file_["added_tokens"] = ordered_json::array(
        {{{"id", 257}, {"content", "<]\"added_tokens\": [>"}, {"special", true}}});
    file_["post_processor"] = {{"type", "ByteLevel"}, {"added_tokens", {1}}};
  }
  void write(const std::string& name, const std::string& text) {
    files::write_atomically(dir_ / name, text);
  }
  ExtendedTokenizer extend(const std::vector<std::string>& tokens, int indent = 2) {
    write("tokenizer.json", file_.dump(indent));
    return extend_tokenizer(dir_.path(), tokens);
  }
  static std::string changed(const ExtendedTokenizer& tokenizer, const std::string& name) {
    for (const auto& [file, text] : tokenizer.changed) {
      if (file == name) return text;
    }
    return "";
  }

  testing::TemporaryDirectory dir_;
  ordered_json file_;
};

TEST_F(ExtendTokenizer, GivesNewTokensTheNextIds) {
  const ExtendedTokenizer extended = extend({"<|note|>", "<|ende—x|>"});
  EXPECT_THAT(extended.added, ElementsAre(Pair("<|note|>", 258), Pair("<|ende—x|>", 259)));
  EXPECT_EQ(extended.tokenizer->vocab_size(), 260);
  EXPECT_THAT(extended.tokenizer->encode("ab<|note|>a<|ende—x|>"), ElementsAre(256, 258, 'a', 259));
  EXPECT_TRUE(extended.tokenizer->is_special(259));
  // The written files load as a folder of its own.
  write("tokenizer.json", changed(extended, "tokenizer.json"));
  EXPECT_EQ(Tokenizer::load(dir_.path())->id_of("<|note|>"), 258);
}

TEST_F(ExtendTokenizer, ChangesNothingElseInTheFile) {
  for (const int indent : {-1, 0, 2}) {
    const std::string before = file_.dump(indent);
    const std::string after = changed(extend({"<|note|>"}, indent), "tokenizer.json");
    const auto same = std::mismatch(before.begin(), before.end(), after.begin()).first;
    const std::string rest(same, before.end());
    EXPECT_TRUE(after.ends_with(rest)) << indent;
    ordered_json parsed = ordered_json::parse(after);
    ASSERT_EQ(parsed["added_tokens"].size(), 2u);
    EXPECT_EQ(parsed["added_tokens"][1], ordered_json({{"id", 258},
                                                       {"content", "<|note|>"},
                                                       {"single_word", false},
                                                       {"lstrip", false},
                                                       {"rstrip", false},
                                                       {"normalized", false},
                                                       {"special", true}}));
    parsed["added_tokens"].erase(1);
    EXPECT_EQ(parsed, file_);
  }
}

TEST_F(ExtendTokenizer, MakesTheListWhereThereIsNone) {
  for (const ordered_json& list : {ordered_json(), ordered_json::array()}) {
    file_["added_tokens"] = list;
    EXPECT_EQ(extend({"<|note|>"}).tokenizer->id_of("<|note|>"), 257);
  }
  file_.erase("added_tokens");
  EXPECT_EQ(extend({"<|note|>"}).tokenizer->id_of("<|note|>"), 257);
}

TEST_F(ExtendTokenizer, KeepsTheIdsOfWhatItKnows) {
  const ExtendedTokenizer known = extend({"<]\"added_tokens\": [>"});
  EXPECT_TRUE(known.changed.empty());
  const ExtendedTokenizer word = extend({"ab"});
  EXPECT_TRUE(word.added.empty());
  EXPECT_EQ(word.tokenizer->vocab_size(), 258);
  EXPECT_TRUE(word.tokenizer->is_special(256));
  EXPECT_THAT(word.tokenizer->encode("aab"), ElementsAre('a', 256));
}

TEST_F(ExtendTokenizer, KeepsTheOtherFilesInStep) {
  write("tokenizer_config.json",
        R"({"eos_token": "ab", "added_tokens_decoder": {"257": {"content": "<]\"added_tokens\": [>",
            "special": true}}, "extra_special_tokens": ["ab"], "model_max_length": 5})");
  write("special_tokens_map.json", R"({"eos_token": "ab"})");
  write("added_tokens.json", R"({"x": 3})");
  const ExtendedTokenizer extended = extend({"<|note|>"});
  const auto config = ordered_json::parse(changed(extended, "tokenizer_config.json"));
  EXPECT_EQ(config["added_tokens_decoder"]["258"]["content"], "<|note|>");
  EXPECT_EQ(config["extra_special_tokens"], ordered_json({"ab", "<|note|>"}));
  EXPECT_EQ(config["model_max_length"], 5);
  const auto map = ordered_json::parse(changed(extended, "special_tokens_map.json"));
  EXPECT_EQ(map["additional_special_tokens"], ordered_json::array({"<|note|>"}));
  EXPECT_EQ(ordered_json::parse(changed(extended, "added_tokens.json"))["<|note|>"], 258);
}

TEST_F(ExtendTokenizer, RefusesEmptyAndRepeatedTokens) {
  const auto message = [&](const std::vector<std::string>& tokens) {
    try {
      extend(tokens);
    } catch (const DataError& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_THAT(message({"a", ""}), HasSubstr("empty"));
  EXPECT_THAT(message({"<x>", "<x>"}), HasSubstr("'<x>' stands twice"));
}

}  // namespace
}  // namespace heddle::data
