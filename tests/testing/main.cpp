#include <gtest/gtest.h>

#include <cstdlib>

int main(int argc, char** argv) {
  // c10d asks the resolver for the name of every peer: a machine whose DNS does not answer must not
  // slow tests down. (The programs that tests start inherit it.)
  setenv("RES_OPTIONS", "timeout:1 attempts:1", /*overwrite=*/0);
  // Its flight recorder is one for the process and takes no lock; here ranks are threads.
  setenv("TORCH_FR_BUFFER_SIZE", "0", 0);
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
