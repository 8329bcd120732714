#pragma once

#include <string>
#include <vector>

#include "bench/operator_cases.h"

namespace heddle::bench {

/// Rates that the device reaches in one large product and one large copy: the roofline's limits.
struct Ceilings {
  double flops_per_s = 0, bytes_per_s = 0;
};
Ceilings measure_ceilings(const OperatorPlace& place);

struct CallTime {
  std::string name;
  double ms = 0;                            ///< Median of 7 trials of several calls each.
  double flops_per_s = 0, bytes_per_s = 0;  ///< Rates of the least work and bytes.
  double roofline = 0;                      ///< Share of the ceiling that binds it.
};
struct CaseTime {
  std::string name, kernel;
  std::vector<CallTime> calls;
};

/// Times one case after the other; `device` stays synchronised between trials.
std::vector<CaseTime> time_cases(const OperatorPlace& place, const Ceilings& ceilings,
                                 const std::vector<CaseMaker>& cases);

}  // namespace heddle::bench
