#pragma once

namespace heddle {

/// Whether this processor announces AMX but describes no tiles (CPUID leaf 1Dh is empty), as some
/// virtual machines do. oneDNN, by which libtorch multiplies bf16 on the CPU, believes the first
/// and ends in an illegal instruction.
bool has_amx_without_tiles();

/// There, has oneDNN do with AVX-512, unless the environment limits it already
/// (ONEDNN_MAX_CPU_ISA). Before the first product of the process.
void avoid_amx_without_tiles();

}  // namespace heddle
