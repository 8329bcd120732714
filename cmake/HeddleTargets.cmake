# heddle_library(NAME [TORCH] [DEPS ...] [ONLY REGEX] [EXCLUDE REGEX])  a layer, or a part of one: every .cpp of the folder
#                                          (tests and main excluded), or those that match, as heddle::NAME
# heddle_test(NAME SOURCES... [DEPS ...])  a GoogleTest program; test suites are labelled by their name's prefix
function(heddle_library name)
  cmake_parse_arguments(ARG "TORCH" "ONLY;EXCLUDE" "DEPS" ${ARGN})
  # Relative, so that the name of a folder above the project's is not taken for a vendor's.
  file(GLOB_RECURSE sources RELATIVE ${PROJECT_SOURCE_DIR} CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/*.cpp)
  list(FILTER sources EXCLUDE REGEX "/(test|fuzz|main)[^/]*\\.cpp$")
  list(FILTER sources EXCLUDE REGEX "/(cuda|npu|sim|stub|vector)/")
  list(TRANSFORM sources PREPEND ${PROJECT_SOURCE_DIR}/)
  if(ARG_ONLY)
    list(FILTER sources INCLUDE REGEX ${ARG_ONLY})
  endif()
  if(ARG_EXCLUDE)
    list(FILTER sources EXCLUDE REGEX ${ARG_EXCLUDE})
  endif()
  if(sources)
    heddle_join(sources ${name})
    add_library(heddle_${name} STATIC ${sources})
    set(scope PUBLIC)
  else()
    add_library(heddle_${name} INTERFACE)
    set(scope INTERFACE)
  endif()
  add_library(heddle::${name} ALIAS heddle_${name})
  target_include_directories(heddle_${name} ${scope} ${PROJECT_SOURCE_DIR}/src)
  target_link_libraries(heddle_${name} ${scope} ${ARG_DEPS})
  if(ARG_TORCH)
    target_link_libraries(heddle_${name} ${scope} heddle::torch)
    if(sources)
      heddle_precompile(heddle_${name} library)
    endif()
  endif()
endfunction()

# heddle_cpu_variants(TARGET SOURCES...): compiles each source once for each instruction set, with HEDDLE_CPU_ARCH set
# to the namespace (baseline, avx2, avx512) it fills; the caller picks one of them at run time.
function(heddle_cpu_variants target)
  if(NOT CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    set(variants baseline)
  else()
    set(variants baseline avx2 avx512)
  endif()
  # Loops with square roots and selections become vectors only without errno and traps; a product and a sum may fuse.
  set(level -O3)
  if(HEDDLE_SANITIZE)
    set(level -O1) # -O3 would take more than a minute for one source
  endif()
  set(flags_common ${level} -fno-math-errno -fno-trapping-math -ffp-contract=fast)
  set(flags_baseline "")
  set(flags_avx2 "-mavx2;-mfma;-mf16c")
  set(flags_avx512 "-mavx512f;-mavx512bw;-mavx512vl;-mavx512dq;-mfma;-mf16c;-mprefer-vector-width=512")
  foreach(variant ${variants})
    add_library(${target}_${variant} OBJECT ${ARGN})
    target_compile_definitions(${target}_${variant} PRIVATE HEDDLE_CPU_ARCH=${variant})
    target_compile_options(${target}_${variant} PRIVATE ${flags_common} ${flags_${variant}})
    target_include_directories(${target}_${variant} PRIVATE ${PROJECT_SOURCE_DIR}/src)
    target_sources(${target} PRIVATE $<TARGET_OBJECTS:${target}_${variant}>)
  endforeach()
endfunction()

# heddle_cuda_kernels(TARGET SOURCES...): compiles .cu sources, which know no libtorch, for HEDDLE_CUDA_ARCHITECTURES.
# Objects and not sources of the target itself, so that programs are still linked as C++ and with the shared CUDA runtime.
function(heddle_cuda_kernels target)
  add_library(${target}_cuda OBJECT ${ARGN})
  # C++17: CMake 3.25 does not know that CUDA 13 has C++20.
  set_target_properties(${target}_cuda PROPERTIES CUDA_ARCHITECTURES "${HEDDLE_CUDA_ARCHITECTURES}" CUDA_STANDARD 17)
  target_compile_options(${target}_cuda PRIVATE -lineinfo)
  if("90a-real" IN_LIST HEDDLE_CUDA_ARCHITECTURES)
    # Says that wgmma code is in this build; without it only the mma.sync kernels are offered.
    target_compile_definitions(${target}_cuda PRIVATE HEDDLE_CUDA_SM90A)
  endif()
  target_include_directories(${target}_cuda PRIVATE ${PROJECT_SOURCE_DIR}/src)
  target_sources(${target} PRIVATE $<TARGET_OBJECTS:${target}_cuda>)
endfunction()

# heddle_cuda_sources(TARGET SOURCES...): adds sources that see the toolkit's headers. They alone: whatever else TARGET and those
# that link it compile is the same object as in a build without CUDA, and the compiler's cache has it.
function(heddle_cuda_sources target)
  target_sources(${target} PRIVATE ${ARGN})
  foreach(folder ${CUDAToolkit_INCLUDE_DIRS})
    set_property(SOURCE ${ARGN} APPEND PROPERTY COMPILE_OPTIONS -isystem${folder})
  endforeach()
  target_link_libraries(${target} PUBLIC heddle::torch_cuda)
  target_link_libraries(${target} INTERFACE $<LINK_ONLY:CUDA::cudart>)
endfunction()

#   ON_NPU FILTER    these tests also run on the simulated NPU, as npu.<suite>, label npu
function(heddle_test name)
  cmake_parse_arguments(ARG "" "TIMEOUT;ON_NPU" "SOURCES;DEPS" ${ARGN})
  if(HEDDLE_NPU)
    set(ARG_ON_NPU "") # such a build has no simulation
  endif()
  add_executable(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE ${ARG_DEPS} heddle::testing GTest::gmock GTest::gtest)
  add_dependencies(heddle_tests ${name})
  heddle_precompile(${name} test)
  target_compile_options(${name} PRIVATE ${HEDDLE_TEST_LEVEL})
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 600) # for a suite
  endif()
  if(HEDDLE_SANITIZE)
    # libtorch takes a second to load under a sanitizer: four processes for a program, not one for each test.
    foreach(shard RANGE 3)
      add_test(NAME ${name}.${shard} COMMAND ${name} --gtest_brief=1 --gtest_filter=-Slow*:Fault*:Fuzz*:Gpu*)
      set_tests_properties(
        ${name}.${shard}
        PROPERTIES LABELS fast TIMEOUT 1800
                   ENVIRONMENT "GTEST_TOTAL_SHARDS=4;GTEST_SHARD_INDEX=${shard};TSAN_OPTIONS=suppressions=${PROJECT_SOURCE_DIR}/tests/tsan.supp")
    endforeach()
    if(ARG_ON_NPU)
      add_test(NAME npu.${name} COMMAND ${name} --device=npu --gtest_brief=1 --gtest_filter=${ARG_ON_NPU})
      set_tests_properties(npu.${name} PROPERTIES LABELS npu TIMEOUT 1800)
    endif()
    return()
  endif()
  # The suites are listed when ctest runs: a CUDA build may be made where its libraries cannot be loaded.
  set(suites "${CMAKE_CURRENT_BINARY_DIR}/${name}_suites.cmake")
  file(
    GENERATE
    OUTPUT "${suites}"
    CONTENT
      "set(program \"$<TARGET_FILE:${name}>\")\nset(timeout ${ARG_TIMEOUT})\nset(on_npu \"${ARG_ON_NPU}\")\nset(list \"${CMAKE_CURRENT_BINARY_DIR}/${name}_tests.txt\")\ninclude(\"${PROJECT_SOURCE_DIR}/cmake/TestSuites.cmake\")\n"
  )
  set_property(
    DIRECTORY
    APPEND
    PROPERTY TEST_INCLUDE_FILES "${suites}")
endfunction()
