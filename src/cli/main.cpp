#include <malloc.h>
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <iostream>
#include <optional>
#include <string>
#include <vector>

#include "base/amx.h"
#include "base/files.h"
#include "base/terminal_text.h"
#include "cli/application.h"
#include "device/device.h"
#include "ui/terminal.h"

int main(int argc, char** argv) {
  std::ios::sync_with_stdio(false);
  // Activations come and go with every step: memory that is handed back to the system costs a page
  // fault per 4 KiB when it is asked for again, more than the elementwise kernels that fill it.
  mallopt(M_MMAP_THRESHOLD, 1 << 30);
  mallopt(M_TRIM_THRESHOLD, -1);
  // A reader that leaves, and a limit on the size of files, are errors of the write that meets
  // them, which names the file; a run whose terminal is gone goes on.
  signal(SIGPIPE, SIG_IGN);
  signal(SIGXFSZ, SIG_IGN);
  heddle::files::name_cut_files();
  heddle::avoid_amx_without_tiles();
  const std::vector<std::string> arguments(argv + (argc > 0 ? 1 : 0), argv + argc);
  // A terminal gets what models and files say as text; a file or a pipe gets the bytes.
  std::optional<heddle::text::TerminalBuffer> terminal;
  if (isatty(STDOUT_FILENO) == 1) terminal.emplace(*std::cout.rdbuf());
  std::ostream out(terminal ? &*terminal : std::cout.rdbuf());
  heddle::cli::Session session{out};
  session.out_has_color = heddle::ui::uses_color(STDOUT_FILENO);
  if (heddle::ui::is_terminal(STDOUT_FILENO)) {
    session.out_width = heddle::ui::terminal_width(STDOUT_FILENO);
  }
  session.command_line = heddle::cli::quote_command(arguments);
  const int status = heddle::cli::run(arguments, session);
  heddle::device::finish();
#ifdef HEDDLE_LEAVES_AT_ONCE
  // libtorch takes its thousands of operators back one by one at exit, a quarter of the time of the
  // shortest command. The system frees all of it.
  out.flush();
  terminal.reset();
  std::cout.flush();
  std::fflush(nullptr);
  _exit(status);
#else
  return status;
#endif
}
