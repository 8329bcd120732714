// The program itself on everything that users get wrong and machines do to them: what each says,
// and with which status it ends (2: the user's mistake, 1: anything else, 128 + N: ended by signal
// N).
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <functional>
#include <nlohmann/json.hpp>
#include <thread>

#include "base/files.h"
#include "cli/run_command.h"
#include "testing/parameter_name.h"
#include "testing/temporary_directory.h"

namespace heddle::cli {
namespace {

namespace fs = std::filesystem;
using nlohmann::ordered_json;
using ::testing::HasSubstr;
using Arguments = std::vector<std::string>;

/// A folder with a small model, good rows, and whatever a case spoils.
class Folder {
 public:
  Folder() {
    const ordered_json config = {{"model_type", "qwen3_5_text"},
                                 {"vocab_size", 4096},
                                 {"hidden_size", 32},
                                 {"intermediate_size", 64},
                                 {"num_hidden_layers", 4},
                                 {"num_attention_heads", 2},
                                 {"num_key_value_heads", 1},
                                 {"head_dim", 16},
                                 {"linear_num_key_heads", 2},
                                 {"linear_num_value_heads", 2},
                                 {"linear_key_head_dim", 16},
                                 {"linear_value_head_dim", 16},
                                 {"tie_word_embeddings", true}};
    write("config.json", config.dump());
    const Outcome made =
        run_command({"init", "--config", at("config.json"), "--tokenizer",
                     HEDDLE_SOURCE_DIR "/examples/tokenizer-4k", "--output", at("model")});
    EXPECT_EQ(made.status, 0) << made.err;
    std::string rows;
    for (int i = 0; i < 64; ++i)
      rows +=
          R"({"text": "row )" + std::to_string(i) + R"( holds )" + std::to_string(7 * i) + "\"}\n";
    write("train.jsonl", rows);
  }

  std::string at(const std::string& name) const { return (directory_ / name).string(); }
  void write(const std::string& name, const std::string& text) const {
    files::write_atomically(directory_ / name, text);
  }
  /// Puts the pattern's replacement into a file that must hold it.
  void replace(const std::string& name, const std::string& from, const std::string& to) const {
    std::string text = files::read(directory_ / name);
    const std::size_t place = text.find(from);
    ASSERT_NE(place, std::string::npos) << name;
    write(name, text.replace(place, from.size(), to));
  }
  /// A training command; later arguments win.
  Arguments train(Arguments more = {}) const {
    more.insert(more.begin(), {"pt", "model.path=" + at("model"), "data.train=" + at("train.jsonl"),
                               "data.max_length=64", "train.max_steps=3",
                               "train.global_batch_size=2", "train.output_dir=" + at("run"),
                               "log.report=false", "log.tensorboard=false", "device.threads=1"});
    return more;
  }
  Arguments with_rows(const std::string& rows, Arguments more = {}) const {
    write("bad.jsonl", rows);
    more.push_back("data.train=" + at("bad.jsonl"));
    return train(more);
  }

