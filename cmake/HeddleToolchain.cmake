# Compiler flags, ccache, sanitizers.
find_program(CCACHE_PROGRAM ccache)
if(CCACHE_PROGRAM)
  # No debug information refers to the build directory, so objects are shared between build directories.
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env CCACHE_NOHASHDIR=1 ${CCACHE_PROGRAM})
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env CCACHE_NOHASHDIR=1 ${CCACHE_PROGRAM})
endif()

set(CMAKE_CXX_FLAGS_RELEASE "-O2 -DNDEBUG")
if(HEDDLE_SANITIZE)
  set(CMAKE_CXX_FLAGS_RELEASE "-O1 -g1 -DNDEBUG -D_GLIBCXX_ASSERTIONS")
endif()
add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-Wall> $<$<COMPILE_LANGUAGE:CXX>:-Wextra>
                    $<$<COMPILE_LANGUAGE:CXX>:-Wno-unused-parameter>
                    $<$<COMPILE_LANGUAGE:CXX>:-fopenmp>)
add_link_options(-fopenmp -Wl,--as-needed)

if(HEDDLE_SANITIZE)
  add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${HEDDLE_SANITIZE}>
                      $<$<COMPILE_LANGUAGE:CXX>:-fno-omit-frame-pointer>
                      $<$<COMPILE_LANGUAGE:CXX>:-fno-sanitize-recover=all>)
  add_link_options(-fsanitize=${HEDDLE_SANITIZE})
endif()
