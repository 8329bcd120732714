#include "serve/openai/tokens.h"

#include "serve/openai/chat.h"

namespace heddle::serve::openai {

void answer_tokenize(Service& service, const Request& request, const Responder& responder) {
  Fields fields = Fields::parse(request.body);
  service.models.require(fields.text("model").value_or(service.facts().name));
  const bool shows_texts = fields.boolean("return_token_strs").value_or(false);
  std::vector<std::int32_t> ids;
  if (const auto text = fields.text("prompt")) {
    const bool adds_special = fields.boolean("add_special_tokens").value_or(true);
    ids = service.tokenizer->encode(*text, {.add_special_tokens = adds_special});
    fields.only("messages", nullptr, "give 'prompt' or 'messages'");
  } else {
    ids = service.tokenizer->encode(take_prompt(service, fields).text);
  }
  fields.finish();
  Json answer = {
      {"count", ids.size()}, {"max_model_len", service.facts().max_context}, {"tokens", ids}};
  answer["token_strs"] = nullptr;
  for (std::size_t i = 0; shows_texts && i < ids.size(); ++i)
    answer["token_strs"].push_back(service.tokenizer->token_of(ids[i]));
  responder.answer(200, dump(answer));
}

void answer_detokenize(Service& service, const Request& request, const Responder& responder) {
  Fields fields = Fields::parse(request.body);
  service.models.require(fields.text("model").value_or(service.facts().name));
  const std::vector<std::int32_t> ids =
      token_ids(fields.take("tokens"), "tokens", service.tokenizer->vocab_size());
  fields.finish();
  responder.answer(200, dump({{"prompt", service.tokenizer->decode(ids)}}));
}

}  // namespace heddle::serve::openai
