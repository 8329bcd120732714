#include "data/tokenizer/tokenizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ctime>
#include <fstream>
#include <nlohmann/json.hpp>

#include "base/errors.h"
#include "base/files.h"
#include "base/rng.h"
#include "data/tokenizer/byte_level.h"
#include "data/tokenizer/utf8.h"
#include "testing/paths.h"
#include "testing/temporary_directory.h"

namespace heddle::data {
namespace {

using nlohmann::ordered_json;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Ids = std::vector<std::int32_t>;

std::shared_ptr<const Tokenizer> example() {
  return Tokenizer::load(testing::source_path("examples/tokenizer-4k"));
}

/// 256 bytes, then a few merges; the pattern of Qwen3-Next.
ordered_json small() {
  ordered_json file;
  for (int byte = 0; byte < 256; ++byte) {
    file["model"]["vocab"][byte_level::spelling(static_cast<unsigned char>(byte))] = byte;
  }
  file["model"]["type"] = "BPE";
  int id = 256;
  for (const char* merged : {"ab", "abc", "bc", "Ġa"}) file["model"]["vocab"][merged] = id++;
  file["model"]["merges"] = {"b c", ordered_json::array({"a", "b"}), "a bc", "Ġ a"};
  file["normalizer"] = {{"type", "NFC"}};
  file["pre_tokenizer"] = ordered_json::parse(R"({"type": "Sequence", "pretokenizers": [
    {"type": "Split", "behavior": "Isolated", "invert": false, "pattern": {"Regex":
     "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"}},
    {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false}]})");
  file["decoder"] = {{"type", "ByteLevel"}};
  file["added_tokens"] = ordered_json::array(
      {{{"id", 260}, {"content", "<|im_end|>"}, {"special", true}, {"normalized", false}},
       {{"id", 261}, {"content", "<think>"}, {"special", false}, {"normalized", false}}});
  return file;
}

std::shared_ptr<const Tokenizer> parse(const ordered_json& file, const std::string& config = "") {
  return Tokenizer::parse(file.dump(), config, "", "dir");
}

std::string error_of(const ordered_json& file, const std::string& config = "") {
  try {
    parse(file, config);
    return "no error";
  } catch (const DataError& error) {
    return error.what();
  }
}

std::string from_hex(const std::string& hex) {
  std::string out;
  for (std::size_t i = 0; i < hex.size(); i += 2)
    out += static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16));
  return out;
}

// Expected ids come from the `tokenizers` library: tests/interop/text/make_golden.py.
TEST(Tokenizer, IdsEqualTheLibrarys) {
  const auto golden =
      ordered_json::parse(files::read(testing::source_path("tests/data/tokenizer_golden.json")));
  const auto tokenizer = example();
  for (const auto& row : golden) {
    EXPECT_EQ(tokenizer->encode(from_hex(row["hex"])), row["ids"].get<Ids>()) << row["hex"];
  }
}

TEST(Tokenizer, ReadsTheExampleFolder) {
  const auto tokenizer = example();
  EXPECT_EQ(tokenizer->vocab_size(), 4096);
  EXPECT_EQ(tokenizer->eos_id(), tokenizer->id_of("<|im_end|>"));
  EXPECT_EQ(tokenizer->pad_id(), tokenizer->id_of("<|endoftext|>"));
  EXPECT_TRUE(tokenizer->is_special(*tokenizer->id_of("<|im_start|>")));
  EXPECT_FALSE(tokenizer->is_special(*tokenizer->id_of("<think>")));
  EXPECT_THAT(*tokenizer->chat_template(), HasSubstr("{%- generation %}"));
  EXPECT_EQ(tokenizer->token_of(*tokenizer->id_of("Ġthe")), "Ġthe");
  EXPECT_EQ(tokenizer->bytes_of(*tokenizer->id_of("Ġthe")), " the");
  EXPECT_EQ(tokenizer->content_hash().size(), 32u);
  EXPECT_EQ(tokenizer->content_hash(), example()->content_hash());
}

TEST(Tokenizer, MergesByRankNotByLength) {
  const auto tokenizer = parse(small());
  EXPECT_THAT(tokenizer->encode("abc"), ElementsAre(257));  // b+c first, then a+bc
  EXPECT_THAT(tokenizer->encode("ab"), ElementsAre(256));
  EXPECT_THAT(tokenizer->encode(" abc"), ElementsAre(32, 257));
  EXPECT_THAT(tokenizer->encode("abx"), ElementsAre(256, 'x'));
}

