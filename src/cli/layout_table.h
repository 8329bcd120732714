#pragma once

#include <string>
#include <vector>

#include "plan/dry_run.h"
#include "plan/layout_report.h"
#include "plan/measured.h"
#include "plan/search.h"
#include "ui/table.h"

namespace heddle::cli {

/// Table of `heddle doctor --mesh`.
ui::Table layout_table(const plan::LayoutReport& report);
std::string layout_json(const plan::LayoutReport& report);

/// Table of `heddle doctor --dry-run`; activations are those of the report.
ui::Table dry_run_table(const plan::DryRunReport& dry, const plan::LayoutReport& report);
std::string dry_run_json(const plan::DryRunReport& dry);

/// Table of `heddle doctor --propose`.
ui::Table proposal_table(const plan::Search& search, const plan::Hardware& hardware,
                         std::int64_t world);
std::string proposal_json(const plan::Search& search);

/// Table of `heddle doctor --measured`.
ui::Table comparison_table(const std::vector<plan::Comparison>& comparisons);
std::string comparison_json(const std::vector<plan::Comparison>& comparisons);

}  // namespace heddle::cli
