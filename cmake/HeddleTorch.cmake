# libtorch, taken from the installed Python wheel as a C++ library: target heddle::torch (CPU) and heddle::torch_cuda.
#   HEDDLE_TORCH_DIR   folder that holds lib/ and include/ of torch; default: what scripts/setup installed
if(DEFINED ENV{HEDDLE_TORCH_DIR} AND NOT HEDDLE_TORCH_DIR)
  set(HEDDLE_TORCH_DIR $ENV{HEDDLE_TORCH_DIR})
endif()
if(NOT HEDDLE_TORCH_DIR)
  set(HEDDLE_TORCH_DIR ${PROJECT_SOURCE_DIR}/.deps/site/torch)
endif()
if(NOT EXISTS ${HEDDLE_TORCH_DIR}/lib/libtorch_cpu.so)
  message(FATAL_ERROR "No libtorch at ${HEDDLE_TORCH_DIR}. Run scripts/setup, or set HEDDLE_TORCH_DIR to the "
                      "folder of an installed torch that holds lib/libtorch_cpu.so.")
endif()

# The wheel's include folder also carries a foreign fmt, which would shadow the system's: expose only torch's own. In the build
# folder, by names that are the same in every checkout: the compiler's cache serves them all.
set(torch_include ${PROJECT_BINARY_DIR}/torch)
file(MAKE_DIRECTORY ${torch_include})
foreach(folder ATen c10 torch caffe2)
  file(CREATE_LINK ${HEDDLE_TORCH_DIR}/include/${folder} ${torch_include}/${folder} SYMBOLIC)
endforeach()

get_filename_component(site ${HEDDLE_TORCH_DIR} DIRECTORY)
add_library(heddle_torch INTERFACE)
add_library(heddle::torch ALIAS heddle_torch)
target_include_directories(heddle_torch SYSTEM INTERFACE ${torch_include}
                           ${torch_include}/torch/csrc/api/include)
target_compile_definitions(heddle_torch INTERFACE AT_PARALLEL_OPENMP=1)
target_link_libraries(heddle_torch INTERFACE ${HEDDLE_TORCH_DIR}/lib/libtorch_cpu.so
                                             ${HEDDLE_TORCH_DIR}/lib/libc10.so)
# libtorch_cpu names libcudart and libcupti, which stand in sibling wheels; the loader finds them by its own rpath.
target_link_options(heddle_torch INTERFACE -Wl,--allow-shlib-undefined)

add_library(heddle_torch_cuda INTERFACE)
add_library(heddle::torch_cuda ALIAS heddle_torch_cuda)
target_link_libraries(heddle_torch_cuda INTERFACE heddle_torch)
# Nothing calls libtorch_cuda by name, its operators register themselves: keep it though the linker sees no use.
target_link_options(
  heddle_torch_cuda INTERFACE
  "SHELL:-Wl,--no-as-needed,${HEDDLE_TORCH_DIR}/lib/libtorch_cuda.so,${HEDDLE_TORCH_DIR}/lib/libc10_cuda.so,--as-needed")

# A program finds libraries beside it first, then torch where it stood when it was built (see HeddleInstall.cmake). The same
# in the build folder: CMake would pad a shorter path with empty parts, which mean the working directory.
set(CMAKE_INSTALL_RPATH "$ORIGIN;$ORIGIN/torch/lib;${HEDDLE_TORCH_DIR}/lib")
set(CMAKE_BUILD_WITH_INSTALL_RPATH ON)

# heddle_cudnn_headers(VARIABLE): folders of the headers of cuDNN and of its front end, which is nothing but headers. cuDNN itself is
# loaded by libtorch_cuda.
#   HEDDLE_CUDNN_FRONTEND_DIR   folder that holds cudnn_frontend.h; default: what scripts/setup --cuda installed
function(heddle_cudnn_headers variable)
  if(NOT HEDDLE_CUDNN_FRONTEND_DIR)
    set(HEDDLE_CUDNN_FRONTEND_DIR ${PROJECT_SOURCE_DIR}/.deps/cudnn_frontend/include)
  endif()
  find_path(HEDDLE_CUDNN_INCLUDE cudnn.h HINTS ${site}/nvidia/cudnn/include PATHS ${CUDAToolkit_INCLUDE_DIRS})
  if(NOT EXISTS ${HEDDLE_CUDNN_FRONTEND_DIR}/cudnn_frontend.h OR NOT HEDDLE_CUDNN_INCLUDE)
    message(FATAL_ERROR "No cudnn.h or no ${HEDDLE_CUDNN_FRONTEND_DIR}/cudnn_frontend.h. Run scripts/setup --cuda.")
  endif()
  set(${variable} ${HEDDLE_CUDNN_INCLUDE} ${HEDDLE_CUDNN_FRONTEND_DIR} PARENT_SCOPE)
endfunction()