 private:
  testing::TemporaryDirectory directory_;
};

/// Starts the program with its output in files of the folder.
pid_t start(const Folder& folder, const Arguments& arguments,
            const std::string& standard_output = "") {
  const std::string out = standard_output.empty() ? folder.at("stdout") : standard_output;
  const std::string err = folder.at("stderr");
  const pid_t child = fork();
  if (child != 0) return child;
  const int to = open(out.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644);
  const int errors = open(err.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644);
  if (to < 0 || errors < 0 || dup2(to, 1) < 0 || dup2(errors, 2) < 0) _exit(126);
  std::vector<char*> argv = {const_cast<char*>(HEDDLE_BINARY)};
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  execv(HEDDLE_BINARY, argv.data());
  _exit(127);
}

/// The exit status as a shell gives it.
int wait_for(pid_t child) {
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

/// The last line on the standard error that is not progress.
std::string message(const Folder& folder) { return files::read(folder.at("stderr")); }

struct Case {
  std::string name;
  std::function<Arguments(const Folder&)> command;
  int status;
  std::vector<std::string> parts;  ///< of the message; {dir} stands for the folder
};

void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

/// A safetensors file of one-byte tensors, for headers that Heddle would never write.
std::string safetensors(const ordered_json& header) {
  const std::string text = header.dump();
  const std::uint64_t length = text.size();
  std::string file(8, '\0');
  std::memcpy(file.data(), &length, 8);
  return file + text + std::string(16, '\0');
}

const std::vector<Case>& configuration() {
  static const std::vector<Case> cases = {
      {"UnknownKey",
       [](const Folder& f) {
         f.write("run.yaml", "model:\n  path: m\noptim:\n  learning_rate: 1\n");
         return Arguments{"sft", f.at("run.yaml")};
       },
       2,
       {"{dir}/run.yaml:4: unknown key 'optim.learning_rate' (did you mean 'optim.lr'?)"}},
      {"NotYaml",
       [](const Folder& f) {
         f.write("run.yaml", "model:\n  path: [m\n");
         return Arguments{"sft", f.at("run.yaml")};
       },
       2,
       {"{dir}/run.yaml:3: not valid YAML"}},
      {"KeyGivenTwice",
       [](const Folder& f) {
         f.write("run.yaml", "model:\n  path: m\n  path: n\n");
         return Arguments{"sft", f.at("run.yaml")};
       },
       2,
       {"{dir}/run.yaml:3: 'model.path' is given twice, first at {dir}/run.yaml:2"}},
      {"NoSuchConfiguration",
       [](const Folder& f) {
         return Arguments{"sft", f.at("none.yaml")};
       },
       2,
       {"{dir}/none.yaml: no such configuration file"}},
      {"MissingKey",
       [](const Folder&) {
         return Arguments{"sft", "data.train=x"};
       },
       2,
       {"required key 'model.path' is missing"}},
      {"WrongType",
       [](const Folder& f) { return f.train({"optim.lr=fast"}); },
       2,
       {"command line: optim.lr: expected a number >= 0, found 'fast'"}},
      {"OutOfRange",
       [](const Folder& f) { return f.train({"optim.betas=[0.9, 1]"}); },
       2,
       {"command line: optim.betas", "[0, 1)"}},
      {"WrongName",
       [](const Folder& f) { return f.train({"train.method=qlora"}); },
       2,
       {"train.method: expected full|lora, found 'qlora' (did you mean 'lora'?)"}},
      {"KeysThatDoNotFit",
       [](const Folder& f) { return f.train({"optim.warmup_steps=9"}); },
       2,
       {"optim.warmup_steps: warm-up 9 and decay 0 steps are more than train.max_steps 3"}},
      {"EvaluationWithoutData",
       [](const Folder& f) { return f.train({"train.eval_on_start=true"}); },
       2,
       {"train.eval_on_start: evaluation needs data.eval"}},
      {"WrongTarget",
       [](const Folder& f) {
         return f.train({"train.method=lora", "adapter.targets=[q_porj]"});
       },
       2,
       {"adapter.targets: 'q_porj' matches no linear layer", "(did you mean 'q_proj'?)"}},
      {"WrongPattern",
       [](const Folder& f) { return f.train({"train.freeze=['*.nothing']"}); },
       2,
       {"train.freeze: '*.nothing' matches no parameter"}},
      {"NoSuchKernel",
       [](const Folder& f) { return f.train({"kernels.rms_norm=fast"}); },
       2,
       {"kernels.rms_norm: no kernel 'fast' that fits", "kernels of this build: cpu, reference"}},
      {"KernelOfAnotherModel",
       [](const Folder& f) { return f.train({"kernels.moe_experts=reference"}); },
       2,
       {"kernels.moe_experts: this model has no such operator"}},
      {"NoSuchDevice",
       [](const Folder& f) { return f.train({"device=npu"}); },
       1,
       {"device 'npu:0'", "this build has no Ascend back end"}},
      {"UnknownCommand",
       [](const Folder&) {
         return Arguments{"scroe", "model"};
       },
       2,
       {"unknown command 'scroe' (did you mean 'score'?)"}},
      {"TemplateArgumentThatIsNoJson",
       [](const Folder& f) {
         return Arguments{"generate", f.at("model"),    "--prompt",
                          "a",        "--template-arg", "enable_thinking=False"};
       },
       2,
       {"--template-arg enable_thinking: 'False' is not JSON: write true, false"}},
  };
  return cases;
}

const std::vector<Case>& data() {
  static const std::vector<Case> cases = {
      {"NoSuchFile",
       [](const Folder& f) { return f.train({"data.train=" + f.at("none.jsonl")}); },
       2,
       {"cannot open {dir}/none.jsonl: No such file or directory"}},
      {"Directory",
       [](const Folder& f) { return f.train({"data.train=" + f.at("model")}); },
       2,
       {"{dir}/model is a folder, expected a JSONL file"}},
      {"BrokenJson",
       [](const Folder& f) { return f.with_rows("{\"text\": \"a b\"}\n\n{\"text\": \"a\"\n"); },
       2,
       {"{dir}/bad.jsonl:3: not valid JSON"}},
      {"UnknownFormat",
       [](const Folder& f) { return f.with_rows("{\"txt\": \"a b\"}\n"); },
       2,
       {"{dir}/bad.jsonl:1: no field tells the row's format", "'txt'"}},
      {"WrongFieldType",
       [](const Folder& f) {
         return f.with_rows(
             R"({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": 3}]})"
             "\n");
       },
       2,
       {"{dir}/bad.jsonl:1: field 'messages[1].content': is a JSON number, expected a string"}},
      {"JsonList",
       [](const Folder& f) { return f.with_rows("[{\"text\": \"a\"}]\n"); },
       2,
       {"{dir}/bad.jsonl:1: the line holds a JSON array", "jq -c '.[]'"}},
      {"Parquet",
       [](const Folder& f) { return f.with_rows("PAR1\1\2\3PAR1"); },
       2,
       {"this is a Parquet file, expected JSONL. Convert it"}},
      {"Images",
       [](const Folder& f) {
         return f.with_rows(R"({"text": "a", "images": ["x"]})"
                            "\n");
       },
       2,
       {"{dir}/bad.jsonl:1: field 'images': the row comes with media"}},
      {"CutGzip",
       [](const Folder& f) {
         return f.with_rows(std::string("\x1f\x8b\x08\0\0\0\0\0\0\3\x4b", 11));
       },
       2,
       {"{dir}/bad.jsonl ends in the middle of its gzip stream"}},
      {"Empty",
       [](const Folder& f) { return f.with_rows("\n\n"); },
       2,
       {"{dir}/bad.jsonl: no row; the data set is empty"}},
      {"NoLoss",
       [](const Folder& f) {
         return f.with_rows(R"({"messages": [{"role": "user", "content": "a"}]})"
                            "\n",
                            {"data.loss_on=assistant"});
       },
       2,
       {"no token of the data set carries loss", "1 dropped without a loss token"}},
      {"IdBeyondTheVocabulary",
       [](const Folder& f) {
         return f.with_rows(R"({"input_ids": [1, 99999]})"
                            "\n");
       },
       2,
       {"{dir}/bad.jsonl:1: field 'input_ids': 99999 is beyond the tokenizer's 4096 tokens"}},
      {"NoLabel",
       [](const Folder& f) {
         return f.train({"model.head=classify", "model.num_labels=2"});
       },
       2,
       {"{dir}/train.jsonl:1: field 'label': is missing"}},
      {"NoPositive",
       [](const Folder& f) {
         return f.with_rows(R"({"query": "a", "document": "b"})"
                            "\n",
                            {"model.head=embed"});
       },
       2,
       {"{dir}/bad.jsonl:1: field 'positive': is missing"}},
      {"BrokenTemplate",
       [](const Folder& f) {
         f.write("chat.jinja", "{% for message in messages %}{{ message.content }}");
         return f.train({"data.chat_template=" + f.at("chat.jinja")});
       },
       2,
       {"the chat template:1: the block that begins on line 1 is not closed: expected 'endfor'"}},
      {"RowLongerThanAMicroBatch",
       [](const Folder& f) { return f.train({"train.micro_batch_tokens=8"}); },
       2,
       {"train.micro_batch_tokens: 8 is less than data.max_length 64"}},
  };
  return cases;
}

