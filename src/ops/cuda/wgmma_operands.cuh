// Text and operands of asm statements for the instruction wgmma, for wgmma.cuh and wgmma_e4m3.cuh.
#pragma once

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define HEDDLE_WGMMA(...) asm volatile(__VA_ARGS__)
#else
#define HEDDLE_WGMMA(...)
#endif

// An asm statement has no loops: the names of the accumulators in its text, and the operands.
#define HEDDLE_NAMES_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define HEDDLE_NAMES_32 \
  HEDDLE_NAMES_16       \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define HEDDLE_NAMES_48 \
  HEDDLE_NAMES_32       \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define HEDDLE_NAMES_64 \
  HEDDLE_NAMES_48       \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define HEDDLE_NAMES_72 HEDDLE_NAMES_64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define HEDDLE_NAMES_80 \
  HEDDLE_NAMES_64       \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define HEDDLE_NAMES_96 \
  HEDDLE_NAMES_80       \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define HEDDLE_NAMES_112 \
  HEDDLE_NAMES_96        \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define HEDDLE_NAMES_128                                                                         \
  HEDDLE_NAMES_112                                                                               \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, " \
  "%127"
#define HEDDLE_ROW(d, i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define HEDDLE_ROWS_4(d, i) \
  HEDDLE_ROW(d, i), HEDDLE_ROW(d, (i) + 1), HEDDLE_ROW(d, (i) + 2), HEDDLE_ROW(d, (i) + 3)
#define HEDDLE_ROWS_8(d, i) HEDDLE_ROWS_4(d, i), HEDDLE_ROWS_4(d, (i) + 4)
#define HEDDLE_ROWS_16(d, i) HEDDLE_ROWS_8(d, i), HEDDLE_ROWS_8(d, (i) + 8)
#define HEDDLE_ROWS_12(d, i) HEDDLE_ROWS_8(d, i), HEDDLE_ROWS_4(d, (i) + 8)
#define HEDDLE_ROWS_18(d, i) HEDDLE_ROWS_16(d, i), HEDDLE_ROW(d, (i) + 16), HEDDLE_ROW(d, (i) + 17)
#define HEDDLE_ROWS_20(d, i) HEDDLE_ROWS_16(d, i), HEDDLE_ROWS_4(d, (i) + 16)
#define HEDDLE_ROWS_24(d, i) HEDDLE_ROWS_16(d, i), HEDDLE_ROWS_8(d, (i) + 16)
#define HEDDLE_ROWS_28(d, i) HEDDLE_ROWS_16(d, i), HEDDLE_ROWS_12(d, (i) + 16)
#define HEDDLE_ROWS_32(d, i) HEDDLE_ROWS_16(d, i), HEDDLE_ROWS_16(d, (i) + 16)
