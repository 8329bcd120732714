#pragma once

#include <memory>
#include <string>

#include "data/answer/answer_format.h"
#include "data/rendering/renderer.h"
#include "data/tokenizer/tokenizer.h"
#include "serve/metrics/generation_metrics.h"
#include "serve/model/model_thread.h"
#include "serve/openai/models.h"
#include "serve/samples_in_flight.h"

namespace heddle::serve::openai {

/// State that the handlers of the API share.
struct Service {
  ModelThread& model;
  std::shared_ptr<const data::Tokenizer> tokenizer;
  data::Renderer renderer;
  Models models;
  GenerationMetrics metrics;
  std::shared_ptr<SamplesInFlight> samples = std::make_shared<SamplesInFlight>();

  const ModelFacts& facts() const { return model.facts(); }
  /// Form that the template with or without tools lets the model write.
  data::AnswerFormat answer_format(bool has_tools) const;
};

/// `count` random letters and digits, which no other answer will have.
std::string random_name(std::size_t count);

}  // namespace heddle::serve::openai