// Words of more than a cache slot, of more than the short path, and of a length at which quadratic
// work would show.
TEST(Tokenizer, LongWordsMergeLikeShortOnes) {
  const auto tokenizer = parse(small());
  for (const std::size_t count :
       {1u, 7u, 8u, 15u, 16u, 17u, 47u, 48u, 49u, 63u, 64u, 65u, 129u, 300000u}) {
    std::string word;
    for (std::size_t i = 0; i < count; ++i) word += "abc";
    const Ids ids = tokenizer->encode(word + "a");
    ASSERT_EQ(ids.size(), count + 1) << count;
    EXPECT_EQ(std::count(ids.begin(), ids.end(), 257), static_cast<std::ptrdiff_t>(count));
    EXPECT_EQ(ids.back(), 'a');
  }
}

TEST(Tokenizer, InvalidUtf8IsReadAsPythonsReplacementDoes) {
  const auto tokenizer = parse(small());
  const auto read = [&](const std::string& bytes) {
    return tokenizer->decode(tokenizer->encode(bytes));
  };
  const std::string r = "\xEF\xBF\xBD";
  EXPECT_EQ(read("a\xff"
                 "b"),
            "a" + r + "b");
  EXPECT_EQ(read("\xe2\x82"), r);  // cut: one for the part
  EXPECT_EQ(read("\xe2\x82z"), r + "z");
  EXPECT_EQ(read("\xed\xa0\x80"), r + r + r);  // surrogate
  EXPECT_EQ(read("\xc0\xaf"), r + r);          // overlong
  EXPECT_EQ(read("\xf0\x80\x80\x80"), r + r + r + r);
  EXPECT_EQ(read("\xf4\x90\x80\x80"), r + r + r + r);  // above U+10FFFF
  EXPECT_EQ(read("\xf0\x9f\x98\xe9"), r + r);
  EXPECT_EQ(read(std::string("a\0b", 3)), std::string("a\0b", 3));
}

TEST(Tokenizer, ComposesToNfc) {
  const auto tokenizer = parse(small());
  EXPECT_EQ(tokenizer->encode("e\u0301"), tokenizer->encode("\u00e9"));
  EXPECT_EQ(tokenizer->encode("\u1112\u1161\u11ab"), tokenizer->encode("\ud55c"));
  EXPECT_EQ(tokenizer->encode("a\u0323\u0307"), tokenizer->encode("a\u0307\u0323"));
}

TEST(Tokenizer, AddedTokensAreFoundInTheText) {
  const auto tokenizer = parse(small());
  EXPECT_THAT(tokenizer->encode("a<|im_end|>b<think>"), ElementsAre('a', 260, 'b', 261));
  EXPECT_EQ(tokenizer->encode("<|im_end").size(), 8u);
  const Ids as_text = tokenizer->encode("<|im_end|>", {.special_tokens_as_text = true});
  EXPECT_EQ(as_text.size(), 10u);
  EXPECT_EQ(tokenizer->decode(as_text), "<|im_end|>");
  EXPECT_EQ(tokenizer->decode(Ids{'a', 260, 261}, true), "a<think>");
}

TEST(Tokenizer, AddedTokensStripAndStandAlone) {
  ordered_json file = small();
  file["added_tokens"] = ordered_json::array(
      {{{"id", 260}, {"content", "[L]"}, {"lstrip", true}, {"normalized", false}},
       {{"id", 261}, {"content", "[R]"}, {"rstrip", true}, {"normalized", false}},
       {{"id", 262}, {"content", "whole"}, {"single_word", true}, {"normalized", false}},
       {{"id", 263}, {"content", "[LL]"}, {"normalized", false}},
       {{"id", 264}, {"content", "e\u0301"}, {"normalized", true}}});
  const auto tokenizer = parse(file);
  const std::int32_t space = *tokenizer->id_of("Ġ");
  EXPECT_THAT(tokenizer->encode("a \n[L] b"), ElementsAre('a', 260, space, 'b'));
  EXPECT_THAT(tokenizer->encode("a [R] \u3000b"), ElementsAre('a', space, 261, 'b'));
  EXPECT_THAT(tokenizer->encode("[LL]"), ElementsAre(263));
  EXPECT_THAT(tokenizer->encode("whole"), ElementsAre(262));
  EXPECT_EQ(tokenizer->encode("wholes").size(), 6u);
  EXPECT_EQ(tokenizer->encode("_whole").size(), 6u);
  EXPECT_THAT(tokenizer->encode("\u00e9"), ElementsAre(264));
  EXPECT_EQ(tokenizer->decode(Ids{264}),
            "\uFFFD");  // the library decodes é of such a token as the byte E9
}

