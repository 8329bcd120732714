# torch_npu, with the headers of ACL and HCCL that it carries: heddle_npu_sources(TARGET SOURCES...) adds sources that see them.
#   HEDDLE_TORCH_NPU_DIR   folder of torch_npu that holds include/ and lib/libtorch_npu.so: of a build with BUILD_LIBTORCH=ON
#                          (scripts/build-torch-npu), which also programs can be linked with; default: the wheel that
#                          scripts/setup --npu fetched, whose library needs a Python interpreter: its headers compile, its
#                          symbols can be compared, nothing can be linked with it.
#   ASCEND_TOOLKIT_HOME    CANN, as its set_env.sh sets it; needed to link.
if(DEFINED ENV{HEDDLE_TORCH_NPU_DIR} AND NOT HEDDLE_TORCH_NPU_DIR)
  set(HEDDLE_TORCH_NPU_DIR $ENV{HEDDLE_TORCH_NPU_DIR})
endif()
if(NOT HEDDLE_TORCH_NPU_DIR)
  set(HEDDLE_TORCH_NPU_DIR ${PROJECT_SOURCE_DIR}/.deps/npu/torch_npu)
endif()
if(NOT EXISTS ${HEDDLE_TORCH_NPU_DIR}/include/torch_npu/csrc/libs/init_npu.h)
  message(FATAL_ERROR "No torch_npu at ${HEDDLE_TORCH_NPU_DIR}. Run scripts/setup --npu for its headers, or set "
                      "HEDDLE_TORCH_NPU_DIR to the folder torch_npu of a build (docs/ascend.md).")
endif()

set(npu_include ${HEDDLE_TORCH_NPU_DIR}/include)
# The headers name each other from the root, from the folder above ("third_party/hccl/inc/hccl/hccl.h") and bare ("hccl/hccl.h").
add_library(heddle_torch_npu_headers INTERFACE)
target_include_directories(
  heddle_torch_npu_headers SYSTEM
  INTERFACE ${npu_include} ${npu_include}/third_party/acl/inc ${npu_include}/third_party/hccl/inc
            ${npu_include}/third_party/op-plugin ${HEDDLE_TORCH_DIR}/include/torch/csrc/distributed)
target_compile_definitions(heddle_torch_npu_headers INTERFACE BUILD_LIBTORCH USE_DISTRIBUTED)

add_library(heddle_torch_npu INTERFACE)
if(EXISTS "$ENV{ASCEND_TOOLKIT_HOME}/lib64/libascendcl.so")
  # As libtorch_cuda: nothing calls the operators by name.
  target_link_options(
    heddle_torch_npu INTERFACE
    "SHELL:-Wl,--no-as-needed,${HEDDLE_TORCH_NPU_DIR}/lib/libtorch_npu.so,$ENV{ASCEND_TOOLKIT_HOME}/lib64/libascendcl.so,--as-needed")
  list(APPEND CMAKE_INSTALL_RPATH ${HEDDLE_TORCH_NPU_DIR}/lib $ENV{ASCEND_TOOLKIT_HOME}/lib64)
else()
  message(STATUS "No CANN (ASCEND_TOOLKIT_HOME is not set by its set_env.sh): libraries compile, programs cannot be linked")
endif()

function(heddle_npu_sources target)
  add_library(${target}_npu OBJECT ${ARGN})
  target_include_directories(${target}_npu PRIVATE ${PROJECT_SOURCE_DIR}/src)
  target_link_libraries(${target}_npu PRIVATE heddle::torch heddle_torch_npu_headers)
  # Their inline functions leave parameters and results unused, and say so by macros that are not in system headers' reach.
  target_compile_options(${target}_npu PRIVATE -Wno-unused-variable -Wno-unused-function -Wno-deprecated-declarations)
  target_sources(${target} PRIVATE $<TARGET_OBJECTS:${target}_npu>)
  target_link_libraries(${target} PUBLIC heddle_torch_npu)
endfunction()
