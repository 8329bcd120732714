#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ckpt/adapter_directory.h"

namespace heddle::ckpt {

/// Settings that a run which trains an adapter on shares with it.
struct TrainedAdapter {
  std::int64_t rank = 0;
  double alpha = 0;
  bool rslora = false;
  /// Names that match the adapter's modules and parameters, see adapters::LoraSet: those of its
  /// configuration where they say it, else "layers.3.mlp.up_proj".
  std::vector<std::string> targets, target_parameters;
  std::vector<std::string> modules_to_save;
  bool has_shared_factors = false;  ///< The compact form.
};

/// Throws ModelError that names what of the adapter a run does not train: factors of different
/// ranks or scales, on embedding, head or router, of single experts, of the vision tower, and a
/// base layer that was saved with it.
TrainedAdapter trained_adapter(const AdapterDirectory& adapter);

}  // namespace heddle::ckpt
