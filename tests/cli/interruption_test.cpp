// The program itself on what machines and their users do to it while it runs: full and read-only
// disks, signals. Status 1: a failure, 128 + N: ended by signal N.
#include <cstring>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>

#include "program.h"

namespace heddle::cli {
namespace {

using ::testing::HasSubstr;

/// A file system of its own, in a mount namespace that ends with the test.
class BadDisk : public ::testing::Test {
 protected:
  /// Skips the test, with the reason, where this process may not mount.
  void mount_tmpfs(const std::string& options) {
    fs::create_directory(folder_.at("disk"));
    if (geteuid() != 0) GTEST_SKIP() << "NOT TESTED: mounting a small tmpfs needs root";
    if (unshare(CLONE_NEWNS) != 0 ||
        mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        mount("tmpfs", folder_.at("disk").c_str(), "tmpfs", 0, options.c_str()) != 0) {
      GTEST_SKIP() << "NOT TESTED: this process may not mount a tmpfs: " << strerror(errno);
    }
    is_mounted_ = true;
  }
  void TearDown() override {
    if (is_mounted_) umount2(folder_.at("disk").c_str(), MNT_DETACH);
  }
  Arguments train_on_disk(Arguments more = {}) const {
    more.insert(more.begin(), {"train.output_dir=" + folder_.at("disk/run"), "ckpt.every=1",
                               "ckpt.keep_last=3", "data.cache_dir=" + folder_.at("cache")});
    return folder_.train(more);
  }

