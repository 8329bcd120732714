#pragma once

#include <string>
#include <string_view>

namespace heddle::serve::tinker {

/// Results in the JSON form that clients before SDK 0.18 read. `bytes`: what encode() made of a
/// ForwardBackwardOutput or a SampleResponse.
std::string forward_backward_as_json(std::string_view bytes);
std::string sample_as_json(std::string_view bytes);

}  // namespace heddle::serve::tinker