const std::vector<Case>& checkpoint() {
  static const std::vector<Case> cases = {
      {"NoSuchModel",
       [](const Folder& f) { return f.train({"model.path=" + f.at("none")}); },
       2,
       {"{dir}/none: there is no such folder"}},
      {"NoConfiguration",
       [](const Folder& f) {
         fs::remove(f.at("model/config.json"));
         return f.train();
       },
       2,
       {"{dir}/model: config.json is missing"}},
      {"UnknownModelType",
       [](const Folder& f) {
         f.replace("model/config.json", "qwen3_5_text", "llama");
         return f.train();
       },
       2,
       {"{dir}/model/config.json: model_type 'llama' is not one of", "qwen3_next"}},
      {"CutWeights",
       [](const Folder& f) {
         fs::resize_file(f.at("model/model.safetensors"), 300000);
         return f.train();
       },
       2,
       {"{dir}/model/model.safetensors: tensor 'model.embed_tokens.weight' ends at byte",
        "cut off or damaged"}},
      {"MissingTensors",
       [](const Folder& f) {
         f.replace("model/config.json", "\"num_hidden_layers\": 4", "\"num_hidden_layers\": 5");
         return f.train();
       },
       2,
       {"14 missing: model.layers.4.input_layernorm.weight"}},
      {"WrongShapes",
       [](const Folder& f) {
         f.replace("model/config.json", "\"intermediate_size\": 64", "\"intermediate_size\": 72");
         return f.train();
       },
       2,
       {"12 of a wrong shape: model.layers.0.mlp.gate_proj.weight is [64, 32], expected [72, 32]"}},
      {"Pickle",
       [](const Folder& f) {
         fs::rename(f.at("model/model.safetensors"), f.at("model/pytorch_model.bin"));
         return f.train();
       },
       2,
       {"only PyTorch pickle files (pytorch_model.bin)", "Convert them once"}},
      {"Quantized",
       [](const Folder& f) {
         f.write(
             "model/model.safetensors",
             safetensors({{"a.weight_scale_inv",
                           {{"dtype", "F32"}, {"shape", {1}}, {"data_offsets", {0, 4}}}},
                          {"a.weight",
                           {{"dtype", "F8_E4M3"}, {"shape", {12}}, {"data_offsets", {4, 16}}}}}));
         return f.train();
       },
       2,
       {"2 tensors are of a quantised checkpoint", "a.weight_scale_inv (F32)"}},
      {"BrokenTokenizer",
       [](const Folder& f) {
         f.write("model/tokenizer.json", R"({"model": {}})");
         return f.train();
       },
       2,
       {"{dir}/model/tokenizer.json.model: key 'vocab' is missing"}},
      {"NoSuchAdapter",
       [](const Folder& f) {
         return Arguments{"score",   f.at("model"),       "--adapter", f.at("none"),
                          "--input", f.at("train.jsonl"), "--output",  f.at("scored.jsonl")};
       },
       2,
       {"{dir}/none: there is no such adapter folder"}},
      {"DamagedTrainingCheckpoint",
       [](const Folder& f) {
         const pid_t first = start(f, f.train());
         EXPECT_EQ(wait_for(first), 0) << message(f);
         const std::string saved = f.at("run/checkpoints/step-00000003");
         fs::rename(saved, f.at("saved"));
         fs::remove_all(f.at("run"));
         fs::resize_file(f.at("saved/weights.safetensors"), 1000);
         return f.train({"train.resume=" + f.at("saved")});
       },
       2,
       {"{dir}/saved: weights.safetensors has 1000 bytes, expected"}},
      {"ExportOverAModel",
       [](const Folder& f) {
         return Arguments{"export", f.at("model"), "--output", f.at("model")};
       },
       2,
       {"{dir}/model exists and is not empty"}},
      {"ExportOverSomethingElse",
       [](const Folder& f) {
         fs::create_directory(f.at("notes"));
         f.write("notes/todo.txt", "mine");
         return Arguments{"export", f.at("model"), "--output", f.at("notes"), "--overwrite"};
       },
       2,
       {"{dir}/notes is not overwritten: it holds no config.json"}},
      {"ExportOverAFile",
       [](const Folder& f) {
         return Arguments{"export", f.at("model"), "--output", f.at("train.jsonl")};
       },
       2,
       {"{dir}/train.jsonl exists and is no folder"}},
  };
  return cases;
}

