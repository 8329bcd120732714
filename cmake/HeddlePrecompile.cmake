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
      target_compile_options(${donor} PRIVATE -fPIE ${HEDDLE_TEST_LEVEL}) # as the sources of a test are compiled
      target_link_libraries(${donor} PRIVATE GTest::gmock GTest::gtest)
      target_precompile_headers(${donor} PRIVATE <gmock/gmock.h> <gtest/gtest.h>)
    endif()
    if(CCACHE_PROGRAM)
      set_property(TARGET ${donor} PROPERTY CXX_COMPILER_LAUNCHER ${PROJECT_SOURCE_DIR}/cmake/with-checksum ${CMAKE_CXX_COMPILER_LAUNCHER})
    endif()
  endif()
  target_link_libraries(${target} PRIVATE heddle::torch) # for the flags, where a test has no use for it
  target_precompile_headers(${target} REUSE_FROM ${donor})
  if(CCACHE_PROGRAM AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # ccache hashes the checksum in place of the precompiled header, whose 400 MB would cost each object half a second.
    get_target_property(folder ${donor} BINARY_DIR)
    set_property(TARGET ${target} PROPERTY CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env CCACHE_PCH_EXTSUM=1
      CCACHE_EXTRAFILES=${folder}/CMakeFiles/${donor}.dir/cmake_pch.hxx.gch.sum ${CMAKE_CXX_COMPILER_LAUNCHER})
    target_compile_options(${target} PRIVATE -fpch-preprocess) # ccache asks for it
  endif()
endfunction()
