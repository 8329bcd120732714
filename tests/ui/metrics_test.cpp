#include "ui/metrics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sys/resource.h>

#include <cmath>
#include <csignal>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>

#include "base/errors.h"
#include "base/files.h"
#include "base/text.h"
#include "testing/temporary_directory.h"

namespace heddle::ui {
namespace {

using ::testing::ElementsAre;

StepMetrics step(std::int64_t number) {
  StepMetrics m;
  m.step = number;
  m.loss = 3.0 / static_cast<double>(number);
  m.lr = 1e-4;
  m.tokens = 1000 + number;
  return m;
}

std::vector<std::int64_t> steps_in(const std::filesystem::path& file) {
  std::vector<std::int64_t> steps;
  for (const StepMetrics& row : read_metrics(file)) steps.push_back(row.step);
  return steps;
}

TEST(Metrics, ARowReadsBackBitForBit) {
  const testing::TemporaryDirectory dir;
  StepMetrics m = step(7);
  m.epoch = 1.0 / 3;
  m.grad_norm = std::numeric_limits<double>::denorm_min();
  m.memory_bytes = std::int64_t{1} << 40;
  m.extras = {{"eval_loss", 2.0 / 3}, {"aux \"loss\"", 1e300}};
  MetricsWriter(dir / "metrics.jsonl", 0).write(m);
  const auto rows = read_metrics(dir / "metrics.jsonl");
  ASSERT_EQ(rows.size(), 1u);
  EXPECT_EQ(rows[0].step, 7);
  EXPECT_EQ(rows[0].epoch, m.epoch);
  EXPECT_EQ(rows[0].loss, m.loss);
  EXPECT_EQ(rows[0].grad_norm, m.grad_norm);
  EXPECT_EQ(rows[0].tokens, 1007);
  EXPECT_EQ(rows[0].memory_bytes, m.memory_bytes);
  EXPECT_EQ(rows[0].extras, m.extras);
  EXPECT_EQ(*rows[0].extra("eval_loss"), 2.0 / 3);
  EXPECT_EQ(rows[0].extra("none"), nullptr);
}

TEST(Metrics, ARowIsOneLineWithTheContractsKeys) {
  const auto row = nlohmann::json::parse(to_json(step(3)));
  for (const char* key : {"step", "epoch", "loss", "lr", "grad_norm", "tokens", "loss_tokens",
                          "tokens_per_s", "step_s", "mfu", "memory_bytes"}) {
    EXPECT_TRUE(row.contains(key)) << key;
  }
  EXPECT_EQ(to_json(step(3)).find('\n'), std::string::npos);
}

TEST(Metrics, ALossThatIsNotANumberIsNull) {
  const testing::TemporaryDirectory dir;
  StepMetrics m = step(1);
  m.loss = std::nan("");
  m.grad_norm = std::numeric_limits<double>::infinity();
  EXPECT_THAT(to_json(m), ::testing::HasSubstr("\"loss\":null"));
  MetricsWriter(dir / "m", 0).write(m);
  EXPECT_TRUE(std::isnan(read_metrics(dir / "m")[0].loss));
  EXPECT_TRUE(std::isnan(read_metrics(dir / "m")[0].grad_norm));
}

TEST(Metrics, EachRowIsInTheFileAtOnce) {
  const testing::TemporaryDirectory dir;
  MetricsWriter writer(dir / "m", 0);
  writer.write(step(1));
  EXPECT_THAT(steps_in(dir / "m"), ElementsAre(1));
  writer.write(step(2));
  EXPECT_THAT(steps_in(dir / "m"), ElementsAre(1, 2));
}

TEST(Metrics, ResumeKeepsTheRowsUpToTheCheckpointByteForByte) {
  const testing::TemporaryDirectory dir;
  {
    MetricsWriter writer(dir / "m", 0);
    for (int i = 1; i <= 5; ++i) writer.write(step(i));
  }
  const std::string before = files::read(dir / "m");
  MetricsWriter(dir / "m", 3).write(step(4));
  EXPECT_THAT(steps_in(dir / "m"), ElementsAre(1, 2, 3, 4));
  EXPECT_TRUE(before.starts_with(files::read(dir / "m")));
  MetricsWriter(dir / "m", 0);
  EXPECT_THAT(steps_in(dir / "m"), ElementsAre());
}

TEST(Metrics, ATornLastLineIsRemovedAtEveryLength) {
  const testing::TemporaryDirectory dir;
  const std::string whole = to_json(step(1)) + "\n", second = to_json(step(2)) + "\n";
  for (std::size_t length = 1; length < second.size() - 1; length += 7) {
    std::ofstream(dir / "m") << whole << second.substr(0, length);
    MetricsWriter(dir / "m", 9).write(step(2));
    EXPECT_EQ(files::read(dir / "m"), whole + second) << length;
  }
  std::ofstream(dir / "m") << whole
                           << second.substr(0,
                                            second.size() - 1);  // only the line break is missing
  MetricsWriter(dir / "m", 9).write(step(3));
  EXPECT_THAT(steps_in(dir / "m"), ElementsAre(1, 2, 3));
}

/// Files of this process cannot grow beyond `bytes`, as on a full disk.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) : old_handler_(std::signal(SIGXFSZ, SIG_IGN)) {
    getrlimit(RLIMIT_FSIZE, &old_);
    const rlimit low{bytes, old_.rlim_max};
    setrlimit(RLIMIT_FSIZE, &low);
  }
  ~FileSizeLimit() {
    setrlimit(RLIMIT_FSIZE, &old_);
    std::signal(SIGXFSZ, old_handler_);
  }

 private:
  rlimit old_{};
  void (*old_handler_)(int);
};

TEST(Metrics, AFullDiskIsAnErrorAndLeavesWholeRows) {
  const testing::TemporaryDirectory dir;
  MetricsWriter writer(dir / "m", 0);
  writer.write(step(1));
  const std::string whole = files::read(dir / "m");
  {
    const FileSizeLimit limit(whole.size() + 20);
    try {
      writer.write(step(2));
      FAIL();
    } catch (const FileError& e) {
      EXPECT_EQ(e.what(), "cannot write " + (dir / "m").string() + ": File too large");
    }
  }
  EXPECT_EQ(files::read(dir / "m"), whole);
  writer.write(step(2));
  EXPECT_THAT(steps_in(dir / "m"), ElementsAre(1, 2));
}

}  // namespace
}  // namespace heddle::ui
