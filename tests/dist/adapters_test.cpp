// Several adapters in one run on several ranks have the losses of one rank.
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>

#include "dist/launched_run.h"

namespace heddle {
namespace {

using testing::LaunchedRuns;

class AdaptersTest : public ::testing::Test {
 protected:
  /// Losses and gradient norms by adapter and step, then the last loss on held-out rows.
  std::map<std::string, std::vector<double>> train(const std::string& run, const std::string& model,
                                                   const std::vector<std::string>& layout) {
    const std::string rows = (runs_.directory() / "train.jsonl").string(),
                      others = (runs_.directory() / "answers.jsonl").string(),
                      file = (runs_.directory() / "run.yaml").string();
    std::ofstream yaml(file);
    yaml << "adapters:\n"
         << "  - {name: a, data: " << rows
         << ", rank: 4, lr: 1e-3, eval: " << runs_.first_rows("answers.jsonl").string() << "}\n"
         << "  - {name: b, data: " << others << ", rank: 8, max_steps: 4,"
         << " targets: [q_proj, in_proj_qkv, o_proj, out_proj]}\n"
         << "  - {name: c, data: " << rows << ", seed: 7, targets: ['*.mlp.*_proj']}\n";
    if (model == "moe") {
      for (const char* name : {"d", "e"}) {
        yaml << "  - {name: " << name << ", data: " << rows << ", rank: 3, targets: [], "
             << "target_parameters: [mlp.experts.gate_up_proj, mlp.experts.down_proj], "
             << "shared_expert_factors: " << (*name == 'e' ? "true" : "false") << "}\n";
      }
    }
    yaml.close();
    std::vector<std::string> words = {"sft", file};
    for (const std::string& word : runs_.overrides(run, model, {"train.max_steps=6"})) {
      if (!word.starts_with("data.train=")) words.push_back(word);
    }
    words.push_back("train.router_aux_loss_coef=0");
    if (!layout.empty()) {
      words.insert(words.begin(), {"launch", "--nproc", "2", "--log-dir",
                                   (runs_.directory() / (run + "-logs")).string(), "--"});
      words.insert(words.end(), layout.begin(), layout.end());
    }
    const auto log = runs_.directory() / (run + ".out");
    EXPECT_EQ(testing::wait_for(testing::start_heddle(words, log)), 0) << files::read(log);
    std::map<std::string, std::vector<double>> numbers;
    for (const char* name : {"a", "b", "c", "d", "e"}) {
      std::ifstream metrics(runs_.directory() / run / name / "metrics.jsonl");
      nlohmann::json step;
      for (std::string line; std::getline(metrics, line);) {
        step = nlohmann::json::parse(line);
        numbers[name].push_back(step.at("loss"));
        numbers[name].push_back(step.at("grad_norm"));
      }
      if (step.contains("eval_loss")) numbers[name].push_back(step["eval_loss"]);
    }
    return numbers;
  }

  LaunchedRuns runs_;
};

TEST_F(AdaptersTest, HaveTheLossesOfOneRankInEveryLayout) {
  for (const std::string model : {"dense", "moe"}) {
    const auto expected = train(model + "-one", model, {});
    ASSERT_EQ(expected.at("a").size(), 13U);
    ASSERT_EQ(expected.at("b").size(), 8U);
    for (const std::string layout : {"dp", "tp", "fsdp"}) {
      const auto found = train(model + "-" + layout, model, {"parallel." + layout + "=2"});
      for (const auto& [name, numbers] : expected) {
        ASSERT_EQ(found.at(name).size(), numbers.size());
        for (std::size_t i = 0; i < numbers.size(); ++i) {
          const double bound = (i % 2 == 0 ? 1e-5 : 1e-4) * std::abs(numbers[i]);
          EXPECT_NEAR(found.at(name)[i], numbers[i], bound)
              << model << " " << layout << " " << name << " " << i;
        }
      }
    }
  }
}

}  // namespace
}  // namespace heddle
