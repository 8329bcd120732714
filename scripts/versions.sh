# Every version that Heddle pins, in one place. Sourced by the other scripts.
TORCH_VERSION=2.11.0
# CUDA of that libtorch. Its CPU library too loads the runtime and CUPTI, also on machines without a GPU.
CUDA_VERSION=13.0
CUDA_RUNTIME_VERSION=13.0.96
CUDA_CUPTI_VERSION=13.0.85
# Which wheel of torch is taken; Heddle runs no Python.
WHEEL_PYTHON_VERSION=3.12
# The header of the collectives of that libtorch.
NCCL_VERSION=2.28.9
# Headers alone: graphs for the cuDNN that libtorch_cuda loads.
CUDNN_VERSION=9.19.0.56
CUDNN_FRONTEND_VERSION=1.32.0
# The wheel whose C++ libraries read Parquet and Arrow files; a program looks for those of this version.
PYARROW_VERSION=26.0.1
# What libtorch_cuda loads on a machine with a GPU.
CUDA_LIBRARIES="nvidia-cublas==13.1.0.3 nvidia-cuda-nvrtc==13.0.88 nvidia-cudnn-cu13==$CUDNN_VERSION nvidia-cufft==12.0.0.61
  nvidia-cufile==1.15.1.6 nvidia-curand==10.4.0.35 nvidia-cusolver==12.0.4.66 nvidia-cusparse==12.6.3.3
  nvidia-cusparselt-cu13==0.8.0 nvidia-nccl-cu13==$NCCL_VERSION nvidia-nvjitlink==13.0.88 nvidia-nvshmem-cu13==3.4.5
  nvidia-nvtx==13.0.85"
# The wheel whose headers the Ascend back end is compiled with, and the CANN it was made for (docs/ascend.md).
TORCH_NPU_VERSION=2.11.0.post3
CANN_VERSION=9.1.0
# Formats differ between versions of clang-format.
CLANG_FORMAT_VERSION=14.0.6
# Tables of docs/ are made from YAML.
PYYAML_VERSION=6.0.3
# The oracles of tests/interop, in a virtual environment outside the build.
ORACLE_TRANSFORMERS_VERSION=5.23.0
ORACLE_PEFT_VERSION=0.21.2
ORACLE_SAFETENSORS_VERSION=0.8.0
ORACLE_TOKENIZERS_VERSION=0.23.3
ORACLE_PYTEST_VERSION=9.2.0
ORACLE_TINKER_VERSION=0.38.0
ORACLE_OPENAI_VERSION=3.57.0
ORACLE_GGUF_VERSION=0.19.0
ORACLE_SENTENCE_TRANSFORMERS_VERSION=6.2.0
ORACLE_XLLAMACPP_VERSION=2026.10.11549 # llama.cpp b11549
