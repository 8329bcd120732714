#include "ckpt/model_writer.h"

#include <signal.h>
#include <sys/resource.h>

#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <functional>

#include "ckpt/staging_directory.h"
#include "fixtures.h"
#include "testing/temporary_directory.h"

namespace heddle::ckpt {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::is_identical;
using testing::message_of;
using testing::random_tensor;
using ::testing::UnorderedElementsAre;

class ModelWriting : public ::testing::Test {
 protected:
  static ModelWriter writer(const Path& path, ModelWriterOptions options = {}) {
    ModelWriter writer(path, options);
    writer.set_config({{"model_type", "test"}});
    return writer;
  }
  heddle::testing::TemporaryDirectory dir_;
};

TEST_F(ModelWriting, ConvertsCarriesAndProduces) {
  const at::Tensor vision = random_tensor("v", {3, 7}, at::kHalf);
  testing::write_model(dir_ / "source", {{"model.visual.x", vision},
                                         {"mtp.fc.weight", random_tensor("m", {5})},
                                         {"lm_head.weight", random_tensor("h", {2})}});
  const auto source = ModelDirectory::open(dir_ / "source");
  const at::Tensor w = random_tensor("w", {29, 3}), p = random_tensor("p", {4, 6});
  ModelWriter out = writer(dir_ / "out");
  out.add("w", w.t(), at::kBFloat16);
  out.add("p", {4, 6}, at::kFloat, [&] { return p.to(at::kDouble); });
  out.add({"lm_head.weight", w});
  EXPECT_THAT(out.carry_matching(source, {"model.visual.*", "mtp.*", "lm_head.*"}),
              UnorderedElementsAre("model.visual.x", "mtp.fc.weight"));
  EXPECT_EQ(out.commit().tensors, 5u);
  const auto model = ModelDirectory::open(dir_ / "out");
  EXPECT_TRUE(is_identical(read_tensor(model.at("w")), w.t().contiguous().to(at::kBFloat16)));
  EXPECT_TRUE(is_identical(read_tensor(model.at("p")), p));
  EXPECT_TRUE(is_identical(read_tensor(model.at("model.visual.x")), vision));
  EXPECT_TRUE(is_identical(read_tensor(model.at("lm_head.weight")), w));
  EXPECT_FALSE(std::filesystem::exists(dir_ / "out.tmp"));
  EXPECT_FALSE(std::filesystem::exists(dir_ / "out" / ".heddle-staging"));
}

TEST_F(ModelWriting, ShardsInTheGivenOrder) {
  ModelWriter out = writer(dir_ / "out", {.max_shard_bytes = 100});
  for (const char* name : {"z", "big", "a", "b"}) {
    out.add(
        {name, random_tensor(name, {std::string(name) == "big" ? 65 : 12})});  // 48 and 260 bytes
  }
  const ModelWriterReport report = out.commit();
  EXPECT_EQ(report.bytes, 404u);
  const auto index = read_json_object(dir_ / "out" / "model.safetensors.index.json");
  EXPECT_EQ(index["metadata"]["total_size"], 404);
  EXPECT_EQ(index["metadata"]["total_parameters"], 101);
  EXPECT_EQ(index["weight_map"]["z"], "model-00001-of-00003.safetensors");
  EXPECT_EQ(index["weight_map"]["big"], "model-00002-of-00003.safetensors");
  EXPECT_EQ(index["weight_map"]["a"], "model-00003-of-00003.safetensors");
  EXPECT_EQ(index["weight_map"]["b"], "model-00003-of-00003.safetensors");
  EXPECT_EQ(ModelDirectory::open(dir_ / "out").tensors().size(), 4u);
}

TEST_F(ModelWriting, CopiesCompanionsAsTheyAre) {
  std::filesystem::create_directories(dir_ / "source" / "additional_chat_templates");
  std::filesystem::create_directories(dir_ / "tokenizer");
  files::write_atomically(dir_ / "source" / "tokenizer.json", std::string("{\0}\r\n", 5));
  files::write_atomically(dir_ / "source" / "README.md", "the base model");
  files::write_atomically(dir_ / "source" / "model.bin", "not a companion");
  files::write_atomically(dir_ / "source" / "additional_chat_templates" / "tools.jinja", "{{ x }}");
  files::write_atomically(dir_ / "tokenizer" / "tokenizer.json", "the first folder wins");
  files::write_atomically(dir_ / "tokenizer" / "chat_template.jinja", "{{ y }}");
  ModelWriter out = writer(dir_ / "out");
  out.add({"a", random_tensor("a", {2})});
  out.copy_companions_from(dir_ / "tokenizer");
  out.copy_companions_from(dir_ / "source");
  out.add_file("README.md", "the tuned model");
  EXPECT_THAT(out.commit().copied_files,
              UnorderedElementsAre("tokenizer.json", "chat_template.jinja", "README.md",
                                   "additional_chat_templates/tools.jinja"));
  EXPECT_EQ(files::read(dir_ / "out" / "tokenizer.json"), "the first folder wins");
  EXPECT_EQ(files::read(dir_ / "out" / "README.md"), "the tuned model");
  EXPECT_EQ(files::read(dir_ / "out" / "additional_chat_templates" / "tools.jinja"), "{{ x }}");
  EXPECT_FALSE(std::filesystem::exists(dir_ / "out" / "model.bin"));
}

TEST_F(ModelWriting, OverwritesOnlyAModelAndOnlyWhenTold) {
  testing::write_model(dir_ / "out", {{"old", random_tensor("old", {2})}});
  EXPECT_THAT(message_of<ConfigError>([&] { writer(dir_ / "out"); }),
              HasSubstr("exists and is not empty"));
  ModelWriter out = writer(dir_ / "out", {.overwrite = true});
  out.add({"new", random_tensor("new", {2})});
  out.commit();
  EXPECT_EQ(ModelDirectory::open(dir_ / "out").tensors()[0].name, "new");
  EXPECT_FALSE(std::filesystem::exists(dir_ / "out.tmp"));

  std::filesystem::create_directory(dir_ / "photos");
  files::write_atomically(dir_ / "photos" / "cat.jpg", "meow");
  EXPECT_THAT(message_of<ConfigError>([&] { writer(dir_ / "photos", {.overwrite = true}); }),
              HasSubstr("holds no config.json"));
  files::write_atomically(dir_ / "file", "");
  EXPECT_THAT(message_of<ConfigError>([&] { writer(dir_ / "file", {.overwrite = true}); }),
              HasSubstr("is no folder"));
}

TEST_F(ModelWriting, ReplacesTheModelThatItCarriesFrom) {
  const at::Tensor a = random_tensor("a", {1000, 33});
  testing::write_model(dir_ / "m", {{"a", a}, {"b", random_tensor("b", {3})}});
  const auto source = ModelDirectory::open(dir_ / "m");
  ModelWriter out = writer(dir_ / "m", {.overwrite = true});
  for (const StoredTensor& tensor : source.tensors()) out.carry(tensor);
  out.commit();
  EXPECT_TRUE(is_identical(read_tensor(ModelDirectory::open(dir_ / "m").at("a")), a));
}

TEST_F(ModelWriting, ASourceThatChangedBeforeItWasCarriedIsNamedAndNothingIsWritten) {
  namespace fs = std::filesystem;
  const auto write_after = [&](const std::function<void(const fs::path&)>& change) {
    fs::remove_all(dir_ / "source");
    fs::remove_all(dir_ / "out");
    testing::write_model(dir_ / "source", {{"mtp.fc.weight", random_tensor("m", {500})}});
    const auto source = ModelDirectory::open(dir_ / "source");
    ModelWriter out = writer(dir_ / "out");
    out.add({"w", random_tensor("w", {2})});
    out.carry_matching(source, {"mtp.*"});
    change(dir_ / "source/model.safetensors");
    try {
      out.commit();
    } catch (const UserError& error) {
      EXPECT_FALSE(fs::exists(dir_ / "out"));
      return std::string(error.what());
    }
    EXPECT_TRUE(fs::exists(dir_ / "out/config.json"));
    return std::string();
  };
  EXPECT_EQ(write_after([](const fs::path&) {}), "");
  // A new file under the name is not the one that was opened.
  EXPECT_EQ(write_after([](const fs::path& p) { files::write_atomically(p, "new"); }), "");
  EXPECT_EQ(write_after([](const fs::path& p) { fs::remove(p); }), "");
  EXPECT_THAT(write_after([](const fs::path& p) {
                std::fstream file(p, std::ios::in | std::ios::out);
                file.seekp(-4, std::ios::end) << "abcd";
              }),
              HasSubstr("source/model.safetensors was changed while it was in use"));
  EXPECT_THAT(write_after([](const fs::path& p) { fs::resize_file(p, fs::file_size(p) + 9); }),
              HasSubstr("was changed"));
  EXPECT_THAT(write_after([](const fs::path& p) { fs::last_write_time(p, fs::file_time_type()); }),
              HasSubstr("was changed"));
}

TEST_F(ModelWriting, AFileBesideTheWeightsThatChangedIsNamedAndNothingIsWritten) {
  namespace fs = std::filesystem;
  const auto write_after = [&](const std::function<void(const fs::path&)>& change) {
    for (const char* name : {"source", "tokenizer", "out"}) fs::remove_all(dir_ / name);
    testing::write_model(dir_ / "source", {{"mtp.fc.weight", random_tensor("m", {5})}});
    for (const char* name : {"README.md", "generation_config.json"})
      files::write_atomically(dir_ / "source" / name, "{}");
    fs::create_directories(dir_ / "tokenizer/additional_chat_templates");
    for (const char* name : {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
                             "additional_chat_templates/tools.jinja"})
      files::write_atomically(dir_ / "tokenizer" / name, "first");
    const auto source = ModelDirectory::open(dir_ / "source");
    const TokenizerSource tokenizer(dir_ / "tokenizer");
    change(dir_.path());
    ModelWriter out = writer(dir_ / "out");
    out.add({"w", random_tensor("w", {2})});
    out.set_tokenizer(tokenizer);
    out.copy_companions(source.companions());
    try {
      out.commit();
    } catch (const Error& error) {
      EXPECT_FALSE(fs::exists(dir_ / "out"));
      return std::string(error.what());
    }
    EXPECT_EQ(files::read(dir_ / "out/tokenizer.json"), "first");
    return std::string();
  };
  const auto rewrite = [&](const char* name, const char* text) {
    return write_after([=](const fs::path& p) { files::write_atomically(p / name, text); });
  };
  const auto changed = [](const std::string& name) {
    return HasSubstr(name + " was changed while it was in use");
  };
  EXPECT_EQ(write_after([](const fs::path&) {}), "");
  EXPECT_THAT(rewrite("tokenizer/tokenizer.json", "other"), changed("tokenizer/tokenizer.json"));
  EXPECT_THAT(rewrite("tokenizer/chat_template.jinja", ""), changed("chat_template.jinja"));
  EXPECT_THAT(rewrite("tokenizer/tokenizer_config.json", "first\n"),
              changed("tokenizer_config.json"));
  EXPECT_THAT(rewrite("tokenizer/additional_chat_templates/tools.jinja", "First"),
              changed("additional_chat_templates/tools.jinja"));
  EXPECT_THAT(rewrite("source/README.md", "[]"), changed("source/README.md"));
  EXPECT_THAT(rewrite("source/generation_config.json", "{ }"), changed("generation_config.json"));
  EXPECT_THAT(write_after([](const fs::path& p) {
                fs::remove(p / "tokenizer/chat_template.jinja");
                fs::create_symlink(p / "source/README.md", p / "tokenizer/chat_template.jinja");
              }),
              HasSubstr("links that lead out of a model's folder are not followed"));
  EXPECT_THAT(write_after([](const fs::path& p) { fs::remove(p / "tokenizer/tokenizer.json"); }),
              HasSubstr("cannot open"));
  // Only contents count: neither a new file of the same bytes nor one that nobody began with.
  EXPECT_EQ(rewrite("tokenizer/tokenizer.json", "first"), "");
  EXPECT_EQ(write_after([](const fs::path& p) {
              fs::last_write_time(p / "tokenizer/tokenizer.json", fs::file_time_type());
            }),
            "");
  EXPECT_EQ(rewrite("tokenizer/special_tokens_map.json", "{}"), "");
  EXPECT_FALSE(fs::exists(dir_ / "out/special_tokens_map.json"));
}

TEST_F(ModelWriting, AnInterruptedWriteIsReplacedAndAStrangersFolderIsNot) {
  std::filesystem::create_directory(dir_ / "out.tmp");
  files::write_atomically(dir_ / "out.tmp" / "thesis.txt", "years");
  const auto write = [&] {
    ModelWriter out = writer(dir_ / "out");
    out.add({"a", random_tensor("a", {2})});
    out.commit();
  };
  EXPECT_THAT(message_of<FileError>(write), HasSubstr("out.tmp is in the way"));
  EXPECT_EQ(files::read(dir_ / "out.tmp" / "thesis.txt"), "years");
  files::write_atomically(dir_ / "out.tmp" / ".heddle-staging", "");
  write();
  EXPECT_FALSE(std::filesystem::exists(dir_ / "out.tmp"));
  EXPECT_FALSE(std::filesystem::exists(dir_ / "out" / "thesis.txt"));
}

TEST_F(ModelWriting, AFullDiskLeavesNothingUnderTheFinalName) {
  ModelWriter out = writer(dir_ / "out");
  out.add({"a", random_tensor("a", {100'000})});
  const auto before = ::signal(SIGXFSZ, SIG_IGN);
  rlimit limit;
  getrlimit(RLIMIT_FSIZE, &limit);
  const rlimit small = {64 << 10, limit.rlim_max};
  setrlimit(RLIMIT_FSIZE, &small);
  const std::string message = message_of<FileError>([&] { out.commit(); });
  setrlimit(RLIMIT_FSIZE, &limit);
  ::signal(SIGXFSZ, before);
  EXPECT_THAT(message, AllOf(HasSubstr("cannot write"), HasSubstr("out.tmp/model.safetensors"),
                             HasSubstr("too large")));
  EXPECT_FALSE(std::filesystem::exists(dir_ / "out"));
  EXPECT_FALSE(std::filesystem::exists(dir_ / "out.tmp"));
  EXPECT_EQ(out.commit().tensors, 1u);  // room again
}

TEST_F(ModelWriting, SaysBeforehandThatTheDiskIsTooSmall) {
  EXPECT_THAT(message_of<FileError>([&] { require_free_space(dir_ / "out", 1ull << 60); }),
              AllOf(HasSubstr("out needs"), HasSubstr("free")));
}

TEST_F(ModelWriting, AProducerOfAnotherShapeIsADefect) {
  ModelWriter out = writer(dir_ / "out");
  out.add("a", {2}, at::kFloat, [] { return at::zeros({3}); });
  EXPECT_THAT(message_of<InternalError>([&] { out.commit(); }),
              HasSubstr("'a' was announced as [2] and came as [3]"));
  EXPECT_THROW(out.add({"a", at::zeros({2})}), InternalError);
}

}  // namespace
}  // namespace heddle::ckpt
