#include "cli/bench_operators.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/errors.h"
#include "device/device.h"
#include "train/operator_benchmark.h"
#include "train/setup.h"
#include "ui/table.h"

namespace heddle::cli {
namespace {

using MakeCases = std::vector<train::CaseMaker> (*)(const train::OperatorPlace&,
                                                    const models::qwen3_5::Config&,
                                                    const train::OperatorTokens&);

std::vector<train::CaseMaker> cases_of(const OperatorBench& bench,
                                       const train::OperatorPlace& place) {
  static constexpr std::pair<const char*, MakeCases> kWorks[] = {
      {"gdn", train::gated_delta_rule_cases}, {"gemm", train::product_cases},
      {"attention", train::attention_cases},  {"head", train::head_cases},
      {"experts", train::expert_cases},
  };
  const auto* const work =
      std::find_if(std::begin(kWorks), std::end(kWorks),
                   [&](const auto& known) { return bench.work == known.first; });
  if (work == std::end(kWorks)) {
    throw_error<ConfigError>(
        "bench: expected step, gdn, gemm, attention, head or experts, found '{}'", bench.work);
  }
  if (bench.preset.empty()) {
    if (bench.work == "gdn") return train::published_gated_delta_rule_cases(place);
    throw_error<ConfigError>("bench {}: --preset is missing", bench.work);
  }
  return work->second(place, models::qwen3_5::preset(bench.preset), bench.tokens);
}

nlohmann::ordered_json as_json(const train::CaseTime& time) {
  nlohmann::ordered_json json = {{"name", time.name}, {"kernel", time.kernel}};
  for (const train::CallTime& call : time.calls) {
    json["calls"].push_back({{"name", call.name},
                             {"ms", call.ms},
                             {"tflops", call.flops_per_s * 1e-12},
                             {"gbytes_per_s", call.bytes_per_s * 1e-9},
                             {"roofline", call.roofline}});
  }
  return json;
}

}  // namespace

nlohmann::ordered_json run_operator_bench(const OperatorBench& bench,
                                          const config::RunConfig& config) {
  const runtime::Context context = train::make_context(config);
  const train::OperatorPlace place = {context.device, context.dtype,
                                      train::kernel_policy(config, context.device)};
  const std::vector<train::CaseMaker> cases = cases_of(bench, place);
  const train::Ceilings ceilings = train::measure_ceilings(place);
  nlohmann::ordered_json json;
  json["work"] = bench.work;
  json["device"] = device::properties(context.device, 16).name;
  json["product_tflops"] = ceilings.flops_per_s * 1e-12;
  json["copy_gbytes_per_s"] = ceilings.bytes_per_s * 1e-9;
  for (const train::CaseTime& time : train::time_cases(place, ceilings, cases))
    json["cases"].push_back(as_json(time));
  if (bench.check && bench.work == "gdn") {
    for (const train::DeltaErrors& errors :
         train::gated_delta_rule_errors(place, bench.tokens.length)) {
      for (const auto& [name, error] : errors.of) json["error"][errors.data][name] = error;
    }
  }
  return json;
}

std::string operator_bench_table(const nlohmann::ordered_json& result) {
  using ui::Align;
  const auto number = [](const nlohmann::ordered_json& of, const char* key) {
    return of[key].get<double>();
  };
  ui::Table table({"", "ms", "TFLOP/s", "GB/s", "roofline"},
                  {Align::kLeft, Align::kRight, Align::kRight, Align::kRight, Align::kRight});
  for (const nlohmann::ordered_json& one : result["cases"]) {
    table.section(
        fmt::format("{} ({})", one["name"].get<std::string>(), one["kernel"].get<std::string>()));
    for (const nlohmann::ordered_json& call : one["calls"]) {
      table.row({call["name"].get<std::string>(), fmt::format("{:.3f}", number(call, "ms")),
                 fmt::format("{:.3g}", number(call, "tflops")),
                 fmt::format("{:.0f}", number(call, "gbytes_per_s")),
                 fmt::format("{:.2f}", number(call, "roofline"))});
    }
  }
  std::string text = fmt::format(
      "{}: a large product {:.3g} TFLOP/s, a copy {:.0f} GB/s; roofline: share of the larger of\n"
      "least work and least bytes at these rates\n{}",
      result["device"].get<std::string>(), number(result, "product_tflops"),
      number(result, "copy_gbytes_per_s"), table.render(ui::TableStyle::kPlain));
  if (result.contains("error")) {
    text += "relative error against double:\n";
    for (const auto& [data, errors] : result["error"].items()) {
      text += data + ":";
      for (const auto& [name, error] : errors.items())
        text += fmt::format(" {} {:.1e}", name, error.get<double>());
      text += "\n";
    }
  }
  return text;
}

}  // namespace heddle::cli
