// `heddle score`, and that training tells of the same distributions.
#include <gtest/gtest.h>

#include <cmath>

#include "assembly/from_config.h"
#include "comm/ranks.h"
#include "train/scorer.h"
#include "train/trainer_fixture.h"

namespace heddle {
namespace {

using nlohmann::json;

class ScorerTest : public TrainerTest {
 protected:
  void SetUp() override {
    TrainerTest::SetUp();
    make_model("sharp", {{"initializer_range", 0.3}});
  }

  std::vector<json> read(const fs::path& file) const {
    std::vector<json> rows;
    std::ifstream lines(file);
    for (std::string line; std::getline(lines, line);) rows.push_back(json::parse(line));
    return rows;
  }
  void write(const std::string& file, const std::vector<json>& rows) const {
    std::ofstream out(dir_ / file);
    for (const json& row : rows) out << row << "\n";
  }

  /// The scored rows of a file and, in `summary`, what the program says.
  std::vector<json> score(const std::string& file, const std::vector<std::string>& more,
                          json* summary = nullptr) const {
    std::vector<std::string> words = {"score",    (dir_ / "sharp").string(),
                                      "--input",  (dir_ / file).string(),
                                      "--output", at("out"),
                                      "--device", device().str(),
                                      "--dtype",  "float32",
                                      "--json"};
    words.insert(words.end(), more.begin(), more.end());
    std::string out;
    EXPECT_EQ(run_cli(words, &out), 0);
    if (summary != nullptr) *summary = json::parse(out);
    return read(at("out"));
  }

