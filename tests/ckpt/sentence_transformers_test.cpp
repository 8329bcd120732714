#include "ckpt/sentence_transformers.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/files.h"
#include "testing/message_of.h"
#include "testing/temporary_directory.h"

namespace heddle::ckpt {
namespace {

using ::testing::HasSubstr;

TEST(SentenceTransformers, WhatIsWrittenIsReadBack) {
  for (const bool normalize : {false, true}) {
    const testing::TemporaryDirectory dir;
    write_files(sentence_transformers_files(64, normalize, 512), dir.path());
    EXPECT_NO_THROW(require_last_token_embeddings(dir.path()));
    EXPECT_EQ(std::filesystem::exists(dir / "2_Normalize"), normalize);
    const auto pooling = nlohmann::json::parse(files::read(dir / "1_Pooling/config.json"));
    EXPECT_EQ(pooling.at("pooling_mode_lasttoken"), true);
    EXPECT_EQ(pooling.at("pooling_mode_mean_tokens"), false);
    EXPECT_EQ(pooling.at("word_embedding_dimension"), 64);
  }
}

TEST(SentenceTransformers, OtherPoolingsAndLayersAreNamed) {
  struct Case {
    const char *pooling, *type, *said;
  };
  for (const Case& c : std::initializer_list<Case>{
           {R"({"pooling_mode_mean_tokens": true})", "Normalize", "pooled by mean"},
           {R"({"pooling_mode_cls_token": true, "pooling_mode_lasttoken": true})", "Normalize",
            "pooled by cls and lasttoken"},
           {R"({"embedding_dimension": 8, "pooling_mode": "weightedmean"})", "Normalize",
            "pooled by weightedmean"},
           {R"({"pooling_mode": ["cls", "lasttoken"]})", "Normalize", R"(["cls","lasttoken"])"},
           {"{}", "Normalize", "pooled by mean"},
           {R"({"pooling_mode": "lasttoken"})", "Dense", "pass through 'Dense' (2_Last)"},
           {"[]", "Normalize", "must hold a JSON object"}}) {
    const testing::TemporaryDirectory dir;
    write_files({{"modules.json", fmt::format(R"([
          {{"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"}},
          {{"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.sentence_transformer.modules.Pooling"}},
          {{"idx": 2, "path": "2_Last", "type": "sentence_transformers.models.{}"}}])",
                                              c.type)},
                 {"1_Pooling/config.json", c.pooling}},
                dir.path());
    EXPECT_THAT(testing::message_of([&] { require_last_token_embeddings(dir.path()); }),
                HasSubstr(c.said))
        << c.pooling;
  }
}

TEST(SentenceTransformers, ADamagedListIsNamed) {
  for (const char* text :
       {"{}", "[1]", R"([{"type": 1, "path": ""}])", R"([{"type": "x.Pooling"}])"}) {
    const testing::TemporaryDirectory dir;
    write_files({{"modules.json", text}}, dir.path());
    EXPECT_THAT(testing::message_of([&] { require_last_token_embeddings(dir.path()); }),
                HasSubstr("modules.json"));
  }
}

TEST(SentenceTransformers, AFolderOutsideIsNotRead) {
  const testing::TemporaryDirectory dir;
  write_files({{"outside/config.json", R"({"pooling_mode": "lasttoken"})"},
               {"model/modules.json", R"([{"type": "x.Pooling", "path": "../outside"}])"}},
              dir.path());
  EXPECT_THAT(testing::message_of([&] { require_last_token_embeddings(dir / "model"); }),
              HasSubstr("outside"));
}

TEST(SentenceTransformers, OtherDirectoriesPass) {
  const testing::TemporaryDirectory dir;
  EXPECT_NO_THROW(require_last_token_embeddings(dir.path()));
}

}  // namespace
}  // namespace heddle::ckpt