TEST(Tokenizer, PostProcessorTemplateIsAddedOnRequest) {
  ordered_json file = small();
  file["post_processor"] =
      ordered_json::parse(R"({"type": "Sequence", "processors": [{"type": "ByteLevel"},
    {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
     {"SpecialToken": {"id": "<e>", "type_id": 0}}], "special_tokens": {"<s>": {"ids": [260]}, "<e>": {"ids": [261, 260]}}}]})");
  const auto tokenizer = parse(file);
  EXPECT_THAT(tokenizer->encode("a"), ElementsAre('a'));
  EXPECT_THAT(tokenizer->encode("a", {.add_special_tokens = true}),
              ElementsAre(260, 'a', 261, 260));
}

TEST(Tokenizer, BatchEqualsSingleForAnyThreads) {
  const auto tokenizer = example();
  const CounterRng rng(7, "texts");
  std::vector<std::string> texts(129);
  std::uint64_t at = 0;
  for (std::string& text : texts) {
    for (std::uint64_t i = rng.below(at++, 400); i > 0; --i) {
      utf8::append(text, static_cast<char32_t>(rng.below(at++, i % 9 == 0 ? 0xD000 : 0x7F)));
    }
  }
  for (const int threads : {1, 3, 8}) {
    const auto ids = tokenizer->encode_batch(texts, threads);
    for (std::size_t i = 0; i < texts.size(); ++i)
      ASSERT_EQ(ids[i], tokenizer->encode(texts[i])) << threads;
  }
}

TEST(Tokenizer, DecodesAnyIdsToValidUtf8) {
  const auto tokenizer = example();
  const CounterRng rng(8, "ids");
  for (int trial = 0; trial < 200; ++trial) {
    Ids ids;
    for (int i = 0; i < 40; ++i)
      ids.push_back(static_cast<std::int32_t>(rng.below(trial * 64 + i, 4096)));
    const std::string text = tokenizer->decode(ids);
    ASSERT_EQ(utf8::valid_prefix(text), text.size());
    StreamDecoder stream(tokenizer);
    std::string joined;
    for (const std::int32_t id : ids) {
      const std::string piece = stream.push(id);
      ASSERT_EQ(utf8::valid_prefix(piece), piece.size());
      joined += piece;
    }
    ASSERT_EQ(joined + stream.finish(), text);
  }
  EXPECT_THROW(tokenizer->decode(Ids{4096}), DataError);
  EXPECT_THROW(tokenizer->decode(Ids{-1}), DataError);
}

TEST(StreamDecoder, HoldsBackAnIncompleteCharacter) {
  StreamDecoder stream(parse(small()), true);
  EXPECT_EQ(stream.push(0xF0), "");
  EXPECT_EQ(stream.push(0x9F), "");
  EXPECT_EQ(stream.push(0x99), "");
  EXPECT_EQ(stream.push(0x82), "\U0001F642");
  EXPECT_EQ(stream.push(260), "");  // special
  EXPECT_EQ(stream.push(0xE2), "");
  EXPECT_EQ(stream.push('a'), "\uFFFDa");
  EXPECT_EQ(stream.push(0xC3), "");
  EXPECT_EQ(stream.finish(), "\uFFFD");
  EXPECT_EQ(stream.finish(), "");
}

TEST(Tokenizer, ConfigurationGivesTokensAndTemplate) {
  const auto tokenizer = parse(
      small(), R"({"eos_token": {"content": "<|im_end|>"}, "pad_token": null, "bos_token": "<new>",
    "added_tokens_decoder": {"261": {"content": "<think>"}, "262": {"content": "<new>", "special": true}},
    "chat_template": [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]})");
  EXPECT_EQ(tokenizer->eos_id(), 260);
  EXPECT_FALSE(tokenizer->pad_id());
  EXPECT_EQ(tokenizer->vocab_size(), 263);
  EXPECT_THAT(tokenizer->encode("<new>"), ElementsAre(262));
  EXPECT_EQ(tokenizer->chat_template(), "D");
  EXPECT_NE(tokenizer->content_hash(), parse(small())->content_hash());
}

