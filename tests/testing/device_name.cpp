#include "testing/device_name.h"

#include <utility>

namespace heddle::testing {
namespace {

std::string& chosen() {
  static std::string name = "cpu";
  return name;
}

}  // namespace

const std::string& device_name() { return chosen(); }
void set_device_name(std::string name) { chosen() = std::move(name); }

}  // namespace heddle::testing
