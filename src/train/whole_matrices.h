#pragma once

#include <functional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "comm/group.h"
#include "nn/parameter.h"

namespace heddle::train {

/// A matrix of which this rank holds `part`, a tensor of the shape of the parameter's owned().
struct DividedMatrix {
  const nn::Parameter* parameter;
  at::Tensor part;
};

/// Replaces the parts by those of f(whole matrix), for a function of the same shape. Matrices that
/// the ranks of `stage`, which hold the same parameters, divide among them are brought together,
/// each is computed by one rank, and the results travel back. Stacks [n,out,in] whose matrices are
/// whole on their ranks stay there. Collective over `stage`: all ranks name the same parameters in
/// the same order.
void apply_to_whole(std::vector<DividedMatrix>& matrices, const comm::Group& stage,
                    const std::function<at::Tensor(const at::Tensor&)>& f);

}  // namespace heddle::train
