#pragma once

#include <ctime>
#include <memory>
#include <string>
#include <vector>

#include "serve/http/request.h"
#include "serve/http/responder.h"
#include "serve/openai/logprobs.h"
#include "serve/openai/sampling.h"
#include "serve/openai/service.h"

namespace heddle::serve::openai {

/// An answer under way: it submits generations and words what they bring, whole at the end or as
/// server-sent events. The client's disconnect ends the generations. Lives until the last of them
/// has ended; all but the start runs on the model's thread.
class Reply : public std::enable_shared_from_this<Reply> {
 public:
  Reply(Service& service, Sampling sampling, const Request& request, Responder responder,
        const std::string& id_prefix);
  virtual ~Reply();

  /// One generation for each prompt; choices count over prompts, then samples. They begin when the
  /// model's weights are there. Throws HttpError for more samples than the tenant may have.
  void start(std::vector<Generation> generations);

 protected:
  virtual const char* object_name() const = 0;
  virtual const char* chunk_name() const = 0;
  /// Choices of chunks that come before any token; maybe none.
  virtual std::vector<Json> first_pieces(std::size_t choice) = 0;
  /// Choices of chunks that a token brings, in order; maybe none.
  virtual std::vector<Json> pieces(std::size_t choice, const GeneratedToken& token) = 0;
  /// Choices of the last chunks, of which the very last has the finish reason.
  virtual std::vector<Json> last_pieces(std::size_t choice, const GeneratedSequence& answer) = 0;
  virtual Json whole(std::size_t choice, const GeneratedSequence& answer,
                     const GenerationResult& result) = 0;
  /// Object of an answer or a chunk, without choices.
  virtual Json envelope(const char* object) const;

  const Generation& generation_of(std::size_t choice) const {
    return generations_[choice / static_cast<std::size_t>(sampling_.generation.samples)];
  }
  /// The stop string that ended an answer; "" if none did.
  std::string stop_string_of(std::size_t choice, const GeneratedSequence& answer) const;
  /// vLLM's stop_reason: a stop string, a token of stop_token_ids, or null.
  Json stop_reason_of(std::size_t choice, const GeneratedSequence& answer) const;
  /// Text that an answer ends with besides: the stop string, if the client wants it.
  std::string ending_of(std::size_t choice, const GeneratedSequence& answer) const {
    return sampling_.includes_stop ? stop_string_of(choice, answer) : "";
  }

  Service& service_;
  Sampling sampling_;
  Logprobs logprobs_;

 private:
  void begin(const std::shared_ptr<const SamplerWeights>& weights);
  void on_token(std::size_t index, const GeneratedToken& token);
  void on_done(std::size_t index, GenerationResult&& result);
  void on_failed(const std::string& message, bool is_users);
  void finish();
  void begin_stream();
  void send_piece(Json choice);
  Json usage() const;

  void end_metering();

  Caller caller_;
  std::shared_ptr<Meter> meter_;    ///< Null: nobody counts.
  SamplesInFlight::Places places_;  ///< Held while its generations run.
  Responder responder_;
  std::string id_;
  std::time_t created_ = std::time(nullptr);
  std::vector<Generation> generations_;
  std::vector<std::unique_ptr<GenerationMetrics::Request>> metrics_;  ///< [generations_]
  std::vector<GenerationResult> results_;                             ///< [generations_]
  std::size_t done_ = 0;
  bool has_begun_ = false, has_failed_ = false;
};

}  // namespace heddle::serve::openai
