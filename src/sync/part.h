#pragma once

#include <functional>
#include <string>
#include <vector>

#include "base/layout.h"
#include "comm/mesh.h"
#include "nn/parameter.h"
#include "sync/manifest.h"

namespace heddle::sync {

/// A tensor as one rank holds it: rectangular parts of the global one, each a view into the rank's
/// own memory.
struct Part {
  TensorInfo info;
  std::vector<nn::Box> boxes;
};

using Visit = std::function<void(const std::function<void(nn::Parameter&)>&)>;

/// Trainer: the parts that this rank alone is to send. Over all ranks of the mesh each element of
/// each parameter occurs once, whatever the layout. Parameters of other pipeline stages have no
/// boxes.
std::vector<Part> sent_parts(const Visit& visit, const comm::Mesh& mesh);

/// Rollout: all values that this rank owns, to be written in place. If replicas own rows of each
/// other's values, call Sharding::publish(true) after an update.
std::vector<Part> received_parts(const Visit& visit);

/// The rectangles that one rank holds of each tensor, without its memory, as text that another rank
/// reads.
struct HeldRegions {
  std::vector<TensorInfo> tensors;           ///< In the order of the parts.
  std::vector<std::vector<Region>> regions;  ///< For each tensor.

  static HeldRegions of(const std::vector<Part>& parts);
  std::string to_text() const;
  static HeldRegions from_text(const std::string& text);
};

/// Throws InternalError that names the tensor unless all ranks together hold each element once.
void require_each_element_once(const std::vector<HeldRegions>& ranks);

}  // namespace heddle::sync
