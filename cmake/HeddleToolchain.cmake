# Compiler flags, ccache, sanitizers.
find_program(CCACHE_PROGRAM ccache)
if(CCACHE_PROGRAM)
  # Objects are shared between presets and between checkouts: nothing in them refers to the build folder (no debug information
  # does in a release), and paths are hashed as seen from it. The sloppiness is what ccache asks for to use precompiled headers.
  set(launcher ${CMAKE_COMMAND} -E env CCACHE_NOHASHDIR=1 CCACHE_BASEDIR=${PROJECT_SOURCE_DIR}
               CCACHE_SLOPPINESS=pch_defines,time_macros ${CCACHE_PROGRAM})
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${launcher})
  # The compiler's own list of headers (-MD) is enough: a source is not preprocessed once more before it is compiled.
  list(INSERT launcher 3 CCACHE_DEPEND=1)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${launcher})
endif()

set(CMAKE_CXX_FLAGS_RELEASE "-O2 -DNDEBUG")
set(HEDDLE_TEST_LEVEL -O1) # half of a build is tests, and their time is spent in the libraries
if(HEDDLE_SANITIZE)
  set(HEDDLE_TEST_LEVEL -O0) # checks of every pointer would be optimized for longer than they run
  set(CMAKE_CXX_FLAGS_RELEASE "-O1 -g1 -DNDEBUG -D_GLIBCXX_ASSERTIONS")
endif()
add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-Wall> $<$<COMPILE_LANGUAGE:CXX>:-Wextra>
                    $<$<COMPILE_LANGUAGE:CXX>:-Wno-unused-parameter>
                    $<$<COMPILE_LANGUAGE:CXX>:-fopenmp>)
add_link_options(-fopenmp -Wl,--as-needed)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # A precompiled header fills the compiler's heap at once: it would search it for garbage again and again, a sixth of its time.
  add_compile_options($<$<COMPILE_LANGUAGE:CXX>:--param=ggc-min-heapsize=1000000>)
endif()

if(HEDDLE_SANITIZE)
  add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${HEDDLE_SANITIZE}>
                      $<$<COMPILE_LANGUAGE:CXX>:-fno-omit-frame-pointer>
                      $<$<COMPILE_LANGUAGE:CXX>:-fno-sanitize-recover=all>)
  add_link_options(-fsanitize=${HEDDLE_SANITIZE})
endif()
