#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "comm/group.h"
#include "sync/part.h"

/// Comparison of the weights that a trainer has with those that rollouts compute with, tensor by
/// tensor, whatever the two layouts.
namespace heddle::sync {

/// A hash of all elements of a tensor: the sum, modulo 2^64, of their bits, each mixed with its
/// place in the global tensor, so that ranks add up their parts.
struct TensorHash {
  std::string name;
  std::uint64_t hash = 0;
};

/// Hashes of what sent_parts() lists, by name. Collective over `trainers`; all of them get all.
std::vector<TensorHash> sent_hashes(const std::vector<Part>& parts, const comm::Group& trainers);

/// Hashes of the values that this rank computes with, by name. Collective over the ranks along tp
/// of one replica, which add up what they divide; a value that each has whole is hashed by each.
/// Values must have their memory (parallel::Acquired).
std::vector<TensorHash> held_hashes(const Visit& visit, const comm::Group& tensor_group);

/// Names the first tensor in which the two differ; empty: they are the same.
std::string first_difference(const std::vector<TensorHash>& trainer,
                             const std::vector<TensorHash>& rollout);

}  // namespace heddle::sync
