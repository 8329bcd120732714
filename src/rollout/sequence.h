#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "rollout/cache_pool.h"
#include "rollout/logit_changes.h"
#include "rollout/request.h"
#include "rollout/text_stream.h"

namespace heddle::rollout {

using RequestId = std::int64_t;

/// One answer under way.
struct Sequence {
  RequestId id;
  RequestId group;  ///< The id of its request's first sample.
  std::shared_ptr<const Request> request;
  TextStream text;
  LogitChanges changes;
  std::vector<std::int32_t> tokens;  ///< Prompt and output.
  std::uint64_t seed = 0;
  Completion completion = {};
  std::shared_ptr<const Adapter> adapter = {};  ///< Null: it has not started.
  Holding held = {};                            ///< Nothing while it waits.
  /// If asked for, the experts of the tokens that were read, as Completion::experts. What is read
  /// again, after an interruption or an update, keeps those that the first reading chose: the
  /// log-probability of the token after it came from these.
  std::vector<std::uint16_t> experts = {};
  using Clock = std::chrono::steady_clock;
  Clock::time_point arrived = Clock::now(), started = {};
  std::int64_t last_pass = 0;
  bool follows = false;  ///< Waits in its slot for the prompt that its group's leader reads.

  std::int64_t prompt_size() const { return static_cast<std::int64_t>(request->prompt.size()); }
  std::int64_t output_size() const {
    return static_cast<std::int64_t>(completion.output_ids.size());
  }
  std::int64_t pending() const { return static_cast<std::int64_t>(tokens.size()) - held.tokens; }
  /// It reads tokens that it did not just draw.
  bool is_prompt() const { return held.tokens == 0 || pending() > 1 || !draws(); }
  /// False: its prompt alone is read.
  bool draws() const { return request->max_new_tokens > 0; }
  /// Where reading stops so that others can go on from there: all of the prompt but the token from
  /// which the first one is drawn. 0: it does not.
  std::int64_t shared_tokens() const {
    const bool is_shared = request->samples > 1 || request->keep_state;
    return is_shared && draws() && output_size() == 0 ? prompt_size() - 1 : 0;
  }
  /// Takes the experts of first tokens, which another sequence read; its own stay.
  void take_experts(const std::vector<std::uint16_t>& others) {
    if (!request->return_experts || others.size() <= experts.size()) return;
    experts.insert(experts.end(), others.begin() + static_cast<std::ptrdiff_t>(experts.size()),
                   others.end());
  }
  /// See Request::conversation.
  std::int64_t conversation() const {
    return request->conversation < 0 ? -1 : request->conversation + completion.sample;
  }
  double seconds_since(Clock::time_point then) const {
    return std::chrono::duration<double>(Clock::now() - then).count();
  }
  bool wants_prompt_logprobs() const {
    return request->prompt_logprobs && id == group &&
           static_cast<std::int64_t>(completion.prompt_logprobs.size()) < prompt_size();
  }
};

/// Tokens of one sequence in a pass.
struct Part {
  Sequence* sequence;
  std::int64_t count;
  std::int64_t first_row = 0;  ///< In its data rank's pass.

  std::int64_t last_row() const { return first_row + count - 1; }
};

}  // namespace heddle::rollout
