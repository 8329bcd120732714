# heddle_install(TARGET)  a tree that can be moved:
#
#   bin/heddle            a launcher of a few lines
#   lib/heddle/heddle     the program
#   lib/heddle/libheddle_arrow.so   what reads Parquet and Arrow files (src/data/arrow)
#   lib/heddle/*.so.*     the small libraries of the distribution that it was linked with
#   lib/heddle/torch      if it exists (a link will do), the folder of the torch wheel; else HEDDLE_TORCH_DIR of the
#                         environment, else the one it was built with. libtorch has 0.5 GB (1 GB with CUDA): it is not copied.
function(heddle_install target)
  install(TARGETS ${target}
          RUNTIME_DEPENDENCIES
            # What every system has, and libtorch with what belongs to it; libcurl does not begin like CUDA's libraries.
            PRE_EXCLUDE_REGEXES "^ld-linux" "^lib(c|m|dl|rt|pthread|util|resolv|gcc_s|stdc[+][+])[.]so"
                                "^lib(torch|c10|gomp|cuda|cublas|cudnn|cufft|cufile|cupti|curand|cusolver|cusparse|nv|asan|ubsan|tsan)"
          RUNTIME DESTINATION lib/heddle
          LIBRARY DESTINATION lib/heddle)
  install(PROGRAMS ${PROJECT_SOURCE_DIR}/cmake/launcher.sh DESTINATION bin RENAME heddle)
  install(FILES ${PROJECT_SOURCE_DIR}/LICENSE ${PROJECT_SOURCE_DIR}/README.md DESTINATION share/doc/heddle)
endfunction()