  Folder folder_;
  bool is_mounted_ = false;
};

TEST_F(BadDisk, AFullDiskLosesNothing) {
  // A checkpoint of this model takes 2 MiB: the third does not fit.
  mount_tmpfs("size=5m");
  if (IsSkipped()) return;
  EXPECT_EQ(wait_for(start(folder_, train_on_disk())), 1);
  EXPECT_THAT(message(folder_), HasSubstr("disk/run/checkpoints/step-00000003 needs 2"));
  EXPECT_THAT(message(folder_), HasSubstr("and its disk has"));
  EXPECT_TRUE(fs::exists(folder_.at("disk/run/checkpoints/step-00000002")));
  EXPECT_FALSE(fs::exists(folder_.at("disk/run/final")));
  // With room again the run goes on from what was saved.
  ASSERT_EQ(mount("tmpfs", folder_.at("disk").c_str(), "tmpfs", MS_REMOUNT, "size=50m"), 0);
  EXPECT_EQ(wait_for(start(folder_, train_on_disk())), 0) << message(folder_);
  EXPECT_THAT(message(folder_), HasSubstr("continuing after step"));
  EXPECT_TRUE(fs::exists(folder_.at("disk/run/final/model.safetensors")));
}

TEST_F(BadDisk, AFullDiskLeavesNoHalfWrittenResult) {
  mount_tmpfs("size=300k");
  if (IsSkipped()) return;
  EXPECT_EQ(wait_for(start(folder_,
                           {"export", folder_.at("model"), "--output", folder_.at("disk/copy")})),
            1);
  EXPECT_THAT(message(folder_), HasSubstr("disk/copy"));
  std::string rows;
  for (int i = 0; i < 64; ++i) rows += files::read(folder_.at("train.jsonl"));
  folder_.write("many.jsonl", rows);
  EXPECT_EQ(
      wait_for(start(folder_, {"score", folder_.at("model"), "--input", folder_.at("many.jsonl"),
                               "--output", folder_.at("disk/scored.jsonl"), "--threads", "1"})),
      1);
  EXPECT_THAT(message(folder_), HasSubstr("disk/scored.jsonl"));
  EXPECT_THAT(message(folder_), HasSubstr("No space left on device"));
  EXPECT_TRUE(fs::is_empty(folder_.at("disk")));
}

TEST_F(BadDisk, AReadOnlyDirectoryIsNamed) {
  if (geteuid() != 0) {
    fs::create_directory(folder_.at("disk"));
    fs::permissions(folder_.at("disk"), fs::perms::owner_read | fs::perms::owner_exec);
  } else {
    mount_tmpfs("size=1m");
    if (IsSkipped()) return;
    ASSERT_EQ(mount("tmpfs", folder_.at("disk").c_str(), "tmpfs", MS_REMOUNT | MS_RDONLY, nullptr),
              0);
  }
  EXPECT_EQ(wait_for(start(folder_, train_on_disk())), 2);
  EXPECT_THAT(message(folder_), HasSubstr("train.output_dir: cannot"));
  EXPECT_THAT(message(folder_), HasSubstr("disk/run"));
  EXPECT_THAT(message(folder_),
              ::testing::AnyOf(HasSubstr("Read-only file system"), HasSubstr("Permission denied")));
}

TEST_F(BadDisk, AFullStandardOutputIsAnError) {
  EXPECT_EQ(wait_for(start(folder_, {"--help"}, "/dev/full")), 1);
  EXPECT_THAT(message(folder_), HasSubstr("cannot write to the standard output"));
}

class Signals : public ::testing::Test {
 protected:
  // A program that nohup started ignores it and would hand that on.
  Signals() { ::signal(SIGHUP, SIG_DFL); }
  /// A long run, of which a checkpoint is on the disk.
  pid_t start_and_wait_for_checkpoint(Arguments more) {
    const pid_t child = start(folder_, folder_.train(std::move(more)));
    EXPECT_TRUE(testing::has_made(child, folder_.at("run/checkpoints/step-00000002")));
    return child;
  }
  Folder folder_;
};

TEST_F(Signals, OneSavesAndSaysHowToGoOn) {
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    const pid_t child = start_and_wait_for_checkpoint(
        {"train.max_steps=100000", "ckpt.every=2", "train.output_dir=" + folder_.at("run")});
    kill(child, signal);
    EXPECT_EQ(wait_for(child), 0) << message(folder_);
    const std::string out = files::read(folder_.at("stdout"));
    EXPECT_THAT(out, HasSubstr("continue with:\n  heddle pt model.path="));
    EXPECT_FALSE(fs::exists(folder_.at("run/final")));
    fs::remove_all(folder_.at("run"));
  }
}

TEST_F(Signals, TheSecondEndsAtOnceAndLeavesTheLastCheckpoint) {
  const Arguments endless = {"train.max_steps=100000", "ckpt.every=2"};
  const pid_t child = start_and_wait_for_checkpoint(endless);
  // Both are there before the first can be acted upon; two of one number would be one.
  kill(child, SIGSTOP);
  kill(child, SIGINT);
  kill(child, SIGTERM);
  kill(child, SIGCONT);
  // The system chooses which of them comes first.
  EXPECT_THAT(wait_for(child), ::testing::AnyOf(128 + SIGINT, 128 + SIGTERM));
  Arguments again = endless;
  again.push_back("train.max_steps=4");
  EXPECT_EQ(wait_for(start(folder_, folder_.train(again))), 0) << message(folder_);
  // The signals may have come later than the step asked for.
  EXPECT_THAT(message(folder_) + files::read(folder_.at("stdout")),
              ::testing::AnyOf(HasSubstr("continuing after step"),
                               HasSubstr("already finished after step")));
}

TEST_F(Signals, ASecondRunInTheSameFolderIsRefusedUntilTheFirstIsGone) {
  const pid_t first =
      testing::start_heddle(folder_.train({"train.max_steps=100000", "ckpt.every=2"}), "/dev/null",
                            folder_.at("stderr of the first"));
  ASSERT_TRUE(testing::has_made(first, folder_.at("run/checkpoints/step-00000002")));
  const auto again = [&] { return wait_for(start(folder_, folder_.train({"train.max_steps=4"}))); };
  EXPECT_EQ(again(), 2);
  EXPECT_THAT(message(folder_), HasSubstr("train.output_dir: " + folder_.at("run") +
                                          " is in use by pid " + std::to_string(first) + " on "));
  // Not even a process that could not clean up keeps the folder.
  kill(first, SIGKILL);
  EXPECT_EQ(wait_for(first), 128 + SIGKILL);
  EXPECT_EQ(again(), 0) << message(folder_);
}

}  // namespace
}  // namespace heddle::cli
