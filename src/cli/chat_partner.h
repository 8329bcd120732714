#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
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

constexpr std::int64_t kUsualAnswer = 2048;  ///< Tokens of an answer at most.

struct ChatPartnerOptions {
  ModelArguments model;      ///< `directory` may be the URL of a server.
  std::string served_model;  ///< Name of the server's model; empty: the only one that it has.
  SamplingArguments sampling;
  std::vector<std::string> stop, template_arguments;
  std::optional<std::int64_t> max_new_tokens;  ///< Not given: kUsualAnswer, or the server's.
  std::int64_t context = 0;  ///< Tokens of conversation and answer; 0: by the model.
};

/// A model of this process. Throws as loading it does, and DataError without a chat template.
std::unique_ptr<ChatPartner> local_partner(const ChatPartnerOptions& options);

/// Whether a model is told by the URL of a server.
bool is_server(const std::string& model);
/// A model of an OpenAI-compatible server, which gets the key of $OPENAI_API_KEY. Throws Error
/// where it cannot be reached, ConfigError for options of model directories and for one of several
/// models that is not named. Its answers throw DataError with what the server refuses.
std::unique_ptr<ChatPartner> server_partner(const ChatPartnerOptions& options);

}  // namespace heddle::cli
