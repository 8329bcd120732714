#include "train/loop_state.h"

#include "base/errors.h"

namespace heddle::train {

LoopState LoopState::read(const nlohmann::ordered_json& state, const std::string& checkpoint) {
  const auto version = state.find("heddle");
  if (version == state.end() || *version != kVersion) {
    throw_error<ConfigError>(
        "{}: its state has version {}, and this program reads version {}: continue the run with "
        "the "
        "program that wrote it, or start from what it has learned with `heddle export`",
        checkpoint, version == state.end() ? "none" : version->dump(), kVersion);
  }
  LoopState loop;
  try {
    state.at("step").get_to(loop.step);
    state.at("optimizer_steps").get_to(loop.optimizer_steps);
    loop.cursor = nlohmann::json(state.at("cursor"));
    loop.first_loss = state.value("first_loss", 0.0);
    loop.last_loss = state.value("last_loss", 0.0);
    const auto best = state.find("best_eval");
    if (best != state.end() && !best->is_null()) loop.best_eval = best->get<double>();
    loop.best_metric = state.value("best_metric", std::string("loss"));
    loop.recent_norms = state.value("recent_norms", std::vector<double>());
    loop.skipped_steps = state.value("skipped_steps", std::int64_t{0});
    loop.evaluations_without_gain = state.value("evaluations_without_gain", std::int64_t{0});
  } catch (const nlohmann::json::exception& error) {
    throw_error<ConfigError>("{}: its state cannot be read: {}", checkpoint, error.what());
  }
  return loop;
}

void LoopState::write(nlohmann::ordered_json& state) const {
  state["heddle"] = kVersion;
  state["step"] = step;
  state["optimizer_steps"] = optimizer_steps;
  state["cursor"] = cursor;
  state["first_loss"] = first_loss;
  state["last_loss"] = last_loss;
  state["best_eval"] = best_eval ? nlohmann::ordered_json(*best_eval) : nlohmann::ordered_json();
  state["evaluations_without_gain"] = evaluations_without_gain;
  if (best_metric != "loss") state["best_metric"] = best_metric;
  if (!recent_norms.empty()) state["recent_norms"] = recent_norms;
  if (skipped_steps > 0) state["skipped_steps"] = skipped_steps;
}

}  // namespace heddle::train