TEST(Tokenizer, ErrorsNameFileAndKey) {
  const auto changed = [](const char* path, const ordered_json& value) {
    ordered_json file = small();
    file[ordered_json::json_pointer(path)] = value;
    return error_of(file);
  };
  EXPECT_EQ(changed("/model/type", "Unigram"),
            "dir/tokenizer.json.model.type: model 'Unigram' is not supported, only BPE");
  EXPECT_EQ(changed("/model/merges/1", "abc"),
            "dir/tokenizer.json.model.merges[1]: expected two tokens with one space between them, "
            "found 'abc'");
  EXPECT_EQ(changed("/model/merges/0", "b q"),
            "dir/tokenizer.json: model.merges: token 'bq' is not in the vocabulary");
  EXPECT_EQ(changed("/model/vocab/ab", -1),
            "dir/tokenizer.json.model.vocab.ab: token id -1 is negative");
  EXPECT_THAT(changed("/model/vocab/ab", 1), HasSubstr("have the same id 1"));
  EXPECT_THAT(changed("/model/vocab/ab", 99999999999),
              HasSubstr("model.vocab.ab: token id 99999999999 is above"));
  EXPECT_THAT(changed("/model/dropout", 0.1),
              HasSubstr("model.dropout: BPE dropout is not supported"));
  EXPECT_THAT(changed("/model/byte_fallback", true), HasSubstr("model.byte_fallback"));
  EXPECT_THAT(changed("/normalizer/type", "BertNormalizer"),
              HasSubstr("normalizer: normalizer 'BertNormalizer' is not supported"));
  EXPECT_THAT(changed("/pre_tokenizer/pretokenizers/0/behavior", "Removed"),
              HasSubstr("pretokenizers[0].behavior: 'Removed'"));
  EXPECT_THAT(changed("/pre_tokenizer/pretokenizers/0/pattern/Regex", "(a"),
              HasSubstr("pretokenizers[0].pattern: the pattern '(a' does not compile"));
  EXPECT_THAT(changed("/pre_tokenizer", nullptr), HasSubstr("only byte-level BPE"));
  EXPECT_THAT(changed("/decoder/type", "WordPiece"),
              HasSubstr("decoder 'WordPiece' is not supported"));
  EXPECT_THAT(
      changed("/added_tokens/0/id", 300),
      HasSubstr("added token '<|im_end|>' has id 300, but its place in the vocabulary is 260"));
  EXPECT_THAT(changed("/added_tokens/0/content", 5),
              HasSubstr("added_tokens[0].content: expected a string, found number"));
  EXPECT_THAT(
      error_of(small(), R"({"eos_token": "<nope>"})"),
      HasSubstr("dir/tokenizer_config.json: eos_token: token '<nope>' is not in the vocabulary"));
  EXPECT_THAT(error_of(small(), "{"), HasSubstr("dir/tokenizer_config.json: not valid JSON"));
  EXPECT_THROW(Tokenizer::parse("[", "", "", "dir"), DataError);
}

