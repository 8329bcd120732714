#include "cli/bench_operators.h"

#include <fmt/format.h>

#include <map>

#include "assembly/from_config.h"
#include "bench/operator_benchmark.h"
#include "device/device.h"
#include "models/registry.h"
#include "ui/table.h"

namespace heddle::cli {
namespace {

using MakeCases = std::vector<bench::CaseMaker> (*)(const bench::OperatorPlace&,
                                                    const models::Config&,
                                                    const bench::OperatorTokens&);

std::vector<bench::CaseMaker> cases_of(const OperatorBench& bench, const config::RunConfig& config,
                                       const bench::OperatorPlace& place) {
  if (bench.preset.empty()) return bench::published_gated_delta_rule_cases(place, bench.published);
  const models::Config model = models::preset(bench.preset);
  if (bench.work == "lora")
    return bench::adapter_cases(place, model, bench.tokens, config.adapter.rank);
  const std::map<std::string, MakeCases> works = {
      {"gdn", bench::gated_delta_rule_cases}, {"gemm", bench::product_cases},
      {"attention", bench::attention_cases},  {"head", bench::head_cases},
      {"experts", bench::expert_cases},       {"adamw", bench::adamw_cases},
  };
  return works.at(bench.work)(place, model, bench.tokens);
}

/// Errors at the heads of the preset, or of each of --heads.
nlohmann::ordered_json errors_of(const OperatorBench& bench, const bench::OperatorPlace& place) {
  std::vector<bench::DeltaHeads> all = bench.published.heads;
  if (!bench.preset.empty()) {
    const models::Config model = models::preset(bench.preset);
    all = {bench::delta_heads(model)};
  } else if (all.empty()) {
    all = {{16, 32}};
  }
  nlohmann::ordered_json json;
  for (const bench::DeltaHeads& heads : all) {
    for (const bench::DeltaErrors& errors :
         bench::gated_delta_rule_errors(place, heads, bench.tokens.length)) {
      nlohmann::ordered_json one = {{"heads", fmt::format("{}/{}", heads.keys, heads.values)},
                                    {"head_dim", heads.dim},
                                    {"length", bench.tokens.length},
                                    {"data", errors.data},
                                    {"kernel", errors.kernel}};
      for (const auto& [name, error] : errors.of) one["error"][name] = error;
      json.push_back(one);
    }
  }
  return json;
}

nlohmann::ordered_json as_json(const bench::CaseTime& time) {
  nlohmann::ordered_json json = {{"name", time.name}, {"kernel", time.kernel}};
  for (const bench::CallTime& call : time.calls) {
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
  const runtime::Context context = assembly::make_context(config);
  const bench::OperatorPlace place = {context.device, context.dtype,
                                      assembly::kernel_policy(config)};
  nlohmann::ordered_json json;
  json["work"] = bench.work;
  json["device"] = device::properties(context.device).name;
  if (bench.check) {
    json["errors"] = errors_of(bench, place);
    return json;
  }
  const std::vector<bench::CaseMaker> cases = cases_of(bench, config, place);
  const bench::Ceilings ceilings = bench::measure_ceilings(place);
  json["product_tflops"] = ceilings.flops_per_s * 1e-12;
  json["copy_gbytes_per_s"] = ceilings.bytes_per_s * 1e-9;
  for (const bench::CaseTime& time : bench::time_cases(place, ceilings, cases))
    json["cases"].push_back(as_json(time));
  return json;
}

namespace {

std::string error_table(const nlohmann::ordered_json& result) {
  ui::Table table({"", "o", "dq", "dk", "dv", "dg", "dbeta", "dS0"}, {ui::Align::kLeft});
  std::string section;
  for (const nlohmann::ordered_json& one : result["errors"]) {
    const std::string shape =
        fmt::format("{} heads of {}, 1 x {} ({})", one["heads"].get<std::string>(),
                    one["head_dim"].get<std::int64_t>(), one["length"].get<std::int64_t>(),
                    one["kernel"].get<std::string>());
    if (shape != section) table.section(section = shape);
    std::vector<std::string> row = {one["data"].get<std::string>()};
    for (const auto& [name, error] : one["error"].items())
      row.push_back(fmt::format("{:.1e}", error.get<double>()));
    table.row(row);
  }
  return fmt::format("{}: relative error against double\n{}", result["device"].get<std::string>(),
                     table.render(ui::TableStyle::kPlain));
}

}  // namespace

std::string operator_bench_table(const nlohmann::ordered_json& result) {
  if (result.contains("errors")) return error_table(result);
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
  return fmt::format(
      "{}: a large product {:.3g} TFLOP/s, a copy {:.0f} GB/s; roofline: share of the larger of\n"
      "least work and least bytes at these rates\n{}",
      result["device"].get<std::string>(), number(result, "product_tflops"),
      number(result, "copy_gbytes_per_s"), table.render(ui::TableStyle::kPlain));
}

}  // namespace heddle::cli
