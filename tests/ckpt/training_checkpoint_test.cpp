#include "ckpt/training_checkpoint.h"

#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <functional>
#include <thread>

#include "comm/ranks.h"
#include "fixtures.h"
#include "testing/paths.h"
#include "testing/temporary_directory.h"

namespace heddle::ckpt {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::is_identical;
using ::testing::IsEmpty;
using testing::message_of;
using testing::random_tensor;
using ::testing::UnorderedElementsAre;

std::vector<std::string> names_in(const Path& directory) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(directory)) {
    names.push_back(entry.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

CheckpointState state_of(std::int64_t step, std::int64_t size = 65) {
  return {{{"step", step}, {"rng", {{"seed", 7}}}},
          {{"weights/w", random_tensor(fmt::format("w{}", step), {size, 3}, at::kBFloat16)},
           {"adam_m/w", random_tensor(fmt::format("m{}", step), {size, 3})},
           {"adam_v/w", random_tensor(fmt::format("v{}", step), {size, 3}, at::kDouble)},
           {"cursor", at::full({}, step, at::TensorOptions(at::kLong))},
           {"weights/empty", at::zeros({0, 4})}}};
}

class TrainingCheckpoints : public ::testing::Test {
 protected:
  heddle::testing::TemporaryDirectory temporary_;
  const Path dir_ = temporary_ / "checkpoints";
};

TEST_F(TrainingCheckpoints, RoundTripsStateAndTensorsBitForBit) {
  CheckpointStore store(dir_, 3, 1);
  const CheckpointState saved = state_of(12);
  store.save(12, saved, 0.5);
  store.wait();
  const auto latest = latest_complete_checkpoint(store.directory());
  ASSERT_TRUE(latest);
  EXPECT_EQ(latest->step, 12);
  EXPECT_EQ(latest->metric, 0.5);
  EXPECT_EQ(latest->path, dir_ / "step-00000012");
  const CheckpointState loaded = store.load(latest->path);
  EXPECT_EQ(loaded.state, saved.state);
  ASSERT_EQ(loaded.tensors.size(), saved.tensors.size());
  const auto checkpoint = TrainingCheckpoint::open(latest->path);
  for (const auto& [name, tensor] : saved.tensors) {
    EXPECT_TRUE(is_identical(checkpoint.whole(name), tensor)) << name;
  }
  EXPECT_THAT(names_in(latest->path),
              ElementsAre("adam_m.safetensors", "adam_v.safetensors", "manifest.json", "state.json",
                          "tensors.safetensors", "weights.safetensors"));
  EXPECT_THAT(message_of<ModelError>([&] { checkpoint.whole("weights/v"); }),
              HasSubstr("the nearest is 'weights/w'"));
}

TEST_F(TrainingCheckpoints, TheSnapshotDoesNotSeeLaterSteps) {
  CheckpointStore store(dir_, 3, 1);
  at::Tensor weight = at::zeros({1024, 1024});
  for (int step = 1; step <= 5; ++step) {
    weight.fill_(step);
    store.save(step, {{{"step", step}}, {{"w", weight}}});
    weight.fill_(-1);
  }
  store.wait();
  for (const CheckpointInfo& info : store.list()) {
    EXPECT_TRUE(is_identical(store.load(info.path).tensors[0].second,
                             at::full({1024, 1024}, static_cast<double>(info.step))));
  }
}

TEST_F(TrainingCheckpoints, ForegroundSavesAreOnDiskAtReturn) {
  CheckpointStore store(dir_, {.keep_last = 2, .keep_best = 0, .background = false});
  for (int step = 1; step <= 4; ++step) {
    store.save(step, state_of(step));
    EXPECT_EQ(latest_complete_checkpoint(store.directory())->step, step);
  }
  EXPECT_THAT(names_in(dir_), ElementsAre("step-00000003", "step-00000004"));
}

TEST_F(TrainingCheckpoints, KeepsTheLastAndTheBest) {
  CheckpointStore store(dir_, 2, 1);
  const std::vector<double> metrics = {3.0, 1.0, 2.0, 5.0, 4.0, 6.0};
  for (std::size_t i = 0; i < metrics.size(); ++i)
    store.save(10 * (i + 1), state_of(10 * (i + 1)), metrics[i]);
  store.save(70, state_of(70));  // no metric
  store.save(80, state_of(80), std::nan(""));
  store.wait();
  EXPECT_THAT(names_in(dir_), ElementsAre("step-00000020", "step-00000070", "step-00000080"));
  EXPECT_EQ(store.best()->step, 20);
  // The best is known to the next process too.
  CheckpointStore next(dir_, 1, 1);
  next.save(90, state_of(90), 7.0);
  next.wait();
  EXPECT_THAT(names_in(dir_), ElementsAre("step-00000020", "step-00000090"));
}

TEST_F(TrainingCheckpoints, AStepSavedTwiceIsReplaced) {
  CheckpointStore store(dir_, 2, 0);
  store.save(5, state_of(1));
  store.save(5, state_of(2));
  store.wait();
  EXPECT_EQ(store.load(dir_ / "step-00000005").state["step"], 2);
  EXPECT_THAT(names_in(dir_), ElementsAre("step-00000005"));
  EXPECT_THAT(names_in(dir_ / "step-00000005"),
              ::testing::Not(::testing::Contains(".heddle-staging")));
}

TEST_F(TrainingCheckpoints, GoingOnFromAnOlderOneRemovesTheNewer) {
  CheckpointStore store(dir_, 5, 0);
  for (int step = 1; step <= 3; ++step) store.save(step, state_of(step));
  store.remove_newer_than(1);
  EXPECT_THAT(names_in(dir_), ElementsAre("step-00000001"));
}

TEST_F(TrainingCheckpoints, PassesOverWhatDoesNotMatchItsManifest) {
  CheckpointStore store(dir_, 10, 0);
  for (int step = 1; step <= 7; ++step) store.save(step, state_of(step));
  store.wait();
  const auto at_step = [&](int step) { return dir_ / fmt::format("step-{:08}", step); };
  {  // one bit
    std::fstream file(at_step(7) / "weights.safetensors",
                      std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(-1, std::ios::end);
    file.put('\x7f');
  }
  std::filesystem::resize_file(at_step(6) / "adam_m.safetensors", 100);
  std::filesystem::remove(at_step(5) / "adam_v.safetensors");
  std::filesystem::remove(at_step(4) / "manifest.json");
  files::write_atomically(at_step(3) / "manifest.json", "{\"format\":");
  std::filesystem::rename(at_step(2), at_step(99));
  std::filesystem::create_directory(dir_ / "step-00000100.tmp-1");
  std::filesystem::create_directory(dir_ / "step-1");
  files::write_atomically(dir_ / "step-00000200", "a file");
  std::vector<RejectedCheckpoint> rejected;
  const auto latest = latest_complete_checkpoint(store.directory(), &rejected);
  ASSERT_TRUE(latest);
  EXPECT_EQ(latest->step, 1);
  ASSERT_EQ(rejected.size(), 6u);
  EXPECT_THAT(rejected[0].reason, HasSubstr("'step' is 2, its folder is step-00000099"));
  EXPECT_THAT(rejected[1].reason,
              AllOf(HasSubstr("weights.safetensors is damaged"), HasSubstr("xxh3-128")));
  EXPECT_THAT(rejected[2].reason, HasSubstr("adam_m.safetensors has 100 bytes, expected"));
  EXPECT_THAT(rejected[3].reason, HasSubstr("adam_v.safetensors is missing"));
  EXPECT_THAT(rejected[4].reason, HasSubstr("manifest.json is missing"));
  EXPECT_THAT(rejected[5].reason, HasSubstr("not valid JSON"));
  EXPECT_NO_THROW(TrainingCheckpoint::open(at_step(7), TrainingCheckpoint::Verify::kSizes));
  EXPECT_THROW(store.load(at_step(7)), ModelError);
}

TEST_F(TrainingCheckpoints, NoneIsNoError) {
  CheckpointStore store(dir_, 1, 0);
  EXPECT_FALSE(latest_complete_checkpoint(store.directory()));
  EXPECT_FALSE(store.best());
  EXPECT_FALSE(latest_complete_checkpoint(temporary_ / "absent"));
}

TEST_F(TrainingCheckpoints, ANewerFormatSaysSo) {
  CheckpointStore store(dir_, 1, 0);
  store.save(1, state_of(1));
  store.wait();
  const Path manifest = dir_ / "step-00000001" / "manifest.json";
  std::string text = files::read(manifest);
  text.replace(text.find("\"format_version\": 2"), 19, "\"format_version\": 3");
  files::write_atomically(manifest, text);
  EXPECT_THAT(message_of<ModelError>([&] { store.load(dir_ / "step-00000001"); }),
              AllOf(HasSubstr("manifest.json: 'format_version' is 3, this program reads 1 to 2"),
                    HasSubstr("it is of a newer one")));
}

TEST_F(TrainingCheckpoints, RemovesTemporariesOfDeadProcessesOnly) {
  const pid_t child = fork();
  if (child == 0) _exit(0);
  ASSERT_EQ(waitpid(child, nullptr, 0), child);
  std::filesystem::create_directories(dir_ / fmt::format("step-00000003.tmp-{}", child));
  std::filesystem::create_directories(
      dir_ / fmt::format("step-00000004.tmp-{}", getpid()));  // made just now: alive
  const Path reused = dir_ / fmt::format("step-00000005.tmp-{}", getppid());
  std::filesystem::create_directories(reused);
  std::filesystem::create_directories(dir_ / "notes.tmp-1");
  // Older than the process that has the id today.
  std::filesystem::last_write_time(
      reused, std::filesystem::file_time_type::clock::now() - std::chrono::years(10));
  CheckpointStore store(dir_, 1, 0);
  EXPECT_THAT(names_in(dir_),
              UnorderedElementsAre(fmt::format("step-00000004.tmp-{}", getpid()), "notes.tmp-1"));
}

/// Writes beyond `bytes` fail, as on a full disk.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) : signal_(::signal(SIGXFSZ, SIG_IGN)) {
    getrlimit(RLIMIT_FSIZE, &before_);
    const rlimit limit = {bytes, before_.rlim_max};
    setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FileSizeLimit() {
    setrlimit(RLIMIT_FSIZE, &before_);
    ::signal(SIGXFSZ, signal_);
  }

 private:
  sighandler_t signal_;
  rlimit before_;
};

TEST_F(TrainingCheckpoints, AFullDiskIsAnErrorAtTheNextCallAndLeavesTheLastCheckpoint) {
  CheckpointStore store(dir_, 1, 0);
  store.save(1, state_of(1));
  store.wait();
  {
    const FileSizeLimit limit(64 << 10);
    store.save(2, state_of(2, 100'000));
    EXPECT_THAT(message_of<FileError>([&] { store.save(3, state_of(3)); }),
                AllOf(HasSubstr("cannot write"), HasSubstr("step-00000002.tmp-"),
                      HasSubstr("File too large")));
    EXPECT_NO_THROW(store.wait());  // told once
    store.save(4, state_of(4, 100'000));
    EXPECT_THROW(store.wait(), FileError);
  }
  EXPECT_THAT(names_in(dir_), ElementsAre("step-00000001"));
  EXPECT_EQ(latest_complete_checkpoint(store.directory())->step, 1);
  store.save(5, state_of(5));  // goes on when there is room again
  store.wait();
  EXPECT_EQ(latest_complete_checkpoint(store.directory())->step, 5);
}

TEST_F(TrainingCheckpoints, BadRequestsAreErrorsBeforeAnythingIsWritten) {
  CheckpointStore store(dir_, 1, 0);
  EXPECT_THROW(store.save(1, {{}, {{"../x/w", at::zeros({1})}}}), InternalError);
  EXPECT_THROW(store.save(-1, {}), InternalError);
  EXPECT_THROW(CheckpointStore(dir_, 0, 0), ConfigError);
  EXPECT_THAT(names_in(dir_), IsEmpty());
}

/// The helper program with its standard output in a pipe.
class SaveLoop {
 public:
  SaveLoop(const Path& directory, std::int64_t first_step, const std::string& uid = "") {
    int ends[2];
    if (pipe(ends) != 0) throw std::runtime_error("pipe");
    const std::string program = heddle::testing::built_path("tests/ckpt/heddle_ckpt_save_loop");
    pid_ = fork();
    if (pid_ == 0) {
      dup2(ends[1], STDOUT_FILENO);
      close(ends[0]);
      const std::string step = std::to_string(first_step);
      execl(program.c_str(), "save_loop", directory.c_str(), step.c_str(), "2",
            uid.empty() ? nullptr : uid.c_str(), nullptr);
      _exit(127);
    }
    close(ends[1]);
    out_ = fdopen(ends[0], "r");
  }
  ~SaveLoop() {
    if (pid_ > 0) kill_now();
    fclose(out_);
  }
  /// Blocks for the next line; "" at the end.
  std::string line() {
    char buffer[4096];
    if (!fgets(buffer, sizeof buffer, out_)) return "";
    std::string text = buffer;
    while (!text.empty() && text.back() == '\n') text.pop_back();
    return text;
  }
  void kill_now() {
    ::kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }

 private:
  pid_t pid_ = -1;
  FILE* out_ = nullptr;
};

void expect_whole(const CheckpointStore& store, const CheckpointInfo& info) {
  const CheckpointState state = store.load(info.path);
  const auto value = static_cast<double>(info.step);
  EXPECT_EQ(state.state["step"], info.step);
  ASSERT_EQ(state.tensors.size(), 3u);
  EXPECT_TRUE(is_identical(state.tensors[0].second,
                           at::full({300, 257}, -value, at::TensorOptions(at::kDouble))));
  EXPECT_TRUE(is_identical(state.tensors[1].second, at::full({29}, value + 1)));
  EXPECT_TRUE(is_identical(state.tensors[2].second, at::full({300, 257}, value)));
}

void kill_at_random_moments(const Path& dir, int kills) {
  std::int64_t next = 1;
  for (int i = 0; i < kills; ++i) {
    std::int64_t confirmed = next - 1;
    {
      SaveLoop loop(dir, next);
      // Past start-up, then anywhere in the next few saves: in the files, the renames, the pruning.
      for (int k = 0; k < 2; ++k) confirmed = std::stoll(loop.line());
      std::this_thread::sleep_for(
          std::chrono::microseconds(CounterRng(3, "kill").below(i, 60'000)));
      loop.kill_now();
      for (std::string line = loop.line(); !line.empty(); line = loop.line())
        confirmed = std::stoll(line);
    }
    CheckpointStore store(dir, 2, 1);
    std::vector<RejectedCheckpoint> rejected;
    const auto latest = latest_complete_checkpoint(store.directory(), &rejected);
    ASSERT_TRUE(latest);
    EXPECT_TRUE(rejected.empty()) << rejected[0].reason;
    EXPECT_GE(latest->step, confirmed) << "a checkpoint that was said to be on disk is gone";
    expect_whole(store, *latest);
    for (const std::string& name : names_in(dir))
      EXPECT_THAT(name, ::testing::MatchesRegex("step-[0-9]+"));
    EXPECT_LE(store.list().size(),
              4u);  // 2 and the best, and one that the kill kept from being pruned
    next = latest->step + 1;
  }
}

TEST_F(TrainingCheckpoints, SurviveKillsAtRandomMoments) { kill_at_random_moments(dir_, 5); }

class FaultTrainingCheckpoints : public TrainingCheckpoints {};

TEST_F(FaultTrainingCheckpoints, SurviveManyKillsAtRandomMoments) {
  kill_at_random_moments(dir_, 60);
}

/// Two ranks, threads of this process, each with a store on the same folder.
std::vector<std::string> run_stores(
    const Path& directory,
    const std::function<void(comm::World& world, CheckpointStore& store)>& body) {
  return heddle::testing::run_ranks(2, [&](const std::shared_ptr<comm::World>& world) {
    CheckpointStoreOptions options;
    options.background = false;  // a copy of a tensor without memory of its own would take some
    options.world = world;
    CheckpointStore store(directory, options);
    body(*world, store);
  });
}

TEST_F(TrainingCheckpoints, TheDiskNeedsRoomForThePartsOfAllRanks) {
  const auto errors = run_stores(dir_, [](comm::World& world, CheckpointStore& store) {
    CheckpointState state;
    // 4 EiB of which only one element is in memory.
    const at::Tensor part = at::zeros({1}).expand({world.rank() == 0 ? 1 : 1LL << 60});
    state.parts.push_back({"weights/w", part, {world.rank()}, {(1LL << 60) + 1}});
    store.save(1, std::move(state));
  });
  for (const std::string& error : errors) EXPECT_THAT(error, HasSubstr("and its disk has"));
  EXPECT_THAT(names_in(dir_), IsEmpty());
}

TEST_F(TrainingCheckpoints, AFailedRankStillEndsItsPart) {
  const auto errors = run_stores(dir_, [](comm::World& world, CheckpointStore& store) {
    CheckpointState state;
    state.state["step"] = 1;
    state.parts.push_back({"weights/w", at::full({1}, world.rank()), {world.rank()}, {2}});
    if (world.rank() == 1) {
      world.fail("out of rows\nand of patience");
      std::this_thread::sleep_for(std::chrono::milliseconds(1500));
    }
    store.save(1, std::move(state));
    if (world.rank() == 0) {
      EXPECT_EQ(world.failure_of_another(), "rank 1 failed: out of rows");
    }
  });
  EXPECT_THAT(errors, ElementsAre("", ""));
  const auto latest = latest_complete_checkpoint(dir_);
  ASSERT_TRUE(latest);
  EXPECT_EQ(latest->step, 1);
}

TEST_F(TrainingCheckpoints, AReadOnlyFolderIsAClearError) {
  {
    CheckpointStore store(dir_, 2, 0);
    store.save(1, state_of(1));
  }
  const std::string nobody = geteuid() == 0 ? "65534" : "";
  std::filesystem::permissions(temporary_.path(), std::filesystem::perms(0755));
  std::filesystem::permissions(dir_, std::filesystem::perms(0555));
  EXPECT_THAT(SaveLoop(dir_, 2, nobody).line(),
              AllOf(HasSubstr("error: train.output_dir: cannot write to the folder"),
                    HasSubstr("Permission denied")));
  std::filesystem::permissions(dir_, std::filesystem::perms(0755));
  EXPECT_EQ(latest_complete_checkpoint(dir_)->step, 1);
}

}  // namespace
}  // namespace heddle::ckpt
