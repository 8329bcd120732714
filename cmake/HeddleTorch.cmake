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

# The wheel's include folder also carries a foreign fmt, which would shadow the system's: expose only torch's own.
string(MD5 torch_key ${HEDDLE_TORCH_DIR})
string(SUBSTRING ${torch_key} 0 8 torch_key)
set(torch_include ${PROJECT_SOURCE_DIR}/.deps/include-${torch_key})
file(MAKE_DIRECTORY ${torch_include})
foreach(folder ATen c10 torch caffe2)
  if(NOT EXISTS ${torch_include}/${folder})
    file(CREATE_LINK ${HEDDLE_TORCH_DIR}/include/${folder} ${torch_include}/${folder} SYMBOLIC)
  endif()
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
