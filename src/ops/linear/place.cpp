#include "ops/linear/place.h"

#include <utility>

namespace heddle::ops {
namespace {

thread_local LinearPlace place_of_thread;

}  // namespace

const LinearPlace& linear_place() { return place_of_thread; }

AtLinearPlace::AtLinearPlace(const LinearPlace& place)
    : before_(std::exchange(place_of_thread, place)) {}

AtLinearPlace::~AtLinearPlace() { place_of_thread = before_; }

}  // namespace heddle::ops
