// Requests as the server reads them. The first byte says what follows: a body in zstd or gzip, a
// protobuf message, JSON of the training API or of the inference API, or a path. Each is read or
// refused with an HttpError or UserError.
#include <cstdlib>
#include <string>
#include <string_view>

#include "base/errors.h"
#include "serve/http/body.h"
#include "serve/http/request.h"
#include "serve/http/router.h"
#include "serve/openai/messages.h"
#include "serve/openai/sampling.h"
#include "serve/tinker/inputs.h"

namespace {

using namespace heddle::serve;

constexpr std::size_t kMostBytes = 1 << 20;

const ModelFacts& facts() {
  static const ModelFacts facts = [] {
    ModelFacts f;
    f.name = "model";
    f.vocabulary = 1000;
    f.max_context = 64;
    f.end_tokens = {1};
    return f;
  }();
  return facts;
}

void require(bool holds) {
  if (!holds) std::abort();
}

/// Work that the model is given is in its range, whatever the message was.
void check_work(const tinker::ForwardBackwardRequest& request) {
  const heddle::tenants::Work work = tinker::work_of(request, facts());
  for (const heddle::tenants::Datum& datum : work.data) {
    require(datum.tokens.size() <= 64 && datum.target_tokens.size() == datum.tokens.size());
    for (const auto* ids : {&datum.tokens, &datum.target_tokens})
      for (const std::int64_t id : *ids) require(0 <= id && id < 1000);
    for (const auto& [name, numbers] : datum.inputs) require(numbers.size() == datum.tokens.size());
  }
}

template <class Read>
void attempt(const Read& read) {
  try {
    read();
  } catch (const HttpError&) {
  } catch (const heddle::UserError&) {
    // Answered with 400 too: a conversation that no template could read.
  }
}

/// Whether it is taken or refused, no more comes out than is allowed.
void read_encoded(std::string body, std::string_view encoding) {
  attempt([&] { decode_body(body, encoding, kMostBytes); });
  require(body.size() <= kMostBytes);
}

void read_training_json(const std::string& body) {
  tinker::read_place(body, false);
  const tinker::Fields fields(body, tinker::known::kAny);
  attempt([&] {
    check_work(tinker::read_forward_backward(body, tinker::known::kForwardBackward,
                                             "forward_backward_input"));
  });
  attempt([&] {
    const Generation g = tinker::read_sample(fields, facts()).generation;
    require(!g.prompt.empty() && g.max_tokens >= 1 &&
            g.max_tokens + std::ssize(g.prompt) <= facts().max_context);
  });
  attempt([&] { tinker::read_adam(fields); });
}

void read_inference_json(std::string_view body) {
  openai::Fields fields = openai::Fields::parse(body);
  attempt([&] {
    const openai::Sampling sampling = openai::take_sampling(fields, facts(), Caller());
    openai::generation_of(sampling, {1, 2, 3}, facts(), 0);
  });
  attempt([&] {
    const heddle::data::Row row = openai::take_conversation(fields);
    openai::take_tool_choice(fields, row.tools);
  });
  fields.finish();
}

void read(unsigned char kind, std::string body) {
  switch (kind % 6) {
    case 0:
      read_encoded(std::move(body), "zstd");
      break;
    case 1:
      read_encoded(std::move(body), "gzip");
      break;
    case 2:
      tinker::read_place(body, true);
      check_work(tinker::decode_forward_backward(body));
      break;
    case 3:
      read_training_json(body);
      break;
    case 4:
      read_inference_json(body);
      break;
    default: {
      const auto decoded = percent_decoded(body, body.size() % 2 == 0);
      require(!decoded || decoded->find('\0') == std::string::npos);
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const unsigned char* data, std::size_t size) {
  if (size == 0) return 0;
  attempt([&] { read(data[0], std::string(reinterpret_cast<const char*>(data) + 1, size - 1)); });
  return 0;
}
