#include "rl/batch_bytes.h"

#include "base/errors.h"

namespace heddle::rl {
namespace {

using Value = nlohmann::json;

// Two bytes each, the lower one first.
Value numbers_as_binary(const std::vector<std::uint16_t>& numbers) {
  Value::binary_t bytes;
  for (const std::uint16_t number : numbers) {
    bytes.push_back(static_cast<std::uint8_t>(number & 0xff));
    bytes.push_back(static_cast<std::uint8_t>(number >> 8));
  }
  return bytes;
}

std::vector<std::uint16_t> as_numbers(const Value& value) {
  const Value::binary_t& bytes = value.get_binary();
  std::vector<std::uint16_t> numbers;
  for (std::size_t i = 0; i + 1 < bytes.size(); i += 2)
    numbers.push_back(static_cast<std::uint16_t>(bytes[i] | bytes[i + 1] << 8));
  return numbers;
}

// Texts are binary: those of a model may end within a character, which CBOR's texts must not.
Value value_of(const Trajectory& t) {
  Value turns = Value::array();
  for (const Turn& turn : t.turns)
    turns.push_back({as_binary(turn.completion), as_binary(turn.observation)});
  Value forks = Value::array();
  for (const Fork& fork : t.forks)
    forks.push_back({fork.prompt, fork.first, numbers_as_binary(fork.experts)});
  return {t.tokens,
          t.logprobs,
          t.versions,
          as_binary(t.text),
          t.is_truncated,
          t.reward,
          t.parts,
          t.supports,
          t.sampled,
          turns,
          numbers_as_binary(t.experts),
          forks};
}

std::vector<Turn> turns_of(const Value& value) {
  std::vector<Turn> turns;
  for (const Value& turn : value)
    turns.push_back({from_binary(turn.at(0)), from_binary(turn.at(1))});
  return turns;
}

std::vector<Fork> forks_of(const Value& value) {
  std::vector<Fork> forks;
  for (const Value& fork : value) {
    forks.push_back({.prompt = fork.at(0).get<std::vector<std::int32_t>>(),
                     .first = fork.at(1).get<std::int64_t>(),
                     .experts = as_numbers(fork.at(2))});
  }
  return forks;
}

Trajectory trajectory_of(const Value& v) {
  return {.tokens = v.at(0).get<std::vector<std::int32_t>>(),
          .logprobs = v.at(1).get<std::vector<double>>(),
          .versions = v.at(2).get<std::vector<std::int64_t>>(),
          .supports = v.at(7).get<std::vector<std::vector<std::int32_t>>>(),
          .experts = as_numbers(v.at(10)),
          .sampled = v.at(8).get<std::vector<std::uint8_t>>(),
          .turns = turns_of(v.at(9)),
          .forks = forks_of(v.at(11)),
          .text = from_binary(v.at(3)),
          .is_truncated = v.at(4).get<bool>(),
          .reward = v.at(5).get<double>(),
          .parts = v.at(6).get<std::map<std::string, double>>()};
}

/// Calls `visit` with each number, in the order in which they travel.
template <class Counts, class Visit>
void visit_numbers(Counts& c, const Visit& visit) {
  for (auto* count : {&c.tokens, &c.groups, &c.filtered, &c.failed, &c.stale, &c.filtered_tokens,
                      &c.failed_tokens, &c.stale_tokens, &c.all_right, &c.all_wrong, &c.running,
                      &c.queued, &c.capacity, &c.prefill_saved, &c.engine.draws,
                      &c.engine.recorded_draws, &c.engine.drawn_sequences, &c.engine.preempted})
    visit(*count);
  for (auto* seconds : {&c.seconds, &c.judging_s, &c.elapsed_s, &c.queue_age_s, &c.paused_s})
    visit(*seconds);
}

Value value_of(const GenerationCounts& c) {
  Value value = Value::array();
  visit_numbers(c, [&](const auto& number) { value.push_back(number); });
  return value;
}

GenerationCounts counts_of(const Value& v) {
  GenerationCounts counts;
  std::size_t i = 0;
  visit_numbers(counts, [&](auto& number) { v.at(i++).get_to(number); });
  return counts;
}

Value value_of(const Fate& f) {
  return {static_cast<int>(f.kind),
          f.dispatch.cursor,
          f.dispatch.attempt,
          f.dispatch.seed,
          f.dispatch.version,
          static_cast<int>(f.reason),
          f.tokens};
}

Fate fate_of(const Value& v) {
  return {.kind = static_cast<Fate::Kind>(v.at(0).get<int>()),
          .dispatch = {v.at(1).get<std::int64_t>(), v.at(2).get<std::int64_t>(),
                       v.at(3).get<std::uint64_t>(), v.at(4).get<std::int64_t>()},
          .reason = static_cast<Rejection>(v.at(5).get<int>()),
          .tokens = v.at(6).get<std::int64_t>()};
}

}  // namespace

Value to_json(const GenerationCounts& counts) { return value_of(counts); }

GenerationCounts counts_from_json(const Value& value) {
  return value.size() == value_of(GenerationCounts()).size() ? counts_of(value)
                                                             : GenerationCounts();
}

Value as_binary(const std::string& bytes) { return Value::binary({bytes.begin(), bytes.end()}); }

std::string from_binary(const Value& value) {
  const Value::binary_t& bytes = value.get_binary();
  return {bytes.begin(), bytes.end()};
}

std::string packed(const Value& message) {
  std::string bytes;
  Value::to_cbor(message, bytes);
  return bytes;
}

Value unpacked(const std::string& bytes) {
  try {
    return Value::from_cbor(bytes);
  } catch (const Value::exception& error) {
    throw_error<CommError>("a message to the rollouts cannot be read: {}", error.what());
  }
}

std::string to_bytes(const Batch& batch) {
  Value groups = Value::array(), fates = Value::array();
  for (const Group& group : batch.groups) {
    Value trajectories = Value::array();
    for (const Trajectory& trajectory : group.trajectories)
      trajectories.push_back(value_of(trajectory));
    const Value opening = group.opening
                              ? Value{group.opening->tokens, as_binary(group.opening->text)}
                              : Value(nullptr);
    groups.push_back({group.cursor, group.attempt, group.row, trajectories, opening});
  }
  for (const Fate& fate : batch.fates) fates.push_back(value_of(fate));
  return packed({groups, value_of(batch.counts), fates, batch.state});
}

Batch batch_from_bytes(const std::string& bytes) {
  try {
    const Value value = Value::from_cbor(bytes);
    Batch batch;
    for (const Value& entry : value.at(0)) {
      Group group{.cursor = entry.at(0).get<std::int64_t>(),
                  .attempt = entry.at(1).get<std::int64_t>(),
                  .row = entry.at(2).get<std::int64_t>()};
      for (const Value& trajectory : entry.at(3))
        group.trajectories.push_back(trajectory_of(trajectory));
      if (const Value& opening = entry.at(4); !opening.is_null()) {
        group.opening = {.tokens = opening.at(0).get<std::vector<std::int32_t>>(),
                         .text = from_binary(opening.at(1))};
      }
      batch.groups.push_back(std::move(group));
    }
    batch.counts = counts_of(value.at(1));
    for (const Value& fate : value.at(2)) batch.fates.push_back(fate_of(fate));
    batch.state = value.at(3);
    return batch;
  } catch (const Value::exception& error) {
    throw_error<CommError>("a batch of groups cannot be read: {}", error.what());
  }
}

}  // namespace heddle::rl
