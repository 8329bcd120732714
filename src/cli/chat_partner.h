#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "cli/model_arguments.h"
#include "cli/sampling_defaults.h"
#include "data/answer/answer_parser.h"

namespace heddle::cli {

/// Who answers in a chat.
class ChatPartner {
 public:
  struct Answer {
    data::AnswerDelta message;
    bool is_cut = false;  ///< It reached the limit of its tokens.
  };
  using OnDelta = std::function<void(const data::AnswerDelta&)>;

  virtual ~ChatPartner() = default;
  /// The answer to a conversation of OpenAI's messages, told piece by piece; it ends early when
  /// `stop` becomes true. Throws DataError for a conversation that is too long.
  virtual Answer answer(const nlohmann::ordered_json& messages, const OnDelta& on_delta,
                        const std::atomic<bool>& stop) = 0;
};

struct ChatPartnerOptions {
  ModelArguments model;
  SamplingArguments sampling;
  std::vector<std::string> stop, template_arguments;
  std::int64_t max_new_tokens = 2048;
  std::int64_t context = 0;  ///< Tokens of conversation and answer; 0: by the model.
};

/// A model of this process. Throws as loading it does, and DataError without a chat template.
std::unique_ptr<ChatPartner> local_partner(const ChatPartnerOptions& options);

}  // namespace heddle::cli
