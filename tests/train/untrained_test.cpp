// Trained tensors that no gradient reaches are named, whatever the optimizer and whoever owns them.
#include "train/untrained.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "comm/ranks.h"
#include "ops/optimizer_step/optimizer_step.h"
#include "ops/registry.h"
#include "train/optimizer.h"
#include "train/trainer_fixture.h"

namespace heddle {
namespace {

using config::OptimName;
using config::OptimSection;
using config::StateDtype;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using train::Optimizer;
using train::UntrainedWatch;

ops::KernelTable kernels(c10::ScalarType dtype) {
  return ops::KernelTable::choose(ops::builtin_registry(), {}, dtype,
                                  {ops::OpRequest::of<ops::AdamwStep>()});
}

/// Parameters [4,256] with values other than zero.
struct Parameters {
  explicit Parameters(const std::vector<std::string>& names, c10::ScalarType dtype = at::kFloat) {
    for (const std::string& name : names) {
      all.push_back(std::make_unique<nn::Parameter>(name, std::vector<std::int64_t>{4, 256}));
      all.back()->allocate(dtype, at::kCPU);
      all.back()->data().fill_(0.5);
      all.back()->set_trainable(true);
    }
  }
  std::vector<nn::Parameter*> pointers() const {
    std::vector<nn::Parameter*> found;
    for (const auto& parameter : all) found.push_back(parameter.get());
    return found;
  }
  /// One element of a gradient is not zero.
  void add_gradient(std::size_t i, double value) const {
    at::Tensor gradient = at::zeros({4, 256}, at::kFloat);
    gradient[2][77].fill_(value);
    all[i]->add_gradient(gradient);
  }

  std::vector<std::unique_ptr<nn::Parameter>> all;
};

struct Case {
  std::string name;
  OptimSection options;
  c10::ScalarType dtype = at::kFloat;
};

std::vector<Case> cases() {
  std::vector<Case> all;
  const auto add = [&](const std::string& name, c10::ScalarType dtype, const auto& change) {
    OptimSection options;
    options.weight_decay = 0.1;  // what has no gradient moves all the same
    change(options);
    all.push_back({name, options, dtype});
  };
  add("adamw", at::kFloat, [](OptimSection&) {});
  add("adamw of bfloat16", at::kBFloat16, [](OptimSection&) {});
  add("bfloat16 state", at::kBFloat16,
      [](OptimSection& o) { o.state_dtype = StateDtype::kBFloat16; });
  add("int8 state", at::kBFloat16, [](OptimSection& o) { o.state_dtype = StateDtype::kInt8; });
  add("beta1 0", at::kFloat, [](OptimSection& o) { o.betas = {0, 0.999}; });
  add("beta1 0, int8 state", at::kFloat, [](OptimSection& o) {
    o.betas = {0, 0.999};
    o.state_dtype = StateDtype::kInt8;
  });
  for (const double momentum : {0.0, 0.9}) {
    add(fmt::format("sgd {}", momentum), at::kFloat, [&](OptimSection& o) {
      o.name = OptimName::kSgd;
      o.momentum = momentum;
    });
    add(fmt::format("muon {}", momentum), at::kFloat, [&](OptimSection& o) {
      o.name = OptimName::kMuon;
      o.momentum = momentum;
    });
  }
  return all;
}

TEST(Untrained, IsWhatNoStepHadAGradientFor) {
  for (const Case& one : cases()) {
    const Parameters parameters({"first", "last", "zeros", "nothing", "lm_head.weight"}, one.dtype);
    Optimizer optimizer(parameters.pointers(), one.options, 1);
    const ops::KernelTable table = kernels(one.dtype);
    for (int step = 0; step < 10; ++step) {
      if (step == 0) parameters.add_gradient(0, 1);
      if (step == 9) parameters.add_gradient(1, -1);
      parameters.add_gradient(2, 0);
      optimizer.step(table, 1e-3, 1);
    }
    const Optimizer::Untrained found = optimizer.untrained();
    EXPECT_THAT(found.names, ElementsAre("zeros", "nothing", "lm_head.weight")) << one.name;
    EXPECT_EQ(found.of, 5) << one.name;
  }
}

TEST(Untrained, IsNotWhatHasGradientsWhoseSquaresAreZero) {
  const Parameters parameters({"small", "none"});
  Optimizer optimizer(parameters.pointers(), OptimSection(), 1);
  parameters.add_gradient(0, 1e-30);
  optimizer.step(kernels(at::kFloat), 1e-3, 1);
  EXPECT_THAT(optimizer.untrained().names, ElementsAre("none"));
}

TEST(Untrained, IsToldOfAllRanksAlike) {
  // Along the first dimension two pipeline stages with tensors of their own, each divided between
  // two ranks, of which one alone has a gradient of "half".
  const auto errors = testing::run_ranks(4, [&](const std::shared_ptr<comm::World>& world) {
    const comm::Mesh mesh({1, 1, 2, 1, 2}, world, 1);
    const std::string stage = std::to_string(mesh.coordinate(comm::Dim::kPp));
    const Parameters parameters({"half" + stage, "none" + stage, "shared"});
    if (stage == "1") parameters.all[2]->set_copy();
    Optimizer optimizer(parameters.pointers(), OptimSection(), 1, Optimizer::Ranks::of(mesh));
    if (mesh.coordinate(comm::Dim::kFsdp) == 1) parameters.add_gradient(0, 1);
    if (stage == "1") parameters.add_gradient(2, 1);
    optimizer.step(kernels(at::kFloat), 1e-3, 1);
    const Optimizer::Untrained found = optimizer.untrained();
    EXPECT_THAT(found.names, ElementsAre("none0", "none1"));
    EXPECT_EQ(found.of, 5);
  });
  for (const std::string& error : errors) EXPECT_EQ(error, "");
}

/// A watch over one tensor with a gradient and one without.
class Watched {
 public:
  /// Makes a step and returns what the watch says.
  std::string step(double lr, double norm) {
    parameters_.add_gradient(0, norm);
    optimizer_.step(table_, lr, 1);
    return watch_.after_step(optimizer_, lr, norm);
  }
  std::string at_end() { return watch_.at_end(optimizer_); }

