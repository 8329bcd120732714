#include "cli/stop_request.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>

#include "base/errors.h"

namespace heddle::cli {
namespace {

/// The wait status of a child process that runs `body` and then leaves with its result.
template <class Body>
int child_status(Body body) {
  const pid_t child = fork();
  if (child == 0) _exit(body());
  int status = 0;
  waitpid(child, &status, 0);
  return status;
}

TEST(StopRequest, TheFirstSignalOnlyAsks) {
  for (const int number : {SIGINT, SIGTERM}) {
    const int status = child_status([number] {
      const StopRequest stop;
      if (stop.flag() || stop.signal() != 0) return 1;
      raise(number);
      return stop.flag() && stop.signal() == number ? 0 : 2;
    });
    EXPECT_TRUE(WIFEXITED(status));
    EXPECT_EQ(WEXITSTATUS(status), 0);
  }
}

TEST(StopRequest, TheFirstSignalIsAnsweredAtOnce) {
  ::testing::internal::CaptureStderr();
  const int status = child_status([] {
    const StopRequest stop("stopping\n");
    raise(SIGTERM);
    raise(SIGINT);
    return 0;
  });
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "stopping\n");
  EXPECT_EQ(WEXITSTATUS(status), 128 + SIGINT);
}

TEST(StopRequest, TheSecondSignalEndsTheProcessWith128PlusN) {
  const int status = child_status([] {
    const StopRequest stop;
    raise(SIGINT);
    raise(SIGTERM);
    return 0;
  });
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 128 + SIGTERM);
}

TEST(StopRequest, AfterItsLifeSignalsDoWhatTheyDidBefore) {
  const int status = child_status([] {
    { const StopRequest stop; }
    raise(SIGTERM);
    return 0;
  });
  EXPECT_TRUE(WIFSIGNALED(status));
  EXPECT_EQ(WTERMSIG(status), SIGTERM);
}

TEST(StopRequest, ASecondLifeStartsAfresh) {
  const int status = child_status([] {
    {
      const StopRequest stop;
      raise(SIGINT);
    }
    const StopRequest stop;
    if (stop.flag()) return 1;
    raise(SIGINT);
    return stop.flag() ? 0 : 2;
  });
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
  const StopRequest one;
  EXPECT_THROW(StopRequest(), InternalError);
}

}  // namespace
}  // namespace heddle::cli