class BadInput : public ::testing::TestWithParam<Case> {};

TEST_P(BadInput, IsExplained) {
  const Folder folder;
  const Case& c = GetParam();
  const int status = wait_for(start(folder, c.command(folder)));
  const std::string text = message(folder);
  EXPECT_EQ(status, c.status) << text;
  for (std::string part : c.parts) {
    for (std::size_t at; (at = part.find("{dir}")) != std::string::npos;)
      part.replace(at, 5, folder.at("").substr(0, folder.at("").size() - 1));
    EXPECT_THAT(text, HasSubstr(part));
  }
  // One line, without a trace, and nothing that looks like a result.
  EXPECT_THAT(text, HasSubstr("error: "));
  EXPECT_EQ(std::count(text.begin() + static_cast<std::ptrdiff_t>(text.rfind("error: ")),
                       text.end(), '\n'),
            1);
  EXPECT_FALSE(fs::exists(folder.at("run/final")));
}

INSTANTIATE_TEST_SUITE_P(Configuration, BadInput, ::testing::ValuesIn(configuration()),
                         testing::ParameterName());
INSTANTIATE_TEST_SUITE_P(Data, BadInput, ::testing::ValuesIn(data()), testing::ParameterName());
INSTANTIATE_TEST_SUITE_P(Checkpoint, BadInput, ::testing::ValuesIn(checkpoint()),
                         testing::ParameterName());

