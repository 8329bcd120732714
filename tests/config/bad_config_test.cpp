#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "base/errors.h"
#include "config/config.h"
#include "testing/parameter_name.h"

namespace heddle::config {
namespace {

struct BadConfig {
  const char* name;
  std::string yaml;
  std::vector<std::string> overrides;
  std::string message;
};

void PrintTo(const BadConfig& c, std::ostream* out) { *out << c.name; }

class BadConfigs : public ::testing::TestWithParam<BadConfig> {};

TEST_P(BadConfigs, GiveTheirMessage) {
  const BadConfig& bad = GetParam();
  try {
    parse(bad.yaml, "run.yaml", bad.overrides);
    FAIL() << "accepted; expected: " << bad.message;
  } catch (const ConfigError& e) {
    EXPECT_EQ(e.what(), bad.message);
    EXPECT_EQ(e.exit_status(), 2);
  }
}

/// A good start of three lines; what follows begins in line 4.
std::string after_good(const std::string& rest) {
  return "model: {path: m}\ndata:\n  train: a.jsonl\n" + rest;
}

INSTANTIATE_TEST_SUITE_P(
    Config, BadConfigs,
    ::testing::Values(
        BadConfig{"UnknownKeyOfAnotherProgram",
                  after_good("optim:\n  learning_rate: 1e-4\n"),
                  {},
                  "run.yaml:5: unknown key 'optim.learning_rate' (did you mean 'optim.lr'?)"},
        BadConfig{"TypingError",
                  after_good("optim:\n  warmup_step: 10\n"),
                  {},
                  "run.yaml:5: unknown key 'optim.warmup_step' (did you mean "
                  "'optim.warmup_steps'?)"},
        BadConfig{"RightNameWrongSection",
                  after_good("train:\n  lr: 1e-4\n"),
                  {},
                  "run.yaml:5: unknown key 'train.lr' (did you mean 'optim.lr'?)"},
        BadConfig{"NoSection",
                  after_good("seed: 1\n"),
                  {},
                  "run.yaml:4: unknown key 'seed' (did you mean 'train.seed'?)"},
        BadConfig{
            "RewardsOfAnotherProtocol",
            after_good("train: {objective: policy}\nrl:\n  reward:\n    url: ftp://a:b@host/x\n"),
            {},
            "run.yaml:7: rl.reward.url: expected http:// or https://, found "
            "'ftp://(hidden)@host/x'"},
        BadConfig{"EmptyStop",
                  after_good("train: {objective: policy}\nrl: {reward: {verifiers: {exact: 1}}}\n"
                             "rollout: {stop: ['']}\n"),
                  {},
                  "run.yaml:6: rollout.stop: an empty text ends nothing: expected at least a byte"},
        BadConfig{"TokensOfNoProbability",
                  after_good("rollout: {top_k: 3, top_p: 0}\n"),
                  {},
                  "run.yaml:4: rollout.top_p: expected a number in (0, 1], found '0'"},
        BadConfig{
            "GroupsOfOneAreAlwaysEqual",
            after_good("train: {objective: policy}\nrl: {reward: {verifiers: {exact: 1}}}\n"),
            {"rl.algorithm.advantage=gae", "rl.samples_per_group=1", "rl.dynamic_sampling=true"},
            "command line: rl.dynamic_sampling: replaces groups whose rewards are all equal, "
            "and with rl.samples_per_group 1 all are: expected false, or 2 or more samples"},
        BadConfig{
            "ABatchThatNoMemoryHolds",
            after_good("train: {objective: policy}\nrl: {reward: {verifiers: {exact: 1}}}\n"),
            {"rl.sync_every=1000000000000000"},
            "command line: rl.sync_every: rl.groups_per_step 32 x rl.sync_every 1000000000000000 x "
            "rl.samples_per_group 8 are 2.56e+17 completions of a batch, which are in memory until "
            "its last step: expected at most 16777216"},
        BadConfig{"MoreProcessesThanAMachineHas",
                  after_good(""),
                  {"rl.reward.workers=1000000000"},
                  "command line: rl.reward.workers: expected an integer in [1, 4096], found "
                  "'1000000000'"},
        BadConfig{"DropoutThatGenerationHasNot",
                  after_good("train: {objective: policy}\nrl: {reward: {verifiers: {exact: 1}}}\n"),
                  {"train.method=lora", "adapter.dropout=0.1"},
                  "command line: adapter.dropout: train.objective policy compares a pass that "
                  "trains with the generation of the same tokens, which noise would tell apart; "
                  "set it to 0"},
        BadConfig{"CutConversationsRenderedAnew",
                  after_good("train: {objective: policy}\nrl: {history: render, reward: {command: "
                             "[judge]}}\n"),
                  {"data.truncation=keep_end"},
                  "command line: data.truncation: rl.history render renders whole conversations: "
                  "expected auto (a longer prompt is an error) or drop"},
        BadConfig{"UnknownSection",
                  after_good("optimizr:\n  lr: 1\n"),
                  {},
                  "run.yaml:4: unknown key 'optimizr' (did you mean 'optim'?)"},
        BadConfig{"NothingIsNear", after_good("quux: 1\n"), {}, "run.yaml:4: unknown key 'quux'"},
        BadConfig{"UnknownOverride",
                  after_good(""),
                  {"lora_r=8"},
                  "command line: unknown key 'lora_r' (did you mean 'adapter.rank'?)"},
        BadConfig{"UnknownKeyBelowAScalar",
                  after_good("optim: {lr: {peak: 1}}\n"),
                  {},
                  "run.yaml:4: optim.lr: expected a number >= 0, found a mapping"},
        BadConfig{"TextForANumber",
                  after_good("optim: {lr: fast}\n"),
                  {},
                  "run.yaml:4: optim.lr: expected a number >= 0, found 'fast'"},
        BadConfig{"NumberWithUnit",
                  after_good(""),
                  {"optim.eps=1e-8x"},
                  "command line: optim.eps: expected a number > 0, found '1e-8x'"},
        BadConfig{"NotANumber",
                  after_good(""),
                  {"optim.lr=nan"},
                  "command line: optim.lr: expected a number >= 0, found 'nan'"},
        BadConfig{"Negative",
                  after_good("optim: {lr: -1}\n"),
                  {},
                  "run.yaml:4: optim.lr: expected a number >= 0, found '-1'"},
        BadConfig{"OutOfHalfOpenRange",
                  after_good("adapter: {dropout: 1}\n"),
                  {},
                  "run.yaml:4: adapter.dropout: expected a number in [0, 1), found '1'"},
        BadConfig{"FractionForAnInteger",
                  after_good("train: {max_steps: 1.5}\n"),
                  {},
                  "run.yaml:4: train.max_steps: expected an integer >= 0, found '1.5'"},
        BadConfig{"IntegerTooLarge",
                  after_good("train: {max_steps: 99999999999999999999}\n"),
                  {},
                  "run.yaml:4: train.max_steps: expected an integer >= 0, found "
                  "'99999999999999999999'"},
        BadConfig{"NothingForANumber",
                  after_good("optim:\n  lr:\n"),
                  {},
                  "run.yaml:5: optim.lr: expected a number >= 0, found nothing"},
        BadConfig{"ListForANumber",
                  after_good("optim:\n  lr: [1, 2]\n"),
                  {},
                  "run.yaml:5: optim.lr: expected a number >= 0, found a list of 2"},
        BadConfig{"WordForABoolean",
                  after_good("train: {deterministic: sure}\n"),
                  {},
                  "run.yaml:4: train.deterministic: expected true|false, found 'sure'"},
        BadConfig{"UnknownValueWithANearOne",
                  after_good("optim: {name: adam}\n"),
                  {},
                  "run.yaml:4: optim.name: expected adamw|sgd|muon, found 'adam' (did you mean "
                  "'adamw'?)"},
        BadConfig{"UnknownValue",
                  after_good("model: {path: m, dtype: int4}\n").substr(17),
                  {},
                  "run.yaml:3: model.dtype: expected float64|float32|bfloat16, found 'int4'"},
        BadConfig{"OneBeta",
                  after_good("optim: {betas: [0.9]}\n"),
                  {},
                  "run.yaml:4: optim.betas: expected two numbers in [0, 1), as in [0.9, 0.999], "
                  "found a list of 1"},
        BadConfig{"MappingInsideAListOfTexts",
                  after_good("train: {freeze: [{a: b}]}\n"),
                  {},
                  "run.yaml:4: train.freeze: expected texts in the list, found a mapping"},
        BadConfig{
            "UnknownKeyOfADataSource",
            after_good("").substr(0, 23) + "  train: [{file: a}]\n",
            {},
            "run.yaml:3: data.train: expected {path: text, weight: number >= 0}, found 'file' "
            "in the mapping"},
        BadConfig{"WeightOfADataSource",
                  after_good("").substr(0, 23) + "  train: [{path: a, weight: -1}]\n",
                  {},
                  "run.yaml:3: data.train: expected a number >= 0, found '-1'"},
        BadConfig{"UnknownDevice",
                  after_good("device: gpu\n"),
                  {},
                  "run.yaml:4: device.name: expected cpu|cuda[:N]|npu[:N], found 'gpu'"},
        BadConfig{"ShardSizeWithoutSense",
                  after_good("ckpt: {export: {max_shard_size: big}}\n"),
                  {},
                  "run.yaml:4: ckpt.export.max_shard_size: expected a number of bytes, as 5GB or "
                  "512MiB, found 'big'"},
        BadConfig{"ScalarForASection",
                  after_good("optim: adamw\n"),
                  {},
                  "run.yaml:4: optim: expected a section with keys, found 'adamw'"},
        BadConfig{"KeyTwice",
                  after_good("train:\n  seed: 1\n  epochs: 2\n  seed: 2\n"),
                  {},
                  "run.yaml:7: 'train.seed' is given twice, first at run.yaml:5"},
        BadConfig{"SectionTwice",
                  after_good("data:\n  eval: b\n"),
                  {},
                  "run.yaml:4: 'data' is given twice, first at run.yaml:2"},
        BadConfig{"NotYaml",
                  after_good("optim: {lr: 1\n"),
                  {},
                  "run.yaml:5: not valid YAML: end of map flow not found"},
        BadConfig{"APatternThatIsNotQuoted",
                  after_good("train:\n  freeze: [*norm*]\n"),
                  {},
                  "run.yaml:5: not valid YAML: the referenced anchor is not defined; a text that "
                  "begins with * is quoted, as \"*norm*\""},
        BadConfig{"AByteThatIsNoText",
                  after_good("optim: {lr: 1}\n\xff\n"),
                  {},
                  "run.yaml:5: not valid YAML: byte 0xff is not UTF-8 text"},
        BadConfig{"ACutCharacter",
                  after_good("optim: \xe2\x82"),
                  {},
                  "run.yaml:4: not valid YAML: byte 0xe2 is not UTF-8 text"},
        BadConfig{"AnEncodingThatIsAskedForNowhere",
                  std::string("\xff\xfem\0o\0", 6),
                  {},
                  "run.yaml:1: not valid YAML: byte 0xff is not UTF-8 text"},
        BadConfig{"AControlCharacter",
                  after_good("optim:\n  schedule: a\x04"
                             "b\n"),
                  {},
                  "run.yaml:5: not valid YAML: a control character, 0x04"},
        BadConfig{"AZero",
                  std::string("model\0: {path: m}\n", 18),
                  {},
                  "run.yaml:1: not valid YAML: a control character, 0x00"},
        BadConfig{"BytesThatSomeReadersTakeForUtf32",
                  std::string(",onm.o\x01\0\0\0isonldel:* ", 21),
                  {},
                  "run.yaml:1: not valid YAML: a control character, 0x01"},
        BadConfig{
            "ACommaAtTheTop", ",a: b\n", {}, "run.yaml: expected one YAML document, found more"},
        BadConfig{"ATagThatEndsInAComma",
                  "!irbna,iads\n",
                  {},
                  "run.yaml: expected one YAML document, found more"},
        BadConfig{"AnAnchorThatEndsInAComma",
                  "&a,b c\n",
                  {},
                  "run.yaml: expected one YAML document, found more"},
        BadConfig{"TwoDocuments",
                  after_good("---\nmodel: {path: n}\n"),
                  {},
                  "run.yaml: expected one YAML document, found more"},
        BadConfig{"AListAtTheTop",
                  "- model\n",
                  {},
                  "run.yaml:1: expected sections (model:, data:, ...), found a list of 1"},
        BadConfig{"OverrideWithoutEquals",
                  after_good(""),
                  {"optim.lr"},
                  "command line: expected key=value (as optim.lr=3e-4), found 'optim.lr'"},
        BadConfig{"OverrideWithAPatternThatIsNotQuoted",
                  after_good(""),
                  {"train.freeze=[*norm*]"},
                  "command line: train.freeze=[*norm*]: the value is not valid YAML: the "
                  "referenced anchor is not defined; a text that begins with * is quoted, as "
                  "\"*norm*\""},
        BadConfig{"OverrideOfAStarAlone",
                  after_good(""),
                  {"train.freeze=*"},
                  "command line: train.freeze=*: the value is not valid YAML: alias not found "
                  "after *; a text that begins with * is quoted, as \"*norm*\""},
        BadConfig{"OverrideThatIsNoYaml",
                  after_good(""),
                  {"optim.betas=[0.9"},
                  "command line: optim.betas=[0.9: the value is not valid YAML: end of sequence "
                  "flow not found"},
        BadConfig{"EmptyFile",
                  "",
                  {},
                  "run.yaml: required key 'model.path' is missing: folder of a Hugging Face "
                  "checkpoint, or its name on the Hub (hf://, ms://)"},
        BadConfig{"NoData",
                  "model: {path: m}\n",
                  {},
                  "run.yaml: required key 'data.train' is missing: training files, folders, "
                  "patterns or a data set of the Hugging Face Hub; weight: how often a row is seen "
                  "in an epoch"},
        BadConfig{"LoraWithoutRank",
                  after_good("train: {method: lora}\nadapter:\n  rank: 0\n"),
                  {},
                  "run.yaml:6: adapter.rank: train.method lora needs a rank >= 1"},
        BadConfig{"AnotherNumberOfLabels",
                  after_good(""),
                  {"model.head=classify", "model.num_labels=3", "data.labels=[a, b]"},
                  "command line: model.num_labels: is 3, but data.labels names 2 classes: leave it "
                  "out"},
        BadConfig{"WsdWithoutDecay",
                  after_good("optim: {schedule: wsd}\n"),
                  {},
                  "run.yaml:4: optim.schedule: wsd needs optim.decay_steps >= 1"},
        BadConfig{"WarmupLongerThanTheRun",
                  after_good("optim: {warmup_steps: 100}\ntrain: {max_steps: 50}\n"),
                  {},
                  "run.yaml:4: optim.warmup_steps: warm-up 100 and decay 0 steps are more than "
                  "train.max_steps 50"},
        BadConfig{"NothingToTrain",
                  after_good("train: {epochs: 0}\n"),
                  {},
                  "run.yaml:4: train.epochs: 0 with train.max_steps 0 trains nothing; set one of "
                  "them"},
        BadConfig{"MicroBatchSmallerThanARow",
                  after_good("train: {micro_batch_tokens: 512}\n"),
                  {},
                  "run.yaml:4: train.micro_batch_tokens: 512 is less than data.max_length 2048: "
                  "the longest row would not fit"},
        BadConfig{"EarlyStopWithoutEvaluation",
                  after_good("train: {early_stop_patience: 2}\n"),
                  {},
                  "run.yaml:4: train.early_stop_patience: early stopping needs data.eval"},
        BadConfig{
            "EarlyStopWithoutAPace",
            after_good("train: {early_stop_patience: 2}\n"),
            {"data.eval=e.jsonl"},
            "run.yaml:4: train.early_stop_patience: early stopping needs train.eval_every >= 1, or "
            "train.eval_every_epochs"},
        BadConfig{"SumsWiderThanTheWeights",
                  after_good("optim: {grad_dtype: float64}\n"),
                  {},
                  "run.yaml:4: optim.grad_dtype: float64 is for model.dtype float64, found "
                  "float32"},
        BadConfig{
            "SamplesOfDividedSequences",
            after_good("parallel: {cp: 2}\nlog: {sample_prompts: [hello]}\n"),
            {},
            "run.yaml:5: log.sample_prompts: answers are generated in any layout but parallel.cp "
            "above 1; expected [] with it"}),
    testing::ParameterName());

}  // namespace
}  // namespace heddle::config
