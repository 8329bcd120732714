#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "base/errors.h"
#include "base/files.h"
#include "config/config.h"
#include "testing/paths.h"
#include "testing/temporary_directory.h"

namespace heddle::config {
namespace {

using ::testing::AnyOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr std::string_view kSmall = "model: {path: m}\ndata: {train: a.jsonl}\n";

TEST(Config, ReadsEverySpellingOfDataFiles) {
  const RunConfig c = parse(
      "model: {path: m}\n"
      "data:\n"
      "  train:\n"
      "    - a.jsonl\n"
      "    - {path: b.jsonl.zst, weight: 0.25}\n"
      "  eval: held out.jsonl\n",
      "run.yaml");
  EXPECT_THAT(c.data.train, ElementsAre(DataSource{"a.jsonl", 1}, DataSource{"b.jsonl.zst", 0.25}));
  EXPECT_THAT(c.data.eval, ElementsAre(DataSource{"held out.jsonl", 1}));
}

TEST(Config, OverridesWinAndKeepTheirOrigin) {
  const std::vector<std::string> overrides = {"optim.lr=3e-4", "data.train=[a.jsonl,b.jsonl]",
                                              "optim.betas=[0.8, 0.9]", "device=cuda:1",
                                              "kernels.gated_delta_rule=reference"};
  const RunConfig c =
      parse("model: {path: m}\n\noptim:\n  lr: 1\n  eps: 1e-6\n", "run.yaml", overrides);
  EXPECT_EQ(c.optim.lr, 3e-4);
  EXPECT_EQ(c.optim.eps, 1e-6);
  EXPECT_THAT(c.optim.betas, ElementsAre(0.8, 0.9));
  EXPECT_THAT(c.data.train, ElementsAre(DataSource{"a.jsonl"}, DataSource{"b.jsonl"}));
  EXPECT_EQ(c.device.name, (DeviceName{DeviceType::kCuda, 1}));
  EXPECT_EQ(c.kernels.choice.at("gated_delta_rule"), "reference");
  EXPECT_EQ(where(c, "optim.lr"), "command line: optim.lr");
  EXPECT_EQ(where(c, "optim.eps"), "run.yaml:5: optim.eps");
  EXPECT_EQ(where(c, "optim.clip_norm"), "optim.clip_norm");
}

TEST(Config, AnOverrideIsOneValueWithoutComments) {
  const auto directory = [](const std::string& value) {
    const std::vector<std::string> overrides = {"train.output_dir=" + value};
    return parse("model: {path: m}\ndata: {train: a}", "f", overrides).train.output_dir;
  };
  EXPECT_EQ(directory("runs/trial #2"), "runs/trial #2");
  EXPECT_EQ(directory("#2"), "#2");
  EXPECT_EQ(directory("-"), "-");
  EXPECT_EQ(directory("runs/a#b"), "runs/a#b");
  EXPECT_EQ(directory("'runs/a #b'"), "runs/a #b");
  EXPECT_EQ(directory("\"runs/a\\tb\""), "runs/a\tb");
  EXPECT_EQ(directory(" runs/x\t# 1 "), "runs/x\t# 1");
  EXPECT_THROW(directory("'runs/a' # b"), ConfigError);
  const std::vector<std::string> list = {"data.train=[a #1.jsonl, b] # c"};
  EXPECT_THROW(parse("model: {path: m}", "f", list), ConfigError);
}

TEST(Config, NoTokenOrPasswordIsPrintedStoredOrCompared) {
  const auto with = [](const std::string& token, const std::string& url) {
    const std::vector<std::string> overrides = {"rl.reward.token=" + token, "rl.reward.url=" + url};
    return parse(kSmall, "run.yaml", overrides, Completeness::kPartial);
  };
  const RunConfig c = with("t0ken", "https://ann:passw0rd@host/score");
  EXPECT_EQ(c.rl.reward.token, "t0ken");
  EXPECT_EQ(c.rl.reward.url, "https://ann:passw0rd@host/score");
  std::string all = dump_yaml(c) + dump_json(c);
  for (const auto& [key, value] : entries(c)) all += key + value;
  for (const std::string& difference : differences(with("", ""), c)) all += difference;
  EXPECT_THAT(all, Not(AnyOf(HasSubstr("t0ken"), HasSubstr("passw0rd"), HasSubstr("ann"))));
  EXPECT_THAT(all, HasSubstr("(hidden)@host/score"));
  EXPECT_THAT(differences(c, with("another", "https://ann:other@host/score")), IsEmpty());
  const RunConfig again = parse(dump_yaml(c), "run.yaml", {}, Completeness::kPartial);
  EXPECT_EQ(again.rl.reward.token, "(hidden)");
  EXPECT_EQ(dump_yaml(with("", "")).find("(hidden)"), std::string::npos);
}

TEST(Config, NoTokenOfTheCommandLineIsShown) {
  for (const auto& [argument, shown] :
       {std::pair{"rl.reward.token=t0ken", "rl.reward.token=(hidden)"},
        std::pair{"rl.reward.url=http://a:t0ken@h/x", "rl.reward.url=http://(hidden)@h/x"},
        std::pair{"rl.reward={url: u, token: t0ken}", "rl.reward=(hidden)"},
        std::pair{"rl={reward: {token: t0ken}}", "rl=(hidden)"},
        std::pair{"rl={mode: sync}", "rl={mode: sync}"},
        std::pair{"rl.reward.token=", "rl.reward.token="},
        std::pair{"rl.mode=sync", "rl.mode=sync"}, std::pair{"run.yaml", "run.yaml"}})
    EXPECT_EQ(without_secret(argument), shown);
  for (const char* broken : {"rl.reward.token=[t0ken", "rl.reward.token=\"t0ken"}) {
    const std::vector<std::string> overrides = {broken};
    try {
      parse(kSmall, "run.yaml", overrides);
      ADD_FAILURE() << broken;
    } catch (const ConfigError& error) {
      EXPECT_THAT(error.what(), Not(HasSubstr("t0ken")));
    }
  }
}

TEST(Config, DeviceMayBeAScalarOrASection) {
  EXPECT_EQ(parse("device: npu\nmodel: {path: m}\ndata: {train: a}", "f").device.name.type,
            DeviceType::kNpu);
  const RunConfig c =
      parse("device: {name: cuda:3, threads: 2}\nmodel: {path: m}\ndata: {train: a}", "f");
  EXPECT_EQ(to_string(c.device.name), "cuda:3");
  EXPECT_EQ(c.device.threads, 2);
  EXPECT_EQ(parse_device("cuda"), (DeviceName{DeviceType::kCuda, 0}));
  for (const char* bad : {"", "gpu", "cuda:", "cuda:-1", "cuda:x", "cpu:1", "cuda:1:2"}) {
    EXPECT_THROW(parse_device(bad), ConfigError) << bad;
  }
}

TEST(Config, WithoutADeviceItIsTheUsualOne) {
  const DeviceName gpu{DeviceType::kCuda, 1};
  const RunConfig usual = parse(kSmall, "f", {}, Completeness::kComplete, gpu);
  EXPECT_EQ(usual.device.name, gpu);
  EXPECT_EQ(usual.model.dtype, Dtype::kBFloat16);
  EXPECT_FALSE(usual.is_set("device.name"));
  const RunConfig named =
      parse(kSmall, "f", std::vector<std::string>{"device=cpu"}, Completeness::kComplete, gpu);
  EXPECT_EQ(to_string(named.device.name), "cpu");
  EXPECT_EQ(named.model.dtype, Dtype::kFloat32);
}

TEST(Config, DefaultsThatFollowFromOtherKeysAreFilledIn) {
  const RunConfig full = parse(kSmall, "dir/first.yaml");
  EXPECT_EQ(full.train.output_dir, "runs/first");
  EXPECT_EQ(full.data.cache_dir, "runs/first/cache");
  EXPECT_EQ(full.train.micro_batch_tokens, full.data.max_length);
  EXPECT_EQ(full.optim.lr, 2e-5);
  const std::vector<std::string> lora = {"train.method=lora", "train.seed=7"};
  EXPECT_EQ(parse(kSmall, "f", lora).optim.lr, 2e-4);
  EXPECT_EQ(parse(kSmall, "f", lora).adapter.seed, 7u);
  const std::vector<std::string> given = {"train.method=lora", "optim.lr=1e-3", "adapter.seed=3"};
  EXPECT_EQ(parse(kSmall, "f", given).optim.lr, 1e-3);
  EXPECT_EQ(parse(kSmall, "f", given).adapter.seed, 3u);
}

TEST(Config, AdaptersArePinnedUnlessSomethingStandsInTheWay) {
  const auto mode = [](std::vector<std::string> more) {
    more.insert(more.end(),
                {"train.objective=policy", "rl.mode=async", "rl.reward.verifiers.exact=1"});
    return parse(kSmall, "f", more).rl.update_mode;
  };
  const std::vector<std::string> lora = {"train.method=lora"};
  const auto with = [&](const std::string& word) {
    std::vector<std::string> words = lora;
    words.push_back(word);
    return mode(words);
  };
  EXPECT_EQ(mode(lora), UpdateMode::kPin);
  EXPECT_EQ(mode({"rl.rollout_ranks=1"}), UpdateMode::kRecompute);
  EXPECT_EQ(mode({"train.method=lora", "rl.rollout_ranks=1"}), UpdateMode::kPin);
  EXPECT_EQ(mode({"train.method=lora", "parallel.ep=2", "parallel.fsdp=2"}),
            UpdateMode::kRecompute);
  EXPECT_EQ(with("rollout.release_memory=true"), UpdateMode::kRecompute);
  EXPECT_EQ(with("rl.update_mode=recompute"), UpdateMode::kRecompute);
  EXPECT_EQ(with("rl.update_mode=keep"), UpdateMode::kKeep);
  EXPECT_EQ(with("rollout.merge_adapter=true"), UpdateMode::kRecompute);
}

// Each loss of preference tuning begins with what its paper and other programs use.
TEST(Config, LossesOfPreferenceTuningHaveDefaultsOfTheirOwn) {
  const auto dpo = [](const std::vector<std::string>& settings) {
    return parse(kSmall, "f", settings).dpo;
  };
  EXPECT_EQ(dpo({"dpo.loss=sigmoid"}).beta, 0.1);
  EXPECT_EQ(dpo({"dpo.loss=orpo"}).beta, 0.1);
  EXPECT_EQ(dpo({"dpo.loss=orpo"}).sft_weight, 1);
  EXPECT_EQ(dpo({"dpo.loss=orpo", "dpo.sft_weight=0"}).sft_weight, 0);
  EXPECT_EQ(dpo({"dpo.loss=simpo"}).beta, 2);
  EXPECT_EQ(dpo({"dpo.loss=simpo"}).simpo_gamma, 0.5);
  EXPECT_EQ(dpo({"dpo.loss=simpo"}).sft_weight, 0);
  EXPECT_EQ(dpo({"dpo.loss=simpo", "dpo.beta=0.1"}).beta, 0.1);
}

TEST(Config, AnAcceleratorComputesInBfloat16UnlessADtypeIsGiven) {
  const auto dtype = [](const std::vector<std::string>& settings) {
    return parse(kSmall, "f", settings).model.dtype;
  };
  EXPECT_EQ(dtype({}), Dtype::kFloat32);
  EXPECT_EQ(dtype({"device=cpu"}), Dtype::kFloat32);
  EXPECT_EQ(dtype({"device=cuda"}), Dtype::kBFloat16);
  EXPECT_EQ(dtype({"device=npu:1"}), Dtype::kBFloat16);
  EXPECT_EQ(dtype({"device=cuda", "model.dtype=float32"}), Dtype::kFloat32);
}

TEST(Config, TemplateArgumentsKeepTheirType) {
  const RunConfig c = parse(
      "model: {path: m}\n"
      "data:\n"
      "  train: a\n"
      "  template_args: {enable_thinking: false, depth: 3, share: 0.5, style: \"3\"}\n",
      "f");
  EXPECT_EQ(c.data.template_args.at("enable_thinking"), Scalar(false));
  EXPECT_EQ(c.data.template_args.at("depth"), Scalar(std::int64_t{3}));
  EXPECT_EQ(c.data.template_args.at("share"), Scalar(0.5));
  EXPECT_EQ(c.data.template_args.at("style"), Scalar(std::string("3")));
}

TEST(Config, DumpReadsBackToTheSame) {
  const std::vector<std::string> overrides = {
      "optim.lr=0.1",
      "optim.weight_decay=1e-300",
      "model.path='a: b # c'",
      "model.added_tokens=['<|x|>', 'true', '12', ' x', '-', \"tab\\t\\\"quoted\\\"\", 'ümlaut']",
      "data.train=[{path: 'a,b', weight: 0.3}, c]",
      "data.template_args={a: true, b: 'true', c: '1e5', d: 7}",
      "kernels.gated_delta_rule=cpu.avx512.chunk64",
      "ckpt.export.max_shard_size=123456789",
      "train.recompute=off",
      "train.seed=18446744073709551615"};
  const RunConfig before = parse(kSmall, "run.yaml", overrides);
  const std::string yaml = dump_yaml(before);
  const RunConfig after = parse(yaml, "config.resolved.yaml");
  EXPECT_THAT(differences(before, after), IsEmpty());
  EXPECT_EQ(dump_yaml(after), yaml);
  EXPECT_EQ(after.train.seed, 18446744073709551615u);
  EXPECT_EQ(after.ckpt.export_.max_shard_size, 123456789);
  EXPECT_EQ(after.model.added_tokens, before.model.added_tokens);
  EXPECT_EQ(dump_json(after), dump_json(before));
}

TEST(Config, ByteCountsTakeUnits) {
  const auto bytes = [](const std::string& text) {
    const std::vector<std::string> overrides = {"ckpt.export.max_shard_size=" + text};
    return parse(kSmall, "f", overrides).ckpt.export_.max_shard_size;
  };
  EXPECT_EQ(bytes("5GB"), 5'000'000'000);
  EXPECT_EQ(bytes("1.5 GiB"), 1'610'612'736);
  EXPECT_EQ(bytes("512MiB"), 536'870'912);
  EXPECT_EQ(bytes("1000"), 1000);
}

TEST(Config, DifferencesNameKeyOldAndNew) {
  const std::vector<std::string> changed = {"optim.lr=1e-3", "kernels.rms_norm=cpu"};
  EXPECT_THAT(differences(parse(kSmall, "run.yaml"), parse(kSmall, "run.yaml", changed)),
              ElementsAre("optim.lr: 2e-05 -> 0.001", "kernels.rms_norm: (unset) -> cpu"));
}

TEST(Config, ADifferenceIsNamedByTheKeyThatMadeIt) {
  const auto with = [](std::vector<std::string> overrides) {
    return parse(kSmall, "run.yaml", overrides);
  };
  const RunConfig a = with({"train.output_dir=a"}), b = with({"train.output_dir=b"});
  EXPECT_THAT(differences(a, b), ElementsAre("train.output_dir: a -> b"));
  EXPECT_THAT(differences(a, with({"train.output_dir=a", "data.cache_dir=c"})),
              ElementsAre("data.cache_dir: a/cache -> c"));
  EXPECT_THAT(differences(a, with({"train.output_dir=a", "model.path=n"})),
              ElementsAre(::testing::StartsWith("model.path: ")));
}

TEST(Config, KeysWithoutEffectAreNamed) {
  const std::vector<std::string> overrides = {"adapter.rank=8", "optim.decay_steps=10",
                                              "train.max_steps=20", "train.epochs=3"};
  EXPECT_THAT(
      unused_keys(parse(kSmall, "run.yaml", overrides)),
      ElementsAre("command line: adapter.rank has no effect: train.method is full",
                  "command line: optim.decay_steps has no effect: optim.schedule is not wsd",
                  "command line: train.epochs has no effect: train.max_steps decides"));
  const auto of_dpo = [](const char* loss) {
    return unused_keys(
        parse(kSmall, "f",
              std::vector<std::string>{"train.objective=dpo", loss, "dpo.label_smoothing=0.1",
                                       "dpo.simpo_gamma=1"}));
  };
  EXPECT_THAT(of_dpo("dpo.loss=simpo"), IsEmpty());
  EXPECT_THAT(of_dpo("dpo.loss=sigmoid"),
              ElementsAre("command line: dpo.simpo_gamma has no effect: dpo.loss is not simpo"));
  EXPECT_THAT(of_dpo("dpo.loss=orpo"), ::testing::SizeIs(2));
  const auto with = [](std::vector<std::string> more) {
    return unused_keys(parse(kSmall, "f", more));
  };
  EXPECT_THAT(
      with({"train.method=lora", "train.freeze=[x]"}),
      ElementsAre("command line: train.freeze has no effect: train.method is lora, by which "
                  "adapters alone are trained"));
  EXPECT_THAT(
      with({"train.method=lora", "train.freeze=[x]", "adapter.modules_to_save=[embed_tokens]"}),
      IsEmpty());
  EXPECT_THAT(with({"model.head=embed", "data.loss_on=all"}),
              ElementsAre("command line: data.loss_on has no effect: the objective has no loss of "
                          "tokens"));
  EXPECT_THAT(unused_keys(parse(dump_yaml(parse(kSmall, "a")), "b")), IsEmpty());
}

TEST(Config, AMissingFileIsNamed) {
  try {
    load("/nonexistent/run.yaml");
    FAIL();
  } catch (const ConfigError& e) {
    EXPECT_STREQ(e.what(), "/nonexistent/run.yaml: no such configuration file");
  }
}

TEST(Config, PartialNeedsNoRequiredKey) {
  EXPECT_NO_THROW(load({}, {}, Completeness::kPartial));
  EXPECT_THROW(load({}, {}, Completeness::kComplete), ConfigError);
}

TEST(Config, MemoryOfSequencesIsSetWhereTheyAreGenerated) {
  const auto partial = [](std::vector<std::string> settings) {
    return parse("", "command line", settings, Completeness::kPartial).rollout.caches;
  };
  const rollout::CacheOptions caches =
      partial({"rollout.state_dtype=bfloat16", "rollout.kv_page=16", "rollout.memory_fraction=0.25",
               "rollout.graph_batches=[1, 3, 40]"});
  EXPECT_EQ(caches.state_dtype, rollout::StateDtype::kBFloat16);
  EXPECT_EQ(caches.kv_page, 16);
  EXPECT_EQ(caches.memory_fraction, 0.25);
  EXPECT_THAT(caches.graph_batches, ElementsAre(1, 3, 40));
  const auto message = [&](const std::string& setting) -> std::string {
    try {
      partial({setting});
    } catch (const ConfigError& e) {
      return e.what();
    }
    return "(no error)";
  };
  EXPECT_EQ(message("rollout.kv_page=24"),
            "command line: rollout.kv_page: expected a power of two, found 24");
  EXPECT_EQ(message("rollout.graph_batches=[2, 8, 8]"),
            "command line: rollout.graph_batches: expected ascending sizes, found [2, 8, 8]");
  EXPECT_THAT(message("rollout.graph_batches=[0]"), HasSubstr("an integer >= 1, found"));
  EXPECT_THAT(message("rollout.graph_batches=[2, many]"), HasSubstr("an integer >= 1, found"));
  EXPECT_THAT(message("rollout.memory_fraction=1.5"), HasSubstr("a number in [0, 1], found"));
  EXPECT_THAT(message("rollout.state_dtype=float16"), HasSubstr("float32|bfloat16"));
}

// The surface that scripts rely on. A change is deliberate: write the files anew with
// `heddle config --reference [--markdown]`.
TEST(ConfigSurface, ReferenceIsFrozen) {
  EXPECT_EQ(reference_yaml(), files::read(testing::source_path("tests/config/reference.yaml")));
}

TEST(ConfigSurface, DocumentationHoldsTheReference) {
  EXPECT_THAT(files::read(testing::source_path("docs/configuration.md")),
              HasSubstr(reference_markdown()));
}

TEST(ConfigSurface, TheReferenceItselfLoadsToTheDefaults) {
  const std::vector<std::string> needed = {"model.path=m", "data.train=a.jsonl"};
  const RunConfig from_reference = parse(reference_yaml(), "run.yaml", needed);
  EXPECT_THAT(differences(parse(kSmall, "run.yaml"), from_reference), IsEmpty());
}

}  // namespace
}  // namespace heddle::config
