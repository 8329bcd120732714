#include "ui/report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "base/errors.h"
#include "base/files.h"
#include "testing/temporary_directory.h"
#include "ui/curve.h"

namespace heddle::ui {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

std::vector<StepMetrics> some_rows(int count) {
  std::vector<StepMetrics> rows;
  for (int i = 1; i <= count; ++i) {
    StepMetrics m;
    m.step = i;
    m.loss = 2 + std::exp(-i / 30.);
    m.tokens = 100;
    m.step_s = 0.5;
    if (i % 10 == 0) m.extras = {{"eval_loss", m.loss + 0.1}};
    rows.push_back(m);
  }
  return rows;
}

TEST(Curve, TicksAreRoundAndCoverTheRange) {
  EXPECT_THAT(round_ticks(0, 10, 5), ::testing::ElementsAre(0, 2, 4, 6, 8, 10));
  EXPECT_THAT(round_ticks(-0.3, 0.3, 3),
              ::testing::Pointwise(::testing::DoubleNear(1e-12), {-0.2, 0.0, 0.2}));
  EXPECT_EQ(round_ticks(1, 1, 5).size(), 1u);
  EXPECT_LT(round_ticks(1e-9, 1e9, 6).size(), 10u);
  // Curves that are constant but for rounding.
  for (const double low : {8.294, -3e-12, 1e300, 0.0}) {
    for (int ulps = 1; ulps < 9; ++ulps) {
      double high = low;
      for (int i = 0; i < ulps; ++i) high = std::nextafter(high, 1e301);
      for (const int count : {1, 5, 6})
        EXPECT_LE(round_ticks(low, high, count).size(), static_cast<std::size_t>(count) + 2) << low;
    }
  }
}

TEST(Curve, ThinningKeepsThePeaks) {
  std::vector<std::pair<double, double>> points;
  for (int i = 0; i < 10007; ++i) points.emplace_back(i, i == 5003 ? 99 : std::sin(i));
  const auto thin = thin_out(points, 100);
  EXPECT_LE(thin.size(), 200u);
  EXPECT_EQ(std::ranges::max(thin, {}, &std::pair<double, double>::second).first, 5003);
  for (std::size_t i = 1; i < thin.size(); ++i) EXPECT_LE(thin[i - 1].first, thin[i].first);
}

TEST(Curve, SmoothingLeavesAConstantAlone) {
  std::vector<std::pair<double, double>> points;
  for (int i = 0; i < 50; ++i) points.emplace_back(i, 3.0);
  points[20].second = std::nan("");
  const auto out = smooth(points, 10);
  for (std::size_t i = 0; i < out.size(); ++i) {
    EXPECT_EQ(std::isnan(out[i].second), i == 20);
    if (i != 20) {
      EXPECT_NEAR(out[i].second, 3.0, 1e-12);
    }
  }
}

TEST(Curve, OddDataNeverYieldsNanCoordinates) {
  const double nan = std::nan(""), inf = std::numeric_limits<double>::infinity();
  for (const std::vector<std::pair<double, double>>& points :
       {std::vector<std::pair<double, double>>{{1, 2}},
        {{1, nan}},
        {{1, nan}, {2, inf}, {3, 4}},
        {{1, 0}, {2, 0}},
        {{1, -5}, {2, -5}},
        {{1, 1e300}, {2, -1e300}},
        {}}) {
    const std::string svg = render_svg({"t", "", {{"s", points}}});
    EXPECT_THAT(svg, Not(HasSubstr("nan")));
    EXPECT_THAT(svg, Not(HasSubstr("inf,")));
    EXPECT_THAT(svg, ::testing::EndsWith("</svg>"));
  }
}

TEST(Report, IsOneFileThatNeedsNoNetwork) {
  ReportFacts facts;
  facts.title = "sft: <model> & data";
  facts.samples = {{"What is 2+2?", "<b>banana</b>", "4"}};
  facts.tables = {{"Kernels", {"operator", "kernel"}, {{"rms_norm", "cpu.avx2"}}}};
  facts.warnings = {"the MTP head is stale"};
  const std::string page = render_report(facts, some_rows(200));
  EXPECT_THAT(page, HasSubstr("sft: &lt;model&gt; &amp; data"));
  EXPECT_THAT(page, HasSubstr("&lt;b&gt;banana&lt;/b&gt;"));
  EXPECT_THAT(page, HasSubstr("cpu.avx2"));
  EXPECT_THAT(page, HasSubstr("the MTP head is stale"));
  EXPECT_THAT(page, HasSubstr("Best evaluation loss"));
  for (const char* outside : {"http:", "https:", "src=", "@import", "url("}) {
    EXPECT_THAT(page, Not(HasSubstr(outside)));
  }
}

TEST(Report, ALongRunStaysSmall) {
  EXPECT_LT(render_report({}, some_rows(100000)).size(), 500'000u);
}

TEST(Report, WithoutAnyStepItSaysSo) {
  EXPECT_THAT(render_report({}, {}), HasSubstr("No step has been recorded yet"));
}

TEST(Report, IsRebuiltFromTheRunDirectory) {
  const testing::TemporaryDirectory dir;
  {
    MetricsWriter writer(dir / "metrics.jsonl", 0);
    for (const StepMetrics& row : some_rows(30)) writer.write(row);
  }
  ReportFacts facts;
  facts.title = "a run";
  facts.figures = {{"Parameters", "752 M"}};
  facts.samples = {{"p", "cut \xe6\xbc", "after"}};
  write_report(dir.path(), facts);
  const std::string first = files::read(dir / "report.html");
  EXPECT_EQ(rebuild_report(dir.path()), dir / "report.html");
  EXPECT_THAT(files::read(dir / "report.html"), HasSubstr("752 M"));
  std::filesystem::remove(dir / "report.json");
  rebuild_report(dir.path());
  EXPECT_THAT(files::read(dir / "report.html"), HasSubstr("in progress"));
}

TEST(Report, RefusesAFolderThatIsNoRun) {
  const testing::TemporaryDirectory dir;
  EXPECT_THROW(rebuild_report(dir.path()), ConfigError);
  files::write_atomically(dir / "metrics.jsonl", "");
  files::write_atomically(dir / "report.json", "{\"title\": 3}");
  try {
    rebuild_report(dir.path());
    FAIL();
  } catch (const DataError& e) {
    EXPECT_THAT(e.what(), HasSubstr("report.json: not the facts of a report"));
  }
}

}  // namespace
}  // namespace heddle::ui