/// A file system of its own, in a mount namespace that ends with the test.
class BadDisk : public ::testing::Test {
 protected:
  /// Skips the test, with the reason, where this process may not mount.
  void mount_tmpfs(const std::string& options) {
    fs::create_directory(folder_.at("disk"));
    if (geteuid() != 0) GTEST_SKIP() << "NOT TESTED: mounting a small tmpfs needs root";
    if (unshare(CLONE_NEWNS) != 0 ||
        mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        mount("tmpfs", folder_.at("disk").c_str(), "tmpfs", 0, options.c_str()) != 0) {
      GTEST_SKIP() << "NOT TESTED: this process may not mount a tmpfs: " << strerror(errno);
    }
    is_mounted_ = true;
  }
  void TearDown() override {
    if (is_mounted_) umount2(folder_.at("disk").c_str(), MNT_DETACH);
  }
  Arguments train_on_disk(Arguments more = {}) const {
    more.insert(more.begin(), {"train.output_dir=" + folder_.at("disk/run"), "ckpt.every=1",
                               "ckpt.keep_last=3", "data.cache_dir=" + folder_.at("cache")});
    return folder_.train(more);
  }

  Folder folder_;
  bool is_mounted_ = false;
};

TEST_F(BadDisk, AFullDiskLosesNothing) {
  // A checkpoint of this model takes 2 MiB: the third does not fit.
  mount_tmpfs("size=5m");
  if (IsSkipped()) return;
  EXPECT_EQ(wait_for(start(folder_, train_on_disk())), 1);
  EXPECT_THAT(message(folder_), HasSubstr("disk/run/checkpoints/step-00000003 needs 2"));
  EXPECT_THAT(message(folder_), HasSubstr("and its disk has"));
  EXPECT_TRUE(fs::exists(folder_.at("disk/run/checkpoints/step-00000002")));
  EXPECT_FALSE(fs::exists(folder_.at("disk/run/final")));
  // With room again the run goes on from what was saved.
  ASSERT_EQ(mount("tmpfs", folder_.at("disk").c_str(), "tmpfs", MS_REMOUNT, "size=50m"), 0);
  EXPECT_EQ(wait_for(start(folder_, train_on_disk())), 0) << message(folder_);
  EXPECT_THAT(message(folder_), HasSubstr("continuing after step"));
  EXPECT_TRUE(fs::exists(folder_.at("disk/run/final/model.safetensors")));
}

