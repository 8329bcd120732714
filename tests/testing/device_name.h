#pragma once

#include <string>

namespace heddle::testing {

/// Device of the tests that hold for every device: "cpu", or what --device= of the test program
/// names.
const std::string& device_name();
void set_device_name(std::string name);

}  // namespace heddle::testing
