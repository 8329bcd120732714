#include "cli/application.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <CLI/CLI.hpp>
#include <cstdio>

#include <nlohmann/json.hpp>

#include "base/errors.h"
#include "base/files.h"
#include "base/text.h"
#include "cli/run_command.h"
#include "config/config.h"
#include "device/device.h"
#include "testing/parameter_name.h"
#include "testing/paths.h"
#include "testing/temporary_directory.h"
#include "ui/metrics.h"
#include "ui/terminal.h"

namespace heddle::cli {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;

/// Each command with its options and positional arguments, one a line.
std::string surface() {
  CLI::App app;
  Action action;
  add_commands(app, action);
  std::string out;
  const auto add = [&](const CLI::App& command, const std::string& name) {
    out += name;
    for (const CLI::Option* option : command.get_options()) {
      out += " " + (option->get_positional() ? option->get_type_name() : option->get_name());
    }
    out += "\n";
  };
  add(app, "heddle");
  for (const CLI::App* sub : app.get_subcommands({})) add(*sub, "heddle " + sub->get_name());
  return out;
}

TEST(CommandSurface, IsFrozen) {
  EXPECT_EQ(surface(), files::read(testing::source_path("tests/cli/surface.txt")))
      << "scripts rely on these: a change is deliberate, and then goes into tests/cli/surface.txt";
}

TEST(Help, OfEachCommandFitsAScreenAndShowsAnExample) {
  CLI::App app;
  Action action;
  add_commands(app, action);
  std::vector<std::vector<std::string>> calls = {{"--help"}, {}};
  for (const CLI::App* sub : app.get_subcommands({})) calls.push_back({sub->get_name(), "--help"});
  for (const auto& call : calls) {
    const Outcome outcome = run_command(call);
    EXPECT_EQ(outcome.status, 0);
    EXPECT_THAT(outcome.out, HasSubstr("Example")) << text::join(call, " ");
    EXPECT_THAT(outcome.out, HasSubstr("Usage: heddle"));
    const auto lines = text::split(outcome.out, '\n');
    EXPECT_LE(lines.size(), 56u) << outcome.out;
    for (const std::string& line : lines) EXPECT_LE(ui::display_width(line), 80) << line;
  }
}

TEST(Application, VersionNamesLibtorch) {
  const Outcome outcome = run_command({"--version"});
  EXPECT_EQ(outcome.status, 0);
  EXPECT_THAT(outcome.out,
              ::testing::MatchesRegex("heddle [0-9.]+ \\(libtorch 2\\.[0-9.]+; CPU.*\\)\n"));
}

struct BadCall {
  const char* name;
  std::vector<std::string> arguments;
  std::string message;
};

void PrintTo(const BadCall& c, std::ostream* out) { *out << c.name; }

class BadCalls : public ::testing::TestWithParam<BadCall> {};

TEST_P(BadCalls, GiveOneLineAndStatus2) {
  const Outcome outcome = run_command(GetParam().arguments);
  EXPECT_EQ(outcome.status, 2);
  EXPECT_EQ(outcome.out, "");
  EXPECT_EQ(outcome.err, "error: " + GetParam().message + "\n");
}

INSTANTIATE_TEST_SUITE_P(
    Application, BadCalls,
    ::testing::Values(
        BadCall{"Command",
                {"confg"},
                "unknown command 'confg' (did you mean 'config'?); see heddle --help"},
        BadCall{"CommandLikeNone", {"zzzzzz"}, "unknown command 'zzzzzz'; see heddle --help"},
        BadCall{
            "Option",
            {"config", "--referenc"},
            "unknown option '--referenc' (did you mean '--reference'?); see heddle config --help"},
        BadCall{"Argument",
                {"report", "run", "now"},
                "unknown argument 'now'; see heddle report --help"},
        BadCall{"NoNumberAboveZero",
                {"bench", "step", "--layers", "0"},
                "--layers: expected a number above 0, found 0; see heddle bench --help"},
        BadCall{"NumberBelowZero",
                {"bench", "step", "--warmup", "-1"},
                "--warmup: expected 0 or a number above it, found -1; see heddle bench --help"},
        BadCall{"NoNumber",
                {"bench", "step", "--steps", "many"},
                "--steps: expected a number above 0, found many; see heddle bench --help"},
        BadCall{"OneTextAnOption",
                {"chat", "--stop", "x", "/nowhere"},
                "/nowhere: there is no such folder"},
        BadCall{"OneAdapterAnOption",
                {"serve", "/nowhere", "--adapter", "a=b", "serve.poll=1"},
                "unknown key 'serve.poll' (did you mean 'serve.poll_s'?)"},
        BadCall{"NestedCommand",
                {"serve", "keys", "add"},
                "--tenant is required; see heddle serve keys add --help"},
        BadCall{"NoNestedCommand",
                {"serve", "keys", "lst"},
                "expected one of add, grant, list, revoke; see heddle serve keys --help"},
        BadCall{"MissingArgument", {"report"}, "run_dir is required; see heddle report --help"},
        BadCall{"Shell",
                {"completion", "bsh"},
                "unknown shell 'bsh', expected bash, zsh or fish (did you mean 'bash'?)"},
        BadCall{"RunDirectory",
                {"report", "/nonexistent"},
                "/nonexistent is not a run directory: it has no metrics.jsonl"},
        BadCall{"EntropyWithoutALanguageModel",
                {"score", "model", "--input", "a", "--output", "b", "--head", "embed", "--entropy"},
                "--entropy is of the distribution of tokens: expected --head lm, not embed"},
        BadCall{"Task",
                {"task", "chess"},
                "heddle task: there is no task 'chess'; expected one of arithmetic, copy, "
                "countdown, guess_number, modular_addition, reverse_string"},
        BadCall{"ParameterOfATask",
                {"task", "copy", "meen"},
                "meen: expected parameter=value, such as largest=9"},
        BadCall{"ConfigurationFile",
                {"config", "/nonexistent.yaml"},
                "/nonexistent.yaml: no such configuration file"},
        BadCall{"SecondConfigurationFile",
                {"config", "a.yaml", "b.yaml"},
                "command line: expected one configuration file and key=value, found a second file "
                "'b.yaml'"},
        BadCall{"Key",
                {"config", "optim.lrr=1"},
                "command line: unknown key 'optim.lrr' (did you mean 'optim.lr'?)"}),
    testing::ParameterName());

TEST(TaskCommand, MakesRowsOfATask) {
  const auto rows = [](std::vector<std::string> more) {
    more.insert(more.begin(), {"task", "arithmetic", "largest=9", "operations=+"});
    const Outcome outcome = run_command(more);
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    return text::split(outcome.out, '\n');
  };
  const auto all = rows({"--rows", "6"});
  ASSERT_EQ(all.size(), 7u);  // the last line ends
  const auto row = nlohmann::json::parse(all[0]);
  int a = 0, b = 0;
  ASSERT_EQ(std::sscanf(row.at("prompt").get<std::string>().c_str(), "%d + %d = ", &a, &b), 2);
  EXPECT_EQ(row.at("answer"), a + b);
  EXPECT_FALSE(row.contains("meta"));
  EXPECT_EQ(rows({"--rows", "2", "--first", "4"})[1], all[5]);
  EXPECT_NE(rows({"--rows", "6", "--seed", "1"}), all);
  const testing::TemporaryDirectory dir;
  const std::string file = (dir / "rows.jsonl").string();
  EXPECT_EQ(run_command({"task", "countdown", "--rows", "1", "--output", file}).out, "");
  EXPECT_EQ(nlohmann::json::parse(files::read(file)).at("meta").at("numbers").size(), 3u);
}

TEST(Application, DebugAddsTheType) {
  const Outcome outcome = run_command({"config", "optim.lr=x", "--debug"});
  EXPECT_EQ(outcome.status, 2);
  EXPECT_THAT(outcome.err, StartsWith("error: command line: optim.lr: expected a number >= 0"));
  EXPECT_THAT(outcome.err, HasSubstr("type: heddle::ConfigError"));
}

TEST(Application, AFullStandardOutputIsAnErrorOfStatus1) {
  std::ostringstream out;
  out.setstate(std::ios::badbit);
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(run(std::vector<std::string>{"--version"}, Session{out}), 1);
  EXPECT_EQ(::testing::internal::GetCapturedStderr(),
            "error: cannot write to the standard output\n");
}

TEST(Application, QuotesACommandSoThatAShellReadsItBack) {
  EXPECT_EQ(
      quote_command(std::vector<std::string>{"sft", "run.yaml", "data.train=[a, b]", "", "it's"}),
      "heddle sft run.yaml 'data.train=[a, b]' '' 'it'\\''s'");
}

TEST(ConfigCommand, ReferenceIsTheReference) {
  EXPECT_EQ(run_command({"config", "--reference"}).out, config::reference_yaml());
  EXPECT_EQ(run_command({"config", "--reference", "--markdown"}).out, config::reference_markdown());
}

TEST(ConfigCommand, PrintShowsDefaultsFileAndOverrides) {
  const testing::TemporaryDirectory dir;
  const std::string file = (dir / "run.yaml").string();
  files::write_atomically(file,
                          "model: {path: m}\ndata: {train: a.jsonl}\noptim: {lr: 1, eps: 2}\n");
  const Outcome outcome = run_command({"config", "--print", file, "optim.lr=-0", "device=cuda:1"});
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  const config::RunConfig c = config::parse(outcome.out, "printed");
  EXPECT_EQ(c.optim.lr, 0);
  EXPECT_EQ(c.optim.eps, 2);
  EXPECT_EQ(config::to_string(c.device.name), "cuda:1");
  EXPECT_THAT(run_command({"config", file, "--json"}).out, HasSubstr("\"lr\": 1.0"));
  EXPECT_THAT(run_command({"config", "--print", "device=cpu"}).out, HasSubstr("dtype: float32"));
}

TEST(ConfigCommand, WithoutADeviceItIsTheFirstAccelerator) {
  std::string why_none;
  const bool has_accelerator = !device::accelerators(why_none).empty();
  const std::string out = run_command({"config", "--print"}).out;
  const bool is_cpu =
      config::parse(out, "printed", {}, config::Completeness::kPartial).device.name ==
      config::DeviceName{};
  EXPECT_EQ(is_cpu, !has_accelerator) << why_none;
  if (has_accelerator) return;
  setenv("HEDDLE_SIM_NPU", "1", /*overwrite=*/1);
  const Outcome simulated = run_command({"config", "--print"});
  unsetenv("HEDDLE_SIM_NPU");
  EXPECT_THAT(simulated.out, HasSubstr("npu:0"));
  EXPECT_THAT(simulated.out, HasSubstr("dtype: bfloat16"));
}

TEST(LaunchCommand, RefusesMoreRanksThanDevices) {
  setenv("HEDDLE_SIM_NPU", "1", /*overwrite=*/1);
  const Outcome outcome = run_command({"launch", "--nproc", "2", "--", "bench", "step", "--preset",
                                       "qwen3.5-0.8b", "parallel.dp=2", "device=npu:7"});
  unsetenv("HEDDLE_SIM_NPU");
  EXPECT_EQ(outcome.status, 2);
  EXPECT_EQ(outcome.err,
            "error: launch: --nproc is 2, and this host has 1 device(s) for ranks from npu:7 on; "
            "start no more ranks than that, or set device=cpu\n");
}

TEST(ConfigCommand, WarnsOfKeysWithoutEffect) {
  const Outcome outcome = run_command({"config", "adapter.rank=3"});
  EXPECT_EQ(outcome.status, 0);
  EXPECT_EQ(outcome.err,
            "warning: command line: adapter.rank has no effect: train.method is full\n");
}

TEST(ConfigArguments, AFileIsTheOneThatIsNoOverride) {
  const ConfigArguments both = split_config_arguments({"run.yaml", "a.b=1", "c=2"});
  EXPECT_EQ(both.file, "run.yaml");
  EXPECT_THAT(both.overrides, ElementsAre("a.b=1", "c=2"));
  EXPECT_EQ(split_config_arguments({"a.b=1"}).file, "");
  const testing::TemporaryDirectory dir;
  const std::string odd = (dir / "lr=1.yaml").string();
  files::write_atomically(odd, "");
  EXPECT_EQ(split_config_arguments({odd}).file, odd);
  EXPECT_THAT(split_config_arguments({}).overrides, IsEmpty());
}

TEST(ReportCommand, WritesThePageAndPrintsItsPath) {
  const testing::TemporaryDirectory dir;
  {
    ui::MetricsWriter writer(dir / "metrics.jsonl", 0);
    ui::StepMetrics m;
    m.step = 1;
    m.loss = 2;
    writer.write(m);
  }
  const Outcome outcome = run_command({"report", dir.path().string()});
  EXPECT_EQ(outcome.status, 0);
  EXPECT_EQ(outcome.out, (dir / "report.html").string() + "\n");
  EXPECT_THAT(files::read(dir / "report.html"), HasSubstr("<svg"));
}

}  // namespace
}  // namespace heddle::cli