TEST_F(BadDisk, AFullDiskLeavesNoHalfWrittenResult) {
  mount_tmpfs("size=300k");
  if (IsSkipped()) return;
  EXPECT_EQ(wait_for(start(folder_,
                           {"export", folder_.at("model"), "--output", folder_.at("disk/copy")})),
            1);
  EXPECT_THAT(message(folder_), HasSubstr("disk/copy"));
  std::string rows;
  for (int i = 0; i < 64; ++i) rows += files::read(folder_.at("train.jsonl"));
  folder_.write("many.jsonl", rows);
  EXPECT_EQ(
      wait_for(start(folder_, {"score", folder_.at("model"), "--input", folder_.at("many.jsonl"),
                               "--output", folder_.at("disk/scored.jsonl"), "--threads", "1"})),
      1);
  EXPECT_THAT(message(folder_), HasSubstr("disk/scored.jsonl"));
  EXPECT_THAT(message(folder_), HasSubstr("No space left on device"));
  EXPECT_TRUE(fs::is_empty(folder_.at("disk")));
}

TEST_F(BadDisk, AReadOnlyDirectoryIsNamed) {
  if (geteuid() != 0) {
    fs::create_directory(folder_.at("disk"));
    fs::permissions(folder_.at("disk"), fs::perms::owner_read | fs::perms::owner_exec);
  } else {
    mount_tmpfs("size=1m");
    if (IsSkipped()) return;
    ASSERT_EQ(mount("tmpfs", folder_.at("disk").c_str(), "tmpfs", MS_REMOUNT | MS_RDONLY, nullptr),
              0);
  }
  EXPECT_EQ(wait_for(start(folder_, train_on_disk())), 1);
  EXPECT_THAT(message(folder_), HasSubstr("disk/run"));
  EXPECT_THAT(message(folder_),
              ::testing::AnyOf(HasSubstr("Read-only file system"), HasSubstr("Permission denied")));
}

TEST_F(BadDisk, AFullStandardOutputIsAnError) {
  EXPECT_EQ(wait_for(start(folder_, {"--help"}, "/dev/full")), 1);
  EXPECT_THAT(message(folder_), HasSubstr("cannot write to the standard output"));
}

class Signals : public ::testing::Test {
 protected:
  /// A long run, of which a checkpoint is on the disk.
  pid_t start_and_wait_for_checkpoint(Arguments more) {
    const pid_t child = start(folder_, folder_.train(std::move(more)));
    while (!fs::exists(folder_.at("run/checkpoints/step-00000002")) &&
           waitpid(child, nullptr, WNOHANG) == 0)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return child;
  }
  Folder folder_;
};

TEST_F(Signals, OneSavesAndSaysHowToGoOn) {
  for (const int signal : {SIGINT, SIGTERM}) {
    const pid_t child = start_and_wait_for_checkpoint(
        {"train.max_steps=100000", "ckpt.every=2", "train.output_dir=" + folder_.at("run")});
    kill(child, signal);
    EXPECT_EQ(wait_for(child), 0) << message(folder_);
    const std::string out = files::read(folder_.at("stdout"));
    EXPECT_THAT(out, HasSubstr("continue with:\n  heddle pt model.path="));
    EXPECT_FALSE(fs::exists(folder_.at("run/final")));
    fs::remove_all(folder_.at("run"));
  }
}

TEST_F(Signals, TheSecondEndsAtOnceAndLeavesTheLastCheckpoint) {
  // Steps that take long, so that the second signal comes before the first is acted upon.
  const Arguments slow = {"train.max_steps=100000", "ckpt.every=2", "train.global_batch_size=64",
                          "data.packing=false", "train.micro_batch_tokens=64"};
  const pid_t child = start_and_wait_for_checkpoint(slow);
  int status = 0;
  while (waitpid(child, &status, WNOHANG) == 0) {
    kill(child, SIGINT);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 128 + SIGINT);
  Arguments again = slow;
  again.push_back("train.max_steps=4");
  EXPECT_EQ(wait_for(start(folder_, folder_.train(again))), 0) << message(folder_);
  EXPECT_THAT(message(folder_), HasSubstr("continuing after step"));
}

}  // namespace
}  // namespace heddle::cli
