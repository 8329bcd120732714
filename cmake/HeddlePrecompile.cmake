# What nearly every source reads (libtorch's tensor, JSON, GoogleTest) is parsed once for all libraries and once for all tests: a
# build from nothing takes half the time. It hides a missing #include: the preset `plain` shows it.
#   heddle_precompile(TARGET library|test)
option(HEDDLE_PRECOMPILE "Precompile the headers that most sources include" ON)

function(heddle_precompile target kind)
  if(NOT HEDDLE_PRECOMPILE)
    return()
  endif()
  set(donor heddle_precompiled_${kind})
  if(NOT TARGET ${donor})
    set(empty ${PROJECT_BINARY_DIR}/precompiled.cpp)
    file(CONFIGURE OUTPUT ${empty} CONTENT "")
    find_package(nlohmann_json REQUIRED)
    add_library(${donor} OBJECT ${empty})
    target_link_libraries(${donor} PRIVATE heddle::base heddle::torch nlohmann_json::nlohmann_json)
    target_precompile_headers(${donor} PRIVATE <algorithm> <filesystem> <functional> <map> <memory> <optional> <span> <string> <thread>
                              <vector> <ATen/TensorOperators.h> <ATen/core/Tensor.h> <fmt/format.h> <nlohmann/json.hpp>)
    if(kind STREQUAL "test")
      find_package(GTest REQUIRED)
      set_target_properties(${donor} PROPERTIES POSITION_INDEPENDENT_CODE OFF)
      target_compile_options(${donor} PRIVATE -fPIE -O1) # as the sources of a test are compiled
      target_link_libraries(${donor} PRIVATE GTest::gmock GTest::gtest)
      target_precompile_headers(${donor} PRIVATE <gmock/gmock.h> <gtest/gtest.h>)
    endif()
  endif()
  target_link_libraries(${target} PRIVATE heddle::torch) # for the flags, where a test has no use for it
  target_precompile_headers(${target} REUSE_FROM ${donor})
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    target_compile_options(${target} PRIVATE -fpch-preprocess) # ccache asks for it: it then hashes the precompiled header
  endif()
endfunction()
