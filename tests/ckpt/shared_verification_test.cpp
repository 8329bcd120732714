#include "ckpt/shared_verification.h"

#include <ATen/ops/full.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <functional>
#include <set>

#include "base/errors.h"
#include "ckpt/training_checkpoint.h"
#include "comm/group.h"
#include "comm/mesh.h"
#include "comm/ranks.h"
#include "testing/message_of.h"
#include "testing/temporary_directory.h"

namespace heddle::ckpt {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;

TEST(ShareOf, GivesEveryFileToOneAndAsManyBytesToEach) {
  std::vector<ManifestFile> files;
  for (const std::uint64_t bytes : {5, 100, 60, 60, 41, 1, 0}) {
    files.push_back({"file" + std::to_string(files.size()), bytes, ""});
  }
  for (const std::int64_t readers : {1, 2, 3, 9}) {
    std::multiset<std::string> names;
    std::vector<std::uint64_t> bytes;
    for (std::int64_t reader = 0; reader < readers; ++reader) {
      bytes.push_back(0);
      for (const ManifestFile& file : share_of(files, reader, readers)) {
        names.insert(file.name);
        bytes.back() += file.bytes;
      }
    }
    EXPECT_EQ(names.size(), files.size()) << readers << " readers";
    EXPECT_EQ(std::set(names.begin(), names.end()).size(), files.size());
    EXPECT_LE(*std::max_element(bytes.begin(), bytes.end()),
              std::max<std::uint64_t>(100, 267 / readers) + 20);
  }
}

class SharedVerification : public ::testing::Test {
 protected:
  SharedVerification() {
    CheckpointStore store(dir_, 3, 0);
    for (const std::int64_t step : {1, 2}) {
      store.save(step, {{{"step", step}},
                        {{"weights/w", at::full({65}, step)}, {"adam_m/w", at::full({29}, step)}}});
      store.wait();
    }
  }
  void damage(const Path& file) const {
    std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
    stream.seekp(-1, std::ios::end);
    stream.put('\x55');
  }
  /// Errors of `body` on each of three ranks.
  std::vector<std::string> messages(const std::function<void(const comm::Group&)>& body) const {
    return heddle::testing::run_ranks(3, [&](const std::shared_ptr<comm::World>& world) {
      const comm::Mesh mesh({1, 1, 1, 3, 1}, world);
      throw Error(heddle::testing::message_of([&] { body(mesh.world_group()); }));
    });
  }

  heddle::testing::TemporaryDirectory temporary_;
  const Path dir_ = temporary_ / "checkpoints", newest_ = dir_ / "step-00000002";
};

TEST_F(SharedVerification, NamesTheBadFileOnEveryRank) {
  const auto verify = [&](const comm::Group& group) {
    verify_together(newest_, group);
    throw ModelError("whole");
  };
  EXPECT_THAT(messages(verify), Each(HasSubstr("whole")));
  for (const char* file : {"weights.safetensors", "adam_m.safetensors", "state.json"}) {
    damage(newest_ / file);
    EXPECT_THAT(messages(verify),
                Each(AllOf(HasSubstr("step-00000002"), HasSubstr("is damaged: its xxh3-128 is"))));
  }
  std::filesystem::remove(newest_ / "adam_m.safetensors");
  EXPECT_THAT(messages(verify), Each(HasSubstr("step-00000002")));
}

TEST_F(SharedVerification, TheNewestThatIsWholeIsTheSameOnEveryRank) {
  const auto latest = [&](const comm::Group& group) {
    const auto found = latest_complete_checkpoint(dir_, group);
    throw ModelError(found ? found->filename().string() : "none");
  };
  EXPECT_THAT(messages(latest), Each(HasSubstr("step-00000002")));
  damage(newest_ / "weights.safetensors");
  EXPECT_THAT(messages(latest), Each(HasSubstr("step-00000001")));
  std::filesystem::remove_all(dir_);
  EXPECT_THAT(messages(latest), Each(HasSubstr("none")));
  EXPECT_FALSE(latest_complete_checkpoint(dir_, comm::Group("alone")));
}

}  // namespace
}  // namespace heddle::ckpt
