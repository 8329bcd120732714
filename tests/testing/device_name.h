#pragma once

#include <string>

namespace heddle::testing {

/// What the tests that hold for every device run on: "cpu", or what --device= of the test program
/// names.
const std::string& device_name();
void set_device_name(std::string name);

}  // namespace heddle::testing