 private:
  Parameters parameters_{{"reached", "missed"}};
  Optimizer optimizer_{parameters_.pointers(), OptimSection(), 1};
  ops::KernelTable table_ = kernels(at::kFloat);
  UntrainedWatch watch_;
};

TEST(UntrainedWatch, LooksOnceAfterTheFirstSteps) {
  Watched run;
  for (int step = 1; step <= 25; ++step) {
    const std::string said = run.step(1e-3, 1);
    if (step == UntrainedWatch::kSteps) {
      EXPECT_THAT(said, AllOf(HasSubstr("1 of 2 trained tensors"), HasSubstr("in 10 steps"),
                              HasSubstr(": missed. ")));
    } else {
      EXPECT_EQ(said, "") << step;
    }
  }
  EXPECT_EQ(run.at_end(), "");
}

TEST(UntrainedWatch, LooksAtTheEndOfAShorterRunUnlessItIsTooShort) {
  for (int steps = 1; steps < UntrainedWatch::kSteps; ++steps) {
    Watched run;
    for (int step = 0; step < steps; ++step) EXPECT_EQ(run.step(1e-3, 1), "");
    EXPECT_EQ(run.at_end().empty(), steps < UntrainedWatch::kLeast) << steps;
    EXPECT_EQ(run.at_end(), "");
  }
}

TEST(UntrainedWatch, StepsThatCannotTellDoNotCount) {
  Watched run;
  for (int step = 0; step < 9; ++step) EXPECT_EQ(run.step(1e-3, 1), "");
  for (int step = 0; step < 9; ++step) EXPECT_EQ(run.step(0, 1), "");
  for (int step = 0; step < 9; ++step) EXPECT_EQ(run.step(1e-3, 0), "");
  EXPECT_THAT(run.step(1e-3, 1), HasSubstr("missed"));
}

TEST(UntrainedWatch, ARunWithoutAnyGradientIsToldAndLookedAtOnceItHasOne) {
  Watched run, brief;
  for (int step = 1; step <= 12; ++step) {
    const std::string said = run.step(1e-3, 0);
    EXPECT_EQ(said.find("2 of 2 trained tensors") != std::string::npos, step == 10) << said;
  }
  for (int step = 1; step < 10; ++step) EXPECT_EQ(run.step(1e-3, 1), "");
  EXPECT_THAT(run.step(1e-3, 1), HasSubstr("1 of 2 trained tensors"));
  EXPECT_EQ(run.at_end(), "");
  for (int step = 0; step < 4; ++step) EXPECT_EQ(brief.step(1e-3, 0), "");
  EXPECT_THAT(brief.at_end(), HasSubstr("2 of 2 trained tensors"));
}

/// Keeps the warnings of a run.
class Warnings : public train::Observer {
 public:
  void on_warning(const std::string& message) override { all.push_back(message); }
  std::vector<std::string> all;
};

class UntrainedRun : public TrainerTest {
 protected:
  std::vector<std::string> warnings(const std::string& run, const std::vector<std::string>& more) {
    std::atomic<bool> stop = false;
    Warnings warnings;
    train::Trainer(config(run, more), warnings, stop).run();
    return warnings.all;
  }
  /// Settings of a run on rows of a token and its label.
  std::vector<std::string> short_rows() const {
    std::ofstream rows(dir_ / "short.jsonl");
    for (int i = 0; i < 64; ++i) {
      rows << nlohmann::json{{"input_ids", {100 + i, 900 - i}}, {"labels", {-100, 900 - i}}}
           << "\n";
    }
    return {"data.train=" + (dir_ / "short.jsonl").string()};
  }
};

// In a text of one token before its label no gated DeltaNet has a state that could decay, so
// nothing reaches what makes the decay.
TEST_F(UntrainedRun, DecaysOfTextsOfOneTokenAreNamed) {
  const std::vector<std::string> rows = short_rows();
  const auto found = warnings("short rows", rows);
  ASSERT_EQ(found.size(), 1u);
  EXPECT_THAT(found[0], AllOf(HasSubstr("9 of "), HasSubstr("in 10 steps"),
                              HasSubstr("model.layers.0.linear_attn.A_log, "),
                              HasSubstr("model.layers.0.linear_attn.in_proj_a.weight, "),
                              HasSubstr("model.layers.1.linear_attn.dt_bias and 3 more. ")));
  std::vector<std::string> frozen = rows;
  frozen.push_back("train.freeze=['*.A_log', '*.dt_bias', '*.in_proj_a.weight']");
  EXPECT_THAT(warnings("frozen", frozen), IsEmpty());
}

TEST_F(UntrainedRun, OrdinaryRunsHaveNone) {
  for (const char* method : {"full", "lora"}) {
    for (const char* optimizer : {"adamw", "sgd", "muon"}) {
      EXPECT_THAT(warnings(std::string(method) + optimizer,
                           {std::string("train.method=") + method, "adapter.rank=4",
                            std::string("optim.name=") + optimizer}),
                  IsEmpty())
          << method << " " << optimizer;
    }
  }
}

TEST_F(UntrainedRun, TheLogAndTheReportHaveTheWarning) {
  std::vector<std::string> more = short_rows(), command = {"pt"};
  more.insert(more.end(), {"train.max_steps=4", "log.report=true"});
  for (const std::string& argument : arguments("run", more)) command.push_back(argument);
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(run_cli(command), 0);
  const std::string log = ::testing::internal::GetCapturedStderr();
  constexpr const char* kWarning = "trained tensors had no gradient but zero in 4 steps";
  EXPECT_THAT(log, HasSubstr(kWarning));
  EXPECT_THAT(files::read(dir_ / "run/report.html"), HasSubstr(kWarning));
}

}  // namespace
}  // namespace heddle
