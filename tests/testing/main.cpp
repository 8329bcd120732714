#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <string_view>

#include "base/amx.h"
#include "testing/device_name.h"

int main(int argc, char** argv) {
  // c10d asks the resolver for the name of every peer: a machine whose DNS does not answer must not
  // slow tests down. (The programs that tests start inherit it.)
  setenv("RES_OPTIONS", "timeout:1 attempts:1", /*overwrite=*/0);
  // Its flight recorder is one for the process and takes no lock; here ranks are threads.
  setenv("TORCH_FR_BUFFER_SIZE", "0", 0);
  heddle::avoid_amx_without_tiles();
  testing::InitGoogleTest(&argc, argv);
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    if (argument.starts_with("--device="))
      heddle::testing::set_device_name(std::string(argument.substr(9)));
  }
  return RUN_ALL_TESTS();
}
