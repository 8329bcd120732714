// MKL, which libtorch brings, ends a program while it is loaded where the working folder is gone,
// and says that libtorch cannot be loaded. So this looks before any library starts, with system
// calls alone, and says what is wrong.
#include <errno.h>
#include <limits.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <string_view>

namespace {

constexpr std::string_view kMessage =
    "error: the working folder is gone: change to one that is there\n";

void check_working_folder(int /*argc*/, char** /*argv*/, char** /*environment*/) {
  char path[PATH_MAX];
  if (syscall(SYS_getcwd, path, sizeof path) > 0 || errno != ENOENT) return;
  syscall(SYS_write, STDERR_FILENO, kMessage.data(), kMessage.size());
  syscall(SYS_exit_group, 2);
}

[[gnu::section(".preinit_array"),
  gnu::used]] void (*const kCheckWorkingFolder)(int, char**, char**) = check_working_folder;

}  // namespace
