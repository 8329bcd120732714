// The program itself on everything that users get wrong: what it says, and with which status it
// ends (2: the user's mistake, 1: anything else).
#include <functional>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "bad_checkpoints.h"
#include "bad_input_case.h"
#include "program.h"
#include "testing/parameter_name.h"

namespace heddle::cli {
namespace {

using nlohmann::ordered_json;
using ::testing::HasSubstr;

const std::vector<BadInputCase>& configuration() {
  static const std::vector<BadInputCase> cases = {
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
       {"train.method: expected full|lora, found 'qlora' (quantised base weights are not built",
        "write lora)"}},
      {"KeysThatDoNotFit",
       [](const Folder& f) { return f.train({"optim.warmup_steps=9"}); },
       2,
       {"optim.warmup_steps: warm-up 9 and decay 0 steps are more than train.max_steps 3"}},
      {"OutputThatCannotBeMade",
       [](const Folder& f) { return f.train({"train.output_dir=" + f.at("train.jsonl/run")}); },
       2,
       {"train.output_dir: cannot make the folder {dir}/train.jsonl/run: Not a directory"}},
      {"LogsThatCannotBeMade",
       [](const Folder& f) {
         return Arguments{"launch",
                          "--nproc",
                          "2",
                          "--log-dir",
                          f.at("train.jsonl/logs"),
                          "--",
                          "sft",
                          "model.path=" + f.at("model"),
                          "data.train=" + f.at("train.jsonl"),
                          "parallel.dp=2"};
       },
       2,
       {"--log-dir: cannot make the folder {dir}/train.jsonl/logs: Not a directory"}},
      {"ResumeFromNothing",
       [](const Folder& f) { return f.train({"train.resume=" + f.at("none")}); },
       2,
       {"command line: train.resume: there is no folder {dir}/none; expected auto, never, or"}},
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
      {"EightBitsWithoutAGpu",
       [](const Folder& f) {
         return f.train({"kernels.fp8=true", "device=cpu"});
       },
       2,
       {"kernels.fp8: linear cannot run cuda.fp8_rowwise_from_block_4 on cpu in Float",
        "leave the key out"}},
      {"KernelOfAnotherModel",
       [](const Folder& f) { return f.train({"kernels.moe_experts=reference"}); },
       2,
       {"kernels.moe_experts: this model has no such operator"}},
      {"NoSuchDevice",
       [](const Folder& f) { return f.train({"device=npu"}); },
       2,
       {"device 'npu:0'", "this build has no Ascend back end"}},
      {"UnknownCommand",
       [](const Folder&) {
         return Arguments{"scroe", "model"};
       },
       2,
       {"unknown command 'scroe' (did you mean 'score'?)"}},
      {"CommandOfAnotherProgram",
       [](const Folder&) {
         return Arguments{"merge", "model"};
       },
       2,
       {"unknown command 'merge' (heddle export MODEL_DIR --adapter DIR --output DIR)"}},
      {"MethodThatIsNotBuilt",
       [](const Folder&) {
         return Arguments{"kto", "run.yaml"};
       },
       2,
       {"unknown command 'kto' (not built yet; preference tuning is heddle dpo)"}},
      {"MethodThatIsALoss",
       [](const Folder&) {
         return Arguments{"orpo", "run.yaml"};
       },
       2,
       {"unknown command 'orpo' (heddle dpo with dpo.loss=orpo)"}},
      {"SettingAsAnOption",
       [](const Folder& f) { return f.train({"--optim.lr=1e-4"}); },
       2,
       {"unknown option '--optim.lr=1e-4' (settings are key=value without dashes: optim.lr=1e-4)"}},
      {"SettingOfAnyTrainingCommandAsAnOption",
       [](const Folder&) {
         return Arguments{"dpo", "run.yaml", "--dpo.beta=0.2"};
       },
       2,
       {"unknown option '--dpo.beta=0.2' (settings are key=value without dashes: dpo.beta=0.2)"}},
      {"DtypeOfAnotherProgram",
       [](const Folder& f) { return f.train({"model.dtype=bf16"}); },
       2,
       {"model.dtype: expected float64|float32|bfloat16, found 'bf16' (write bfloat16)"}},
      {"OptimizerOfAnotherProgram",
       [](const Folder& f) { return f.train({"optim.name=adamw_8bit"}); },
       2,
       {"optim.name", "'adamw_8bit' (write optim.name=adamw and optim.state_dtype=int8)"}},
      {"MoreAfterAValue",
       [](const Folder& f) { return f.train({"data.train=[a.jsonl] # b"}); },
       2,
       {"command line: data.train=[a.jsonl] # b: ", "there is more after the value"}},
      {"WarmUpLongerThanTheRun",
       [](const Folder& f) {
         return f.train({"train.max_steps=0", "train.epochs=1", "optim.warmup_steps=900"});
       },
       2,
       {"optim.warmup_steps: warm-up 900 and decay 0 steps are more than the ", " of the run"}},
      {"ProfileAfterTheRun",
       [](const Folder& f) { return f.train({"log.profile_step=900"}); },
       2,
       {"command line: log.profile_step: 900 is after the last of the ", " steps of the run"}},
      {"ParameterThatIsNoModule",
       [](const Folder& f) {
         return f.train({"train.method=lora", "adapter.modules_to_save=[A_log]"});
       },
       2,
       {"adapter.modules_to_save: 'A_log' is a parameter of model.layers.0.linear_attn",
        "write linear_attn"}},
      {"TemplateArgumentThatIsNoJson",
       [](const Folder& f) {
         return Arguments{"generate", f.at("model"),    "--prompt",
                          "a",        "--template-arg", "enable_thinking=False"};
       },
       2,
       {"--template-arg enable_thinking: 'False' is not JSON: write true, false"}},
      {"TrainingWithoutSettings",
       [](const Folder&) { return Arguments{"sft"}; },
       2,
       {"expected a YAML file, or settings such as model.path=DIR data.train=FILE"}},
      {"OutputOfOnePrompt",
       [](const Folder& f) {
         return Arguments{"generate", f.at("model"), "--prompt",
                          "a",        "--output",    f.at("out.jsonl")};
       },
       2,
       {"--output takes the answers to the rows of --input"}},
      {"SettingThatGenerateHasAnOptionFor",
       [](const Folder& f) {
         return Arguments{"generate", f.at("model"), "rollout.temperature=2", "--prompt", "a"};
       },
       2,
       {"'rollout.temperature=2': of a configuration, parallel.*, rollout.state_dtype, kv_page, "
        "memory_fraction, graph_batches and kernels.* alone can be set here"}},
      {"PageThatIsNoPowerOfTwo",
       [](const Folder& f) {
         return Arguments{"generate", f.at("model"), "rollout.kv_page=12", "--prompt", "a"};
       },
       2,
       {"rollout.kv_page: expected a power of two, found 12"}},
      {"OutputInAFolderThatIsNotThere",
       [](const Folder& f) {
         f.write("in.jsonl", R"({"text":"a"})");
         return Arguments{"score",          f.at("model"), "--input",
                          f.at("in.jsonl"), "--output",    f.at("none/out.jsonl")};
       },
       1,
       {"cannot write {dir}/none/out.jsonl: there is no folder {dir}/none; make it first"}},
  };
  return cases;
}

const std::vector<BadInputCase>& data() {
  static const std::vector<BadInputCase> cases = {
      {"NoSuchFile",
       [](const Folder& f) { return f.train({"data.train=" + f.at("none.jsonl")}); },
       2,
       {"data.train: cannot open {dir}/none.jsonl: No such file or directory"}},
      {"NoSuchEvaluationFile",
       [](const Folder& f) { return f.train({"data.eval=" + f.at("none.jsonl")}); },
       2,
       {"data.eval: cannot open {dir}/none.jsonl: No such file or directory"}},
      {"Directory",
       [](const Folder& f) { return f.train({"data.train=" + f.at("model")}); },
       2,
       {"{dir}/model/config.json:1: not valid JSON"}},
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
      {"Parquet",
       [](const Folder& f) { return f.with_rows("PAR1\1\2\3PAR1"); },
       2,
       {"{dir}/bad.jsonl: ", "Parquet"}},
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
      {"NothingToScore",
       [](const Folder& f) {
         f.write("empty.jsonl", "\n\n");
         fs::create_directory(f.at("run"));
         return Arguments{"score",    f.at("model"),    "--input", f.at("empty.jsonl"),
                          "--output", f.at("run/final")};
       },
       2,
       {"--input: {dir}/empty.jsonl: no row"}},
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
       {"{dir}/chat.jinja:1: the block that begins on line 1 is not closed: expected 'endfor'"}},
      {"RowLongerThanAMicroBatch",
       [](const Folder& f) { return f.train({"train.micro_batch_tokens=8"}); },
       2,
       {"train.micro_batch_tokens: 8 is less than data.max_length 64"}},
  };
  return cases;
}

class BadInput : public ::testing::TestWithParam<BadInputCase> {};

TEST_P(BadInput, IsExplained) {
  const Folder folder;
  const BadInputCase& c = GetParam();
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
INSTANTIATE_TEST_SUITE_P(Checkpoint, BadInput, ::testing::ValuesIn(bad_checkpoints()),
                         testing::ParameterName());

}  // namespace
}  // namespace heddle::cli
