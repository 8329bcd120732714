#pragma once

#include <c10/core/ScalarType.h>

#include "assembly/model_on_ranks.h"

namespace heddle::assembly {

/// The forms that kernels.frozen_experts may name.
inline constexpr const char* kExpertsAsLoaded = "as_loaded";
inline constexpr const char* kExpertsInEightBits = "cuda.fp8";

/// Whether each rank has the routed experts of its layers whole: dp and pp leave them so.
bool has_whole_experts(const comm::Mesh& mesh);

/// Throws ConfigError where kernels.frozen_experts names a form that does not do for the recipe:
/// for a model or a run without frozen experts, for experts that are trained or have adapters or
/// that ranks divide, for a run that generates in a job of several ranks, in another dtype than
/// bf16, or with a kernel of moe_experts that multiplies no 8-bit floats. Does nothing where the
/// key names none. place() and plans ask before there is a model, so that both refuse in the same
/// words; rules of one device and of sizes are the kernel's own.
void require_frozen_experts(const ModelRecipe& recipe, c10::ScalarType dtype,
                            const comm::Mesh& mesh, bool is_job_of_several_ranks);

/// Whether 8-bit experts will do, as far as the recipe tells before there is a model: `kernels.fp8`
/// asks for the form only then.
bool may_keep_frozen_experts(const ModelRecipe& recipe, const comm::Mesh& mesh,
                             bool is_job_of_several_ranks);

/// Puts the routed experts of a filled model into the form that kernels.frozen_experts names and
/// require_frozen_experts() let pass, and frees their weights: those parameters are then held no
/// more. Does nothing for experts as they were loaded. Throws ConfigError where the chosen kernel
/// of moe_experts multiplies none in 8 bits.
void keep_frozen_experts(const ModelRecipe& recipe, ModelOnRanks& placed);

}  // namespace heddle::assembly
