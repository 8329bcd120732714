// How long OpenMP's threads spin before they sleep. libgomp's default is milliseconds: on a machine
// that does anything else, each end of a parallel region then waits for a thread that another
// program has pushed off its core by a thread that spins on it, and a step takes ten times as long.
// libgomp reads its environment when it is loaded, before main, and has no call for it. So this
// runs before any library starts, and starts the program once more with the variable set; what
// that costs is the mapping of the libraries, 2 ms.
#include <elf.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstddef>

namespace {

// About 0.1 ms: longer than the gaps between the parallel regions of a step.
char kSetting[] = "GOMP_SPINCOUNT=10000";
constexpr std::size_t kMostVariables = 4096;

bool names(const char* variable, const char* name) {
  while (*name != 0 && *variable == *name) ++variable, ++name;
  return *name == 0 && *variable == '=';
}

/// The file this program was started from. Null if the dynamic loader was asked to run it: then the
/// file would be the loader.
const char* started_file(char** environment_end) {
  const auto* entry = reinterpret_cast<const Elf64_auxv_t*>(environment_end + 1);
  const char* file = nullptr;
  bool has_loader = false;
  for (; entry->a_type != AT_NULL; ++entry) {
    if (entry->a_type == AT_BASE) has_loader = entry->a_un.a_val != 0;
    if (entry->a_type == AT_EXECFN) file = reinterpret_cast<const char*>(entry->a_un.a_val);
  }
  return has_loader ? file : nullptr;
}

// No library has been initialised yet: system calls and the stack alone.
void set_waiting(int /*argc*/, char** argv, char** environment) {
  char* variables[kMostVariables + 2];
  std::size_t count = 0;
  for (; environment[count] != nullptr; ++count) {
    if (names(environment[count], "GOMP_SPINCOUNT") ||
        names(environment[count], "OMP_WAIT_POLICY") || count == kMostVariables)
      return;
    variables[count] = environment[count];
  }
  const char* file = started_file(environment + count);
  if (file == nullptr) return;
  variables[count] = kSetting;
  variables[count + 1] = nullptr;
  syscall(SYS_execve, file, argv, variables);
  // Where that is not allowed the program goes on as it is.
}

[[gnu::section(".preinit_array"), gnu::used]] void (*const kSetWaiting)(int, char**,
                                                                        char**) = set_waiting;

}  // namespace
