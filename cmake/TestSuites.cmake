# Adds the suites of a GoogleTest program to ctest, one process each: a process for each test would load libtorch a thousand times.
# ctest reads this file before a run with
#   program, timeout
#   on_npu          filter of what also runs with --device=npu, as npu.<suite>; may be empty
#   list            where the program's tests are kept between runs of ctest, in PROGRAM's build folder
# A suite named SlowX, FaultX, FuzzX or GpuX carries that label, others `fast`.

cmake_policy(VERSION 3.25)

if(NOT EXISTS "${program}")
  add_test("${program}" "${program}") # not built: fails, and says so
  return()
endif()

# Puts the suites of `program` with these arguments into `suites`, and the full names of a suite's tests into `tests_of_<suite>`.
macro(read_suites kept)
  if("${program}" IS_NEWER_THAN "${kept}")
    execute_process(COMMAND "${program}" --gtest_list_tests ${ARGN} OUTPUT_FILE "${kept}" RESULT_VARIABLE status)
    if(NOT status EQUAL 0)
      file(REMOVE "${kept}")
      message(FATAL_ERROR "${program} --gtest_list_tests: ${status}")
    endif()
  endif()
  file(STRINGS "${kept}" lines)
  set(suites)
  foreach(line IN LISTS lines)
    if(line MATCHES "^([^ ]+)\\.")
      set(suite "${CMAKE_MATCH_1}")
    elseif(line MATCHES "^  ([^ ]+)")
      if(NOT suite IN_LIST suites)
        list(APPEND suites "${suite}")
        set("tests_of_${suite}")
      endif()
      string(APPEND "tests_of_${suite}" "${suite}.${CMAKE_MATCH_1}:")
    endif()
  endforeach()
endmacro()

# Seconds on two cores, of the longest. Where ctest has no times of an earlier run, as in CI, it starts these first: a long suite
# that starts last leaves the other cores without work.
set(cost_of_ParityTest 600)
set(cost_of_ReinforcementTest 580)
set(cost_of_RecipeTest 120)
set(cost_of_TwoJobsTest 110)
set(cost_of_LaunchFailureTest 100)
set(cost_of_KilledLayoutTest 95)
set(cost_of_LayoutCheckpointTest 90)
set(cost_of_RouterReplayTest 85)

read_suites("${list}")
foreach(suite IN LISTS suites)
  add_test("${suite}" "${program}" "--gtest_filter=${suite}.*")
  if(suite MATCHES "^(Slow|Fault|Fuzz|Gpu)")
    string(TOLOWER "${CMAKE_MATCH_1}" label)
    set_tests_properties("${suite}" PROPERTIES LABELS ${label} TIMEOUT 36000)
  else()
    set_tests_properties("${suite}" PROPERTIES LABELS fast TIMEOUT ${timeout})
    if(cost_of_${suite})
      set_tests_properties("${suite}" PROPERTIES COST ${cost_of_${suite}})
    endif()
  endif()
endforeach()
if(on_npu)
  read_suites("${list}.npu" "--gtest_filter=${on_npu}" --device=npu)
  foreach(suite IN LISTS suites)
    add_test("npu.${suite}" "${program}" "--gtest_filter=${tests_of_${suite}}" --device=npu)
    set_tests_properties("npu.${suite}" PROPERTIES LABELS npu TIMEOUT ${timeout})
  endforeach()
endif()