// Each would take gigabytes, the stack, or minutes, with every text or once.
TEST(Tokenizer, HostileFilesEndWithAnError) {
  const auto with = [](const char* path, const ordered_json& value) {
    ordered_json file = small();
    file[ordered_json::json_pointer(path)] = value;
    return error_of(file);
  };
  const auto many = [](const ordered_json& value, std::size_t count) {
    return ordered_json(std::vector<ordered_json>(count, value));
  };
  const ordered_json byte_level = {
      {"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}};
  const ordered_json split = {
      {"type", "Split"}, {"behavior", "Isolated"}, {"pattern", {{"Regex", "x"}}}};
  ordered_json splits = many(split, 100'000);
  splits.push_back(byte_level);
  EXPECT_THAT(with("/pre_tokenizer", {{"type", "Sequence"}, {"pretokenizers", splits}}),
              HasSubstr("more than 64 pre-tokenizers"));
  EXPECT_THAT(with("/normalizer",
                   {{"type", "Sequence"}, {"normalizers", many({{"type", "NFKD"}}, 100'000)}}),
              HasSubstr("more than 64 normalizers"));
  EXPECT_THAT(with("/model/vocab/far", (1 << 24) - 1), HasSubstr("has id 16777215"));
  EXPECT_THAT(with("/post_processor", {{"type", "TemplateProcessing"},
                                       {"single", many({{"SpecialToken", {{"id", "x"}}}}, 10'000)},
                                       {"special_tokens", {{"x", {{"ids", many(1, 10'000)}}}}}}),
              HasSubstr("a template of more than 1024 tokens"));
  const ordered_json long_token = {{"id", 262}, {"content", std::string(100'000, 'a') + "b"}};
  EXPECT_THAT(with("/added_tokens/2", long_token), HasSubstr("an added token has 100001 bytes"));
  ordered_json added = ordered_json::array();
  for (int i = 0; i < 20'000; ++i)
    added.push_back({{"id", 260 + i}, {"content", std::to_string(i) + std::string(400, 'a')}});
  EXPECT_THAT(with("/added_tokens", added), HasSubstr("added_tokens: they have"));
}

TEST(Tokenizer, ManyAddedTokensAndWhiteSpaceTakeLinearTime) {
  ordered_json file = small();
  nlohmann::json decoder = nlohmann::json::object();  // finds a key without a scan
  for (int i = 0; i < 30'000; ++i) {
    const std::string content = "<" + std::to_string(i) + ">";
    file["added_tokens"].push_back({{"id", 262 + i}, {"content", content}});
    decoder[std::to_string(262 + i)] = {{"content", content}};
  }
  file["added_tokens"].push_back({{"id", 30'262}, {"content", "\t"}, {"rstrip", true}});
  file["added_tokens"].push_back({{"id", 30'263}, {"content", "\v"}});
  const std::clock_t begin = std::clock();  // of the processor: machines may be busy
  const auto tokenizer = parse(file, nlohmann::json({{"added_tokens_decoder", decoder}}).dump());
  std::string space;
  for (int i = 0; i < 200'000; ++i) space += "\t\v";
  for (const std::string& text :
       {space, std::string(400'000, '\t'), std::string(400'000, '\v'), space + "a" + space,
        std::string(200'000, '\t') + std::string(200'000, '<')}) {
    EXPECT_GT(tokenizer->encode(text).size(), 100'000u);
  }
  // With a scan for each token it takes minutes.
  EXPECT_LT(std::clock() - begin, 20 * CLOCKS_PER_SEC);
}

TEST(Tokenizer, FolderWithoutTokenizerIsAnError) {
  const testing::TemporaryDirectory folder;
  try {
    Tokenizer::load(folder.path());
    FAIL();
  } catch (const DataError& error) {
    EXPECT_THAT(error.what(), HasSubstr("has no tokenizer.json"));
  }
  std::ofstream(folder / "tokenizer.json") << small().dump();
  std::ofstream(folder / "chat_template.jinja") << "from the file";
  std::ofstream(folder / "tokenizer_config.json")
      << R"({"chat_template": "from the configuration"})";
  std::ofstream(folder / "special_tokens_map.json") << R"({"eos_token": "<|im_end|>"})";
  const auto tokenizer = Tokenizer::load(folder.path());
  EXPECT_EQ(tokenizer->chat_template(), "from the file");
  EXPECT_EQ(tokenizer->eos_id(), 260);
}

TEST(Tokenizer, SplitsSpecialTokensWhereTheConfigurationSaysSo) {
  const std::string text = "a<|im_end|><think>";
  const auto whole = parse(small()), split = parse(small(), R"({"split_special_tokens": true})");
  EXPECT_THAT(whole->encode(text), ElementsAre('a', 260, 261));
  // As in transformers: tokens that are not special are found all the same.
  EXPECT_EQ(split->encode(text).size(), 1 + std::string("<|im_end|>").size() + 1);
  EXPECT_EQ(split->encode(text).back(), 261);
  EXPECT_EQ(split->decode(split->encode(text)), text);
  EXPECT_NE(whole->content_hash(), split->content_hash());
  EXPECT_EQ(parse(small(), R"({"split_special_tokens": false})")->content_hash(),
            whole->content_hash());
}

TEST(Tokenizer, TakesAnUnknownTokenThatIsAnAddedTokenOnly) {
  ordered_json file = small();
  file["model"]["unk_token"] = "<|im_end|>";
  EXPECT_THAT(parse(file)->encode("ab"), ElementsAre(256));
  // Where a byte is missing it would be needed, and the library has no id for it.
  file["model"]["vocab"].erase(byte_level::spelling('z'));
  EXPECT_THAT(error_of(file), HasSubstr("model.unk_token: token '<|im_end|>' is not in"));
}

TEST(Tokenizer, NamesEverySpecialTokenForTemplates) {
  const auto tokenizer =
      Tokenizer::parse(small().dump(), R"({"eos_token": {"content": "<|im_end|>"},
      "unk_token": "?", "image_token": "<img>", "add_bos_token": false, "pad_token": null,
      "extra_special_tokens": {"boi_token": "<boi>"}, "model_specific_special_tokens": {"audio_token": "<a>"}})",
                       R"({"eos_token": "other", "sep_token": "<sep>"})", "dir");
  EXPECT_EQ(
      ordered_json(tokenizer->special_tokens()).dump(),
      R"({"audio_token":"<a>","boi_token":"<boi>","eos_token":"<|im_end|>","image_token":"<img>",)"
      R"("sep_token":"<sep>","unk_token":"?"})");
  EXPECT_EQ(tokenizer->eos_id(), 260);
}

}  // namespace
}  // namespace heddle::data