  std::string at(const std::string& name) const { return (dir_ / name).string(); }
  static c10::Device device() { return testing::device(); }
};

TEST_F(ScorerTest, EntropiesAreThoseOfAllContinuations) {
  std::vector<json> rows;
  for (int token = 0; token < 4096; ++token) rows.push_back({{"input_ids", {5, 77, token}}});
  write("all.jsonl", rows);
  json summary;
  const std::vector<json> scored = score("all.jsonl", {"--entropy"}, &summary);
  ASSERT_EQ(scored.size(), 4096u);
  double entropy = 0, sum = 0;
  for (const json& row : scored) {
    const double logprob = row.at("logprobs")[2];
    entropy -= std::exp(logprob) * logprob;
    const json& entropies = row.at("entropies");
    ASSERT_EQ(entropies.size(), 3u);
    EXPECT_TRUE(entropies[0].is_null());
    EXPECT_NEAR(entropies[1].get<double>(), scored[0].at("entropies")[1].get<double>(), 1e-4);
    EXPECT_NEAR(entropies[2].get<double>(), scored[0].at("entropies")[2].get<double>(), 1e-4);
    sum += entropies[1].get<double>() + entropies[2].get<double>();
  }
  EXPECT_NEAR(scored[0].at("entropies")[2].get<double>(), entropy, 1e-4);
  EXPECT_GT(std::abs(scored[0].at("entropies")[1].get<double>() - entropy), 1e-2);
  EXPECT_LT(entropy, std::log(4096) - 0.1);
  EXPECT_NEAR(summary.at("mean_entropy").get<double>(), sum / 8192, 1e-9);
}

TEST_F(ScorerTest, EntropiesAreGivenWhereTheyAreAskedFor) {
  write("two.jsonl", {{{"text", "row 7 holds"}}, {{"text", "of one"}}});
  json with_summary, summary;
  const auto with = score("two.jsonl", {"--entropy"}, &with_summary),
             without = score("two.jsonl", {}, &summary);
  for (std::size_t r = 0; r < 2; ++r) {
    EXPECT_EQ(with[r].at("logprobs"), without[r].at("logprobs"));
    EXPECT_EQ(with[r].at("entropies").size(), with[r].at("logprobs").size());
    EXPECT_FALSE(without[r].contains("entropies"));
  }
  EXPECT_EQ(with_summary.at("mean_nll"), summary.at("mean_nll"));
  EXPECT_FALSE(summary.contains("mean_entropy"));
}

TEST_F(ScorerTest, AStepTellsTheMeanEntropyOfItsTokens) {
  std::vector<json> rows;
  for (int length : {3, 29, 2, 17}) {
    json ids = json::array();
    for (int i = 0; i < length; ++i) ids.push_back(2 + (length * 37 + i * 101) % 4000);
    rows.push_back({{"input_ids", ids}});
  }
  write("rows.jsonl", rows);
  json summary;
  score("rows.jsonl", {"--entropy"}, &summary);
  std::vector<std::string> command = {"sft"};
  // Two micro-batches.
  for (const std::string& argument :
       arguments("run", {"model.path=" + at("sharp"), "data.train=" + at("rows.jsonl"),
                         "data.format=tokens", "data.packing=false", "model.dtype=float32",
                         "data.max_length=32", "train.micro_batch_tokens=32", "train.max_steps=1",
                         "optim.warmup_steps=0"}))
    command.push_back(argument);
  ASSERT_EQ(run_cli(command), 0);
  const std::vector<json> steps = read(dir_ / "run/metrics.jsonl");
  ASSERT_EQ(steps.size(), 1u);
  EXPECT_NEAR(steps[0].at("loss").get<double>(), summary.at("mean_nll").get<double>(), 1e-4);
  EXPECT_NEAR(steps[0].at("entropy").get<double>(), summary.at("mean_entropy").get<double>(), 1e-4);
}

TEST_F(ScorerTest, LogprobsWithinASupportAreThoseOfAllTokensButForItsShare) {
  const std::vector<std::vector<std::int32_t>> rows = {{5, 77, 9, 4}, {3, 8}, {1, 2, 3, 4, 5, 6}};
  // Some labels have one; a longer one and one that is the label alone are among them.
  std::vector<objective::Supports> supports;
  for (const auto& row : rows) supports.emplace_back(row.size());
  supports[0][1] = {2, 9, 4000, 17};
  supports[0][2] = {4};
  supports[2][0] = {2, 3};
  supports[2][4] = {6, 5, 4, 3, 2, 1};
  // Ranks that divide rows and tokens find what one rank does.
  std::vector<std::vector<double>> all;
  for (const auto& [ranks, degree] : {std::pair<int, std::string>{1, "parallel.dp=1"},
                                      {2, "parallel.dp=2"},
                                      {2, "parallel.tp=2"},
                                      {2, "parallel.cp=2"}}) {
    std::vector<double> found;
    const auto errors = testing::run_ranks(ranks, [&](const std::shared_ptr<comm::World>& world) {
      const std::vector<std::string> words = {degree, "model.dtype=float32", "device.name=cpu",
                                              "device.threads=1"};
      const config::RunConfig layout =
          config::parse("", "test", words, config::Completeness::kPartial);
      const assembly::ModelOnRanks model = assembly::place(
          assembly::recipe_of_directory(dir_ / "sharp", "", assembly::Head::kLanguageModel,
                                        assembly::Purpose::kScore),
          assembly::make_context(layout, world));
      train::Scorer scorer(model);
      const objective::ScoreRequest request{.temperature = 0.7};
      const auto over = scorer.score(rows, request, nullptr, {}, supports);
      for (std::size_t r = 0; r < rows.size(); ++r) {
        for (std::size_t t = 0; t + 1 < rows[r].size(); ++t) {
          // log p(label) less log p(support), each token's by a row that ends with it.
          double expected = 0, share = 0;
          for (const std::int32_t id : supports[r][t]) {
            std::vector<std::int32_t> other(rows[r].begin(),
                                            rows[r].begin() + static_cast<std::ptrdiff_t>(t) + 1);
            other.push_back(id);
            const double logprob = scorer.score({{other}}, request)[0].logprobs.back();
            share += std::exp(logprob);
            if (id == rows[r][t + 1]) expected = logprob;
          }
          if (!supports[r][t].empty()) expected -= std::log(share);
          EXPECT_NEAR(over[r].logprobs[t + 1], expected, 2e-5) << r << " " << t;
          if (world->rank() == 0) found.push_back(over[r].logprobs[t + 1]);
        }
      }
    });
    for (const std::string& error : errors) EXPECT_EQ(error, "");
    all.push_back(found);
  }
  for (const std::vector<double>& found : all) {
    ASSERT_EQ(found.size(), all[0].size());
    for (std::size_t i = 0; i < found.size(); ++i) EXPECT_NEAR(found[i], all[0][i], 2e-5) << i;
  }
}

TEST_F(ScorerTest, BatchesShareOnePipeline) {
  const auto errors = testing::run_ranks(2, [&](const std::shared_ptr<comm::World>& world) {
    const std::vector<std::string> settings = {"parallel.pp=2", "model.dtype=float32",
                                               "device.name=cpu", "device.threads=1"};
    const config::RunConfig layout =
        config::parse("", "test", settings, config::Completeness::kPartial);
    const assembly::ModelOnRanks model = assembly::place(
        assembly::recipe_of_directory(dir_ / "sharp", "", assembly::Head::kLanguageModel,
                                      assembly::Purpose::kScore),
        assembly::make_context(layout, world));
    train::Scorer scorer(model);
    const std::vector<std::vector<std::int32_t>> rows = {{5, 77, 9}, {3}};
    const auto first = scorer.score(rows, {});
    for (int i = 0; i < 2; ++i) {
      EXPECT_EQ(scorer.score(rows, {})[0].logprobs[2], first[0].logprobs[2]);
    }
    // How often these ranks have connected to pass hidden states on.
    EXPECT_EQ(world->count_group("group/hidden states/0,1"), 1);
  });
  for (const std::string& error : errors) EXPECT_EQ(error, "");
}

}  // namespace
}  // namespace heddle
