#include "cli/layout_table.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/text.h"

namespace heddle::cli {
namespace {

using ui::Align;

constexpr const char* kEightBitExperts = "; frozen experts in 8-bit floats";

std::string bytes(double value) { return text::format_bytes(value); }
std::string milliseconds(double seconds) { return fmt::format("{:.1f} ms", 1e3 * seconds); }
std::string percent(double share) { return fmt::format("{:+.1f} %", 100 * share); }

std::string dimensions(const plan::Traffic& row) {
  std::vector<std::string> names;
  for (const comm::Dim dim : row.over) names.emplace_back(comm::name(dim));
  return text::join(names, " x ");
}

void add_time(ui::Table& table, const plan::LayoutReport& report) {
  const plan::StepTime& time = *report.time;
  table.section(fmt::format("{} on {}, predicted: {}, {} tokens/s",
                            report.has_policy ? "the update of a step, at full length," : "a step",
                            report.hardware->name, milliseconds(time.total),
                            text::format_count(report.tokens_per_step / time.total)));
  const auto row = [&](const char* what, double seconds) {
    if (seconds > 0) table.row({"", milliseconds(seconds), "", "", "", "", "", what});
  };
  row("matrix products, head included", time.products);
  row("attention", time.attention);
  row("gated delta rule", time.delta_rule);
  row("elementwise kernels, copies", time.elementwise);
  row("gradient norm and optimizer", time.optimizer);
  row("between kernels", time.idle);
  row("communication that nothing hides", time.communication());
  row("waiting for other stages", time.waiting);
}

/// Memory of reinforcement learning besides an update's.
void add_policy(ui::Table& table, const plan::LayoutReport& report) {
  if (report.rollout) {
    const plan::RolloutMemory& m = *report.rollout;
    table.section("memory of a rank that only generates, estimated, all sequences at full length");
    table.row({"", bytes(m.weights), "", "", "", "", "", "weights"});
    table.row({"", bytes(m.caches), "", "", "", "", "", "states, keys and values"});
  }
  for (const plan::LayoutStage& stage : report.stages) {
    const plan::Memory& m = stage.memory;
    if (m.others == 0 && m.generating == 0) continue;
    table.section(
        fmt::format("of which, on stage {}, with all sequences at full length", stage.stage_rank));
    if (m.others > 0)
      table.row({"", bytes(m.others), "", "", "", "", "", "critic, and copy of the reference"});
    if (m.generating == 0) continue;
    table.row({"", bytes(m.caches), "", "", "", "", "", "states, keys and values of generation"});
    if (m.merged > 0)
      table.row({"", bytes(m.merged), "", "", "", "", "", "matrices with their adapters in them"});
    if (m.pinned > 0)
      table.row({"", bytes(m.pinned), "", "", "", "", "", "adapters that completions began with"});
    table.row(
        {"", bytes(m.generating), "", "", "", "", "", "all that is there while it generates"});
  }
}

}  // namespace

ui::Table layout_table(const plan::LayoutReport& report) {
  ui::Table table({}, {Align::kLeft, Align::kRight, Align::kRight, Align::kRight, Align::kRight,
                       Align::kRight, Align::kRight, Align::kLeft});
  table.section("mesh: " + report.mesh);
  table.row({"", "ranks", "groups", "", "", "", "", "group of rank 0"});
  for (const plan::LayoutGroup& group : report.groups) {
    std::vector<std::string> ranks;
    for (std::size_t i = 0; i < group.of_rank0.size() && i < 8; ++i)
      ranks.push_back(std::to_string(group.of_rank0[i]));
    if (group.of_rank0.size() > 8) ranks.push_back("...");
    table.row({group.dimension, std::to_string(group.size), std::to_string(group.count), "", "", "",
               "", text::join(ranks, " ")});
  }
  for (const std::string& sentence : report.idle) table.section("warning: " + sentence);
  table.section(fmt::format("a rank receives per step of {} tokens, {} micro-batches",
                            text::format_count(report.tokens_per_step), report.micro_batches));
  if (report.time) table.row({"", "bytes", "not hidden", "", "", "", "", ""});
  for (std::size_t i = 0; i < report.traffic.size(); ++i) {
    const plan::Traffic& row = report.traffic[i];
    table.row({dimensions(row), bytes(row.bytes),
               report.time ? milliseconds(report.time->exposed[i]) : "", "", "", "", "", row.what});
  }
  std::string estimated = "memory of a rank, estimated";
  if (report.is_recompute_auto)
    estimated += fmt::format("; train.recompute: auto taken as {} in every layer",
                             config::to_string(report.recompute));
  if (report.has_eight_bit_experts) estimated += kEightBitExperts;
  table.section(estimated);
  table.row(
      {"stage", "weights", "gradients", "optimizer", "activations", "working", "peak", "layers"});
  for (const plan::LayoutStage& stage : report.stages) {
    const plan::Memory& m = stage.memory;
    table.row({std::to_string(stage.stage_rank), bytes(m.weights), bytes(m.gradients),
               bytes(m.optimizer), bytes(m.activations), bytes(m.working), bytes(m.peak),
               stage.layers});
  }
  if (report.gathered_keys > 0) {
    table.row({"", bytes(report.gathered_keys), "", "", "", "", "",
               "keys and values of all tokens, in one attention layer"});
  }
  if (report.has_policy) add_policy(table, report);
  if (report.time) add_time(table, report);
  if (report.schedule.empty()) return table;
  table.section(fmt::format("pipeline: {:.0f} % of the time waiting; forward 0-9, backward a-z",
                            100 * report.bubble));
  for (const std::string& line : report.schedule) table.row({"", "", "", "", "", "", "", line});
  return table;
}

std::string layout_json(const plan::LayoutReport& report) {
  nlohmann::ordered_json json = {{"mesh", report.mesh},
                                 {"tokens_per_step", report.tokens_per_step},
                                 {"micro_batches", report.micro_batches},
                                 {"recompute", config::to_string(report.recompute)},
                                 {"eight_bit_experts", report.has_eight_bit_experts},
                                 {"bubble", report.bubble},
                                 {"schedule", report.schedule},
                                 {"idle", report.idle}};
  for (const plan::LayoutGroup& g : report.groups) {
    json["groups"].push_back({{"dimension", g.dimension},
                              {"size", g.size},
                              {"count", g.count},
                              {"of_rank0", g.of_rank0}});
  }
  for (std::size_t i = 0; i < report.traffic.size(); ++i) {
    const plan::Traffic& t = report.traffic[i];
    json["received_bytes"].push_back(
        {{"dimension", dimensions(t)}, {"what", t.what}, {"bytes", t.bytes}});
    if (report.time) json["received_bytes"].back()["exposed_s"] = report.time->exposed[i];
  }
  if (report.gathered_keys > 0) json["gathered_keys_bytes"] = report.gathered_keys;
  for (const plan::LayoutStage& stage : report.stages) {
    const plan::Memory& m = stage.memory;
    json["memory_bytes"].push_back({{"stage_rank", stage.stage_rank},
                                    {"layers", stage.layers},
                                    {"weights", m.weights},
                                    {"gradients", m.gradients},
                                    {"optimizer", m.optimizer},
                                    {"activations", m.activations},
                                    {"working", m.working},
                                    {"peak", m.peak}});
    if (!report.has_policy) continue;
    json["memory_bytes"].back()["critic_and_reference"] = m.others;
    json["memory_bytes"].back()["caches"] = m.caches;
    json["memory_bytes"].back()["merged"] = m.merged;
    json["memory_bytes"].back()["pinned"] = m.pinned;
    json["memory_bytes"].back()["generating"] = m.generating;
  }
  if (report.rollout) {
    json["rollout_memory_bytes"] = {{"weights", report.rollout->weights},
                                    {"caches", report.rollout->caches}};
  }
  if (report.time) {
    const plan::StepTime& t = *report.time;
    json["time_s"] = {{"hardware", report.hardware->name},
                      {"step", t.total},
                      {"products", t.products},
                      {"attention", t.attention},
                      {"gated_delta_rule", t.delta_rule},
                      {"elementwise", t.elementwise},
                      {"optimizer", t.optimizer},
                      {"idle", t.idle},
                      {"communication", t.communication()},
                      {"waiting", t.waiting}};
  }
  return json.dump(2);
}

ui::Table dry_run_table(const plan::DryRunReport& dry, const plan::LayoutReport& report) {
  ui::Table table({}, {Align::kLeft, Align::kRight, Align::kRight, Align::kRight, Align::kRight,
                       Align::kRight, Align::kRight, Align::kRight, Align::kLeft});
  table.section("mesh: " + dry.mesh);
  table.section(
      fmt::format("model objects of {} ranks, without storage: {} parameters in {} slices, each "
                  "owned by one rank",
                  dry.ranks, text::format_count(dry.elements),
                  text::format_count(static_cast<double>(dry.boxes))) +
      (dry.has_eight_bit_experts ? kEightBitExperts : ""));
  table.row({"stage", "owned", "weights", "gathered", "gradients", "optimizer", "activations",
             "working", "blocks run"});
  for (std::size_t i = 0; i < dry.stages.size(); ++i) {
    const plan::DryRank& rank = dry.stages[i];
    const plan::Memory& estimate = report.stages[i].memory;
    table.row({std::to_string(rank.stage_rank), bytes(rank.owned), bytes(rank.resident),
               bytes(rank.gathered), bytes(rank.gradients), bytes(rank.optimizer),
               bytes(estimate.activations), bytes(estimate.working),
               fmt::format("{}{}{}", rank.ran_embedding ? "embedding, " : "", rank.blocks,
                           rank.ran_head ? ", head" : "")});
  }
  return table;
}

std::string dry_run_json(const plan::DryRunReport& dry) {
  nlohmann::ordered_json json = {{"mesh", dry.mesh},
                                 {"ranks", dry.ranks},
                                 {"elements", dry.elements},
                                 {"slices", dry.boxes},
                                 {"eight_bit_experts", dry.has_eight_bit_experts}};
  for (const plan::DryRank& rank : dry.stages) {
    json["stages"].push_back({{"rank", rank.rank},
                              {"stage_rank", rank.stage_rank},
                              {"parameters", rank.parameters},
                              {"owned_bytes", rank.owned},
                              {"weight_bytes", rank.resident},
                              {"gathered_bytes", rank.gathered},
                              {"gradient_bytes", rank.gradients},
                              {"optimizer_bytes", rank.optimizer},
                              {"blocks_run", rank.blocks},
                              {"embedding_run", rank.ran_embedding},
                              {"head_run", rank.ran_head}});
  }
  return json.dump(2);
}

namespace {

std::string note_of(const std::vector<plan::Proposal>& proposals) {
  const bool has_any = std::ranges::any_of(
      proposals, [](const plan::Proposal& p) { return p.has_eight_bit_experts; });
  return has_any ? kEightBitExperts : "";
}

}  // namespace

ui::Table proposal_table(const plan::Search& search, const plan::Hardware& hardware,
                         std::int64_t world) {
  ui::Table table({}, {Align::kRight, Align::kRight, Align::kRight, Align::kRight, Align::kRight,
                       Align::kRight, Align::kRight, Align::kLeft});
  const bool has_any = !search.best.empty();
  table.section(fmt::format(
      "{} layouts of {} ranks on {}{}", search.considered, world, hardware.name,
      has_any ? "; those that fit, the fastest first" : ": none fits; that which lacks least"));
  table.section(
      fmt::format("assumed: {} GPUs of {:.0f} GiB a host, {:.0f} GB/s between them, "
                  "{:.0f} GB/s a GPU to other hosts{}",
                  hardware.gpus_per_host, hardware.memory_gib, hardware.host_link_gbs,
                  hardware.network_gbs, note_of(has_any ? search.best : search.smallest)));
  table.row(
      {"step", "tokens/s", "each GPU", "MFU", "peak memory", "not hidden", "waiting", "settings"});
  const auto add = [&](const plan::Proposal& p) {
    table.row({milliseconds(p.time.total), text::format_count(p.tokens_per_s),
               text::format_count(p.tokens_per_s / static_cast<double>(world)),
               fmt::format("{:.1f} %", 100 * p.mfu), bytes(p.peak_bytes),
               milliseconds(p.time.communication()), milliseconds(p.time.waiting),
               text::join(p.settings, " ")});
  };
  for (const plan::Proposal& p : has_any ? search.best : search.smallest) add(p);
  if (has_any) return table;
  table.section(search.otherwise.empty()
                    ? "nor does any with optim.state_dtype=int8, offload or LoRA: take more GPUs, "
                      "or a smaller data.max_length"
                    : "but these fit" + note_of(search.otherwise));
  for (const plan::Proposal& p : search.otherwise) add(p);
  return table;
}

std::string proposal_json(const plan::Search& search) {
  const auto list = [](const std::vector<plan::Proposal>& proposals) {
    nlohmann::ordered_json all = nlohmann::ordered_json::array();
    for (const plan::Proposal& p : proposals) {
      all.push_back({{"settings", p.settings},
                     {"step_s", p.time.total},
                     {"tokens_per_s", p.tokens_per_s},
                     {"mfu", p.mfu},
                     {"peak_bytes", p.peak_bytes},
                     {"eight_bit_experts", p.has_eight_bit_experts}});
    }
    return all;
  };
  nlohmann::ordered_json json = {{"considered", search.considered},
                                 {"proposals", list(search.best)}};
  if (search.best.empty()) json["otherwise"] = list(search.otherwise);
  return json.dump(2);
}

ui::Table comparison_table(const std::vector<plan::Comparison>& comparisons) {
  ui::Table table({}, {Align::kLeft, Align::kRight, Align::kRight, Align::kRight, Align::kRight,
                       Align::kRight, Align::kRight});
  table.section("step time and peak memory of a rank");
  table.row({"run", "measured", "predicted", "error", "measured", "predicted", "error"});
  double worst_time = 0, worst_memory = 0;
  for (const plan::Comparison& c : comparisons) {
    worst_time = std::max(worst_time, std::abs(c.time_error()));
    worst_memory = std::max(worst_memory, std::abs(c.memory_error()));
    const bool has_memory = c.measured_bytes > 0;
    table.row({c.name, milliseconds(c.measured_s), milliseconds(c.predicted_s),
               percent(c.time_error()), has_memory ? bytes(c.measured_bytes) : "",
               bytes(c.predicted_bytes), has_memory ? percent(c.memory_error()) : ""});
  }
  table.section(fmt::format("largest error: time {:.1f} %, memory {:.1f} %", 100 * worst_time,
                            100 * worst_memory));
  return table;
}

std::string comparison_json(const std::vector<plan::Comparison>& comparisons) {
  nlohmann::ordered_json json = nlohmann::ordered_json::array();
  for (const plan::Comparison& c : comparisons) {
    json.push_back({{"run", c.name},
                    {"measured_s", c.measured_s},
                    {"predicted_s", c.predicted_s},
                    {"predicted_bytes", c.predicted_bytes}});
    if (c.measured_bytes > 0) json.back()["measured_bytes"] = c.measured_bytes;
  }
  return nlohmann::ordered_json({{"runs", json}}).dump(2);
}

}  // namespace heddle::cli
