#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>

#include "base/errors.h"
#include "base/file_lock.h"
#include "base/files.h"
#include "testing/message_of.h"
#include "testing/temporary_directory.h"

namespace heddle {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using testing::message_of;
using ::testing::Not;

void make_socket(const fs::path& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  path.string().copy(address.sun_path, sizeof address.sun_path - 1);
  const int descriptor = socket(AF_UNIX, SOCK_STREAM, 0);
  ASSERT_EQ(bind(descriptor, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  close(descriptor);
}

TEST(ForeignFile, WhatIsNoRegularFileIsRefusedAtOnce) {
  const testing::TemporaryDirectory dir;
  ASSERT_EQ(mkfifo((dir / "pipe").c_str(), 0600), 0);
  make_socket(dir / "socket");
  fs::create_directory(dir / "folder");
  fs::create_symlink(dir / "pipe", dir / "link");
  const std::vector<std::pair<fs::path, std::string>> cases = {
      {dir / "pipe", "a pipe"}, {dir / "socket", "a socket"}, {dir / "folder", "a folder"},
      {dir / "link", "a pipe"}, {"/dev/zero", "a device"},    {"/dev/tty", "a device"}};
  for (const auto& [path, kind] : cases) {
    EXPECT_THAT(message_of([&] { files::read(path); }), HasSubstr(kind)) << path;
    EXPECT_THROW(files::MappedFile{path}, UserError) << path;
  }
}

TEST(ForeignFile, SizesAreLimitedByKind) {
  const testing::TemporaryDirectory dir;
  const auto make = [&](const char* name, std::uint64_t bytes) {
    files::write_atomically(dir / name, "");
    fs::resize_file(dir / name, bytes);
    return dir / name;
  };
  constexpr std::uint64_t kMiB = 1 << 20;
  EXPECT_EQ(files::read(make("whole", kMiB), files::kYamlLimit).size(), kMiB);
  const auto over = make("over", kMiB + 1);
  EXPECT_THAT(message_of([&] { files::read(over, files::kYamlLimit); }),
              HasSubstr("a YAML file may have 1.0 MiB; if it is what you mean to read, `heddle "
                        "--file-limits 2 ...`"));
  EXPECT_THROW(files::read(over, files::kTemplateLimit), UserError);
  EXPECT_THROW(files::read(make("json", 65 * kMiB), files::kJsonLimit), UserError);
  EXPECT_THROW(files::read(make("tokenizer", 300 * kMiB), files::kTokenizerLimit), UserError);
  EXPECT_THROW(files::read(make("sparse", 64 * 1024 * kMiB)), UserError);
  files::multiply_limits(2);
  EXPECT_EQ(files::read(over, files::kYamlLimit).size(), kMiB + 1);
  files::multiply_limits(1);
}

TEST(ForeignFile, LinksOutOfAFolderAreNotFollowed) {
  const testing::TemporaryDirectory dir;
  fs::create_directories(dir / "model/sub");
  fs::create_directories(dir / "models--x--y/blobs");
  fs::create_directories(dir / "models--x--y/snapshots/1/sub");
  fs::create_directories(dir / "models--x--z/blobs");
  files::write_atomically(dir / "secret", "s");
  files::write_atomically(dir / "model/own", "o");
  files::write_atomically(dir / "models--x--y/blobs/7", "b");
  files::write_atomically(dir / "models--x--z/blobs/8", "z");
  const fs::path snapshot = dir / "models--x--y/snapshots/1";
  const auto read = [](const fs::path& folder, const char* name, const fs::path& target) {
    fs::create_symlink(target, folder / name);
    return message_of([&] { files::read(folder / name, files::kTextLimit, folder); });
  };
  EXPECT_THAT(read(dir / "model", "a", "../secret"), HasSubstr("outside its folder"));
  EXPECT_THAT(read(dir / "model", "b", dir / "secret"), HasSubstr("outside its folder"));
  EXPECT_THAT(read(dir / "model", "c", "sub/../../secret"), HasSubstr("outside its folder"));
  EXPECT_THAT(read(dir / "model", "d", "own"), "(no error)");
  EXPECT_THAT(read(snapshot, "e", "../../blobs/7"), "(no error)");
  EXPECT_THAT(read(snapshot / "sub", "f", "../../../blobs/7"), "(no error)");
  EXPECT_THAT(read(snapshot, "g", "../../../models--x--z/blobs/8"), HasSubstr("outside"));
  EXPECT_THAT(read(snapshot, "h", "../../../secret"), HasSubstr("outside"));
  // A cache that is not the user's own is told from it by where it is; the message says how.
  const std::string says = "set HF_HUB_CACHE=";
  EXPECT_THAT(read(snapshot, "i", "../../../secret"), HasSubstr(says));
  EXPECT_THAT(read(dir / "model", "k", "../secret"), Not(HasSubstr(says)));
  setenv("HF_HUB_CACHE", dir.path().c_str(), 1);
  EXPECT_THAT(read(snapshot, "l", "../../../secret"), "(no error)");
  unsetenv("HF_HUB_CACHE");
  // A folder that is itself reached through a link is the folder that the user named.
  fs::create_directory_symlink(dir / "model", dir / "alias");
  EXPECT_EQ(files::read(dir / "alias/own", files::kTextLimit, dir / "alias"), "o");
}

TEST(ForeignFile, NothingIsWrittenThroughPlantedLinks) {
  const testing::TemporaryDirectory dir;
  const auto plant = [&](const char* name) {
    files::write_atomically(dir / "victim", "untouched");
    fs::create_symlink(dir / "victim", dir / name);
    return dir / name;
  };
  const auto untouched = [&] { return files::read(dir / "victim") == "untouched"; };
  plant("out.tmp");
  files::write_atomically(dir / "out", "new");
  EXPECT_TRUE(untouched());
  files::write_atomically(plant("report"), "new");
  EXPECT_TRUE(untouched());
  EXPECT_FALSE(fs::is_symlink(dir / "report"));
  EXPECT_THROW(files::FileLock{plant("run.lock")}, FileError);
  EXPECT_THROW(files::open_to_append(plant("metrics.jsonl")), FileError);
  EXPECT_TRUE(untouched());
  fs::create_hard_link(dir / "victim", dir / "hard.lock");
  EXPECT_THROW(files::FileLock{dir / "hard.lock"}, FileError);
  ASSERT_EQ(mkfifo((dir / "pipe.lock").c_str(), 0600), 0);
  EXPECT_THROW(files::FileLock{dir / "pipe.lock"}, FileError);
  EXPECT_TRUE(untouched());
}

TEST(ForeignFile, ModesFollowTheUmask) {
  for (const mode_t mask : {0000, 0002, 0007, 0022, 0027, 0077}) {
    const testing::TemporaryDirectory dir;
    const mode_t before = umask(mask);
    files::write_atomically(dir / "whole", "");
    close(files::open_to_append(dir / "appended"));
    files::FileLock(dir / "lock").set_text("held");
    files::make_writable_directory(dir / "folder/in it");
    umask(before);
    const auto mode_of = [&](const char* name) {
      struct stat status {};
      EXPECT_EQ(stat((dir / name).c_str(), &status), 0) << name;
      return status.st_mode & 07777;
    };
    for (const char* name : {"whole", "appended", "lock"})
      EXPECT_EQ(mode_of(name), 0666 & ~mask) << name;
    for (const char* name : {"folder", "folder/in it"})
      EXPECT_EQ(mode_of(name), 0777 & ~mask) << name;
  }
}

TEST(ForeignFile, LeftoversOfDeadWritersGoAndThoseOfLivingOnesStay) {
  const testing::TemporaryDirectory dir;
  files::write_atomically(dir / "a.tmp-0123456789abcdef", "left");
  files::write_atomically(dir / "a.tmp-notes", "a user's");
  files::write_atomically(dir / "b.tmp-0123456789abcdef", "another's");
  files::AtomicFile first(dir / "a");
  first.write("first");
  {
    files::AtomicFile second(dir / "a");
    second.write("second");
    second.commit();
  }
  EXPECT_FALSE(fs::exists(dir / "a.tmp-0123456789abcdef"));
  EXPECT_TRUE(fs::exists(dir / "a.tmp-notes"));
  EXPECT_TRUE(fs::exists(dir / "b.tmp-0123456789abcdef"));
  EXPECT_EQ(files::read(dir / "a"), "second");
  first.commit();
  EXPECT_EQ(files::read(dir / "a"), "first");
}

TEST(ForeignFile, AMapThatIsCutOrRewrittenIsNoticed) {
  const testing::TemporaryDirectory dir;
  const auto map_then = [&](const std::function<void(const fs::path&)>& change) {
    const fs::path path = dir / "weights";
    files::write_atomically(path, std::string(10'000, 'w'));
    const files::MappedFile map(path);
    change(path);
    return message_of([&] { map.require_unchanged(); });
  };
  const auto touch_later = [](const fs::path& path) {
    fs::last_write_time(path, fs::last_write_time(path) + std::chrono::seconds(1));
  };
  EXPECT_EQ(map_then([](const fs::path&) {}), "(no error)");
  EXPECT_THAT(map_then([](const fs::path& p) { fs::resize_file(p, 5); }), HasSubstr("was changed"));
  EXPECT_THAT(map_then([](const fs::path& p) { fs::resize_file(p, 0); }), HasSubstr("has 0"));
  EXPECT_THAT(map_then([](const fs::path& p) { fs::resize_file(p, 20'000); }),
              HasSubstr("has 20000"));
  EXPECT_THAT(map_then(touch_later), HasSubstr("was changed"));
  // Replaced by a rename: what is mapped is still the old file.
  EXPECT_EQ(map_then([](const fs::path& p) { files::write_atomically(p, "new"); }), "(no error)");
}

TEST(ForeignFileDeathTest, AReadOfACutMapEndsWithTheFilesName) {
  const testing::TemporaryDirectory dir;
  files::write_atomically(dir / "weights", std::string(100'000, 'w'));
  EXPECT_EXIT(
      {
        files::name_cut_files();
        const files::MappedFile map(dir / "weights");
        fs::resize_file(dir / "weights", 1);
        volatile auto byte = map.bytes()[50'000];
        static_cast<void>(byte);
      },
      ::testing::ExitedWithCode(1), "error: .*weights was cut, or its disk failed");
}

}  // namespace
}  // namespace heddle
