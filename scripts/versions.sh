# Every version that Heddle pins, in one place. Sourced by the other scripts; read by cmake/HeddleTorch.cmake.
TORCH_VERSION=2.11.0
CUDA_RUNTIME_VERSION=13.0.96
CUDA_CUPTI_VERSION=13.0.85
# The oracles of tests/interop, in a virtual environment outside the build.
ORACLE_TRANSFORMERS_VERSION=5.23.0
ORACLE_PEFT_VERSION=0.21.2
ORACLE_SAFETENSORS_VERSION=0.8.0
ORACLE_TOKENIZERS_VERSION=0.23.3
