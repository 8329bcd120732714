#include <curl/curl.h>

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <utility>

#include "base/errors.h"
#include "base/quote.h"
#include "base/secret.h"
#include "base/text.h"
#include "cli/chat_partner.h"
#include "cli/template_arguments.h"

namespace heddle::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kKeyVariable = "OPENAI_API_KEY";
constexpr std::size_t kLongestLine = 16 << 20, kLongestError = 64 << 10;

/// A request to a server, whose answer is taken as it comes. A new one each time: a conversation
/// waits for its reader longer than servers keep connections.
class Exchange {
 public:
  using OnBytes = std::function<void(std::string_view)>;

  explicit Exchange(const std::string& url) : handle_(curl_easy_init()), url_(url) {
    if (handle_ == nullptr) throw_error<Error>("libcurl has no memory for a request");
    headers_ = curl_slist_append(nullptr, "Content-Type: application/json");
    if (const char* const key = std::getenv(kKeyVariable); key != nullptr && *key != 0)
      headers_ = curl_slist_append(headers_, fmt::format("Authorization: Bearer {}", key).c_str());
    set(CURLOPT_URL, url_.c_str());
    set(CURLOPT_PROTOCOLS_STR, "http,https");
    set(CURLOPT_HTTPHEADER, headers_);
    set(CURLOPT_CONNECTTIMEOUT, 20L);
    set(CURLOPT_NOSIGNAL, 1L);
    set(CURLOPT_ERRORBUFFER, error_);
    set(CURLOPT_WRITEFUNCTION, write);
    set(CURLOPT_WRITEDATA, this);
    set(CURLOPT_XFERINFOFUNCTION, is_stopped);
    set(CURLOPT_XFERINFODATA, this);
    set(CURLOPT_NOPROGRESS, 0L);
  }
  ~Exchange() {
    curl_easy_cleanup(handle_);
    curl_slist_free_all(headers_);
  }
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  /// A GET, or the POST of a body that is not empty. Ends early when `stop` becomes true, and with
  /// what `on_bytes` throws. Throws Error where no answer came, and DataError with what the server
  /// says of a request that it refuses.
  void run(const std::string& body, OnBytes on_bytes, const std::atomic<bool>& stop) {
    on_bytes_ = std::move(on_bytes);
    stop_ = &stop;
    if (!body.empty()) {
      set(CURLOPT_POSTFIELDSIZE_LARGE, static_cast<curl_off_t>(body.size()));
      set(CURLOPT_POSTFIELDS, body.data());
    }
    const CURLcode code = curl_easy_perform(handle_);
    if (failure_) std::rethrow_exception(failure_);
    if (stop) return;
    if (code != CURLE_OK) {
      throw_error<Error>("{}: {}", text::without_password(url_),
                         *error_ != 0 ? error_ : curl_easy_strerror(code));
    }
    if (status() != 200) refuse();
  }

 private:
  template <class T>
  void set(CURLoption option, T value) {
    curl_easy_setopt(handle_, option, value);
  }
  long status() const {
    long status = 0;
    curl_easy_getinfo(handle_, CURLINFO_RESPONSE_CODE, &status);
    return status;
  }
  [[noreturn]] void refuse() const {
    std::string message;
    const Json body = Json::parse(refusal_, nullptr, /*allow_exceptions=*/false);
    if (body.is_object() && body.contains("error") && body["error"].is_object())
      message = body["error"].value("message", "");
    const std::string hint =
        status() == 401 ? fmt::format("; the key is that of ${}", kKeyVariable) : std::string();
    throw_error<DataError>("{}: {} (HTTP {}){}", text::without_password(url_),
                           message.empty() ? "the server refused" : text::shown(message, 2000),
                           status(), hint);
  }

  static std::size_t write(char* bytes, std::size_t size, std::size_t count, void* to) {
    auto& self = *static_cast<Exchange*>(to);
    const std::string_view part(bytes, size * count);
    if (self.status() != 200) {
      self.refusal_ +=
          part.substr(0, kLongestError - std::min(kLongestError, self.refusal_.size()));
      return part.size();
    }
    try {
      self.on_bytes_(part);
    } catch (...) {
      self.failure_ = std::current_exception();
      return 0;
    }
    return part.size();
  }
  static int is_stopped(void* of, curl_off_t, curl_off_t, curl_off_t, curl_off_t) {
    return *static_cast<const Exchange*>(of)->stop_ ? 1 : 0;
  }

  CURL* handle_;
  curl_slist* headers_ = nullptr;
  std::string url_, refusal_;
  char error_[CURL_ERROR_SIZE] = {};
  OnBytes on_bytes_;
  const std::atomic<bool>* stop_ = nullptr;
  std::exception_ptr failure_;
};

/// Data of server-sent events, each in a line of its own as OpenAI's API has them.
class EventLines {
 public:
  using OnData = std::function<void(std::string_view)>;
  explicit EventLines(OnData on_data) : on_data_(std::move(on_data)) {}

  void push(std::string_view bytes) {
    line_ += bytes;
    std::size_t begin = 0;
    for (std::size_t end; (end = line_.find('\n', begin)) != std::string::npos; begin = end + 1)
      take(std::string_view(line_).substr(begin, end - begin));
    line_.erase(0, begin);
    if (line_.size() > kLongestLine)
      throw_error<DataError>("the server sent a line of more than {} bytes", kLongestLine);
  }

 private:
  void take(std::string_view line) {
    constexpr std::string_view kData = "data:";
    if (line.starts_with(kData)) on_data_(text::trim(line.substr(kData.size())));
  }

  OnData on_data_;
  std::string line_;
};

/// Text of a field that may be missing or null.
std::string text_of(const Json& object, const char* name) {
  const auto found = object.find(name);
  return found != object.end() && found->is_string() ? found->get<std::string>() : std::string();
}

class ServerPartner : public ChatPartner {
 public:
  explicit ServerPartner(const ChatPartnerOptions& options)
      : options_(options),
        url_(options.model.directory),
        template_variables_(template_variables(options.template_arguments)) {
    refuse_local_options();
    while (url_.ends_with('/')) url_.pop_back();
    if (url_.ends_with("/v1")) url_.resize(url_.size() - 3);
    model_ = options.served_model.empty() ? only_model() : options.served_model;
  }

  Answer answer(const Json& messages, const OnDelta& on_delta,
                const std::atomic<bool>& stop) override {
    Answer answer;
    bool is_ended = false;
    EventLines events([&](std::string_view data) {
      if (data == "[DONE]") {
        is_ended = true;
        return;
      }
      const data::AnswerDelta delta = read_event(data, answer.is_cut);
      if (delta.is_empty()) return;
      on_delta(delta);
      answer.message += delta;
    });
    Exchange(url_ + "/v1/chat/completions")
        .run(
            request_of(messages).dump(), [&](std::string_view bytes) { events.push(bytes); }, stop);
    if (!is_ended && !stop)
      throw_error<Error>("{}: the answer ended in the middle", text::without_password(url_));
    return answer;
  }

 private:
  /// Options that say how this process would load a model.
  void refuse_local_options() const {
    const ModelArguments& model = options_.model;
    const std::pair<bool, const char*> of_directories[] = {
        {!model.adapter.empty(), "--adapter"}, {!model.dtype.empty(), "--dtype"},
        {!model.device.empty(), "--device"},   {model.threads != 0, "--threads"},
        {options_.context != 0, "--context"},  {!model.layout.empty(), "kernels.*"}};
    for (const auto& [is_given, name] : of_directories) {
      if (!is_given) continue;
      throw_error<ConfigError>(
          "{} is for a model directory, and {} is a server; its models and adapters are named by "
          "--model",
          name, text::without_password(url_));
    }
  }

  std::string only_model() const {
    std::string body;
    const std::atomic<bool> stop = false;
    Exchange(url_ + "/v1/models")
        .run(
            "",
            [&](std::string_view bytes) {
              body += bytes;
              if (body.size() > kLongestLine)
                throw_error<DataError>("{}/v1/models is too long", text::without_password(url_));
            },
            stop);
    const Json list = Json::parse(body, nullptr, /*allow_exceptions=*/false);
    std::vector<std::string> names;
    if (list.is_object() && list.contains("data") && list["data"].is_array()) {
      for (const Json& entry : list["data"])
        if (entry.is_object() && !text_of(entry, "id").empty())
          names.push_back(text_of(entry, "id"));
    }
    if (names.empty()) {
      throw_error<DataError>("{}/v1/models: expected the models of an OpenAI-compatible server",
                             text::without_password(url_));
    }
    if (names.size() > 1) {
      throw_error<ConfigError>("--model: {} has the models {}: name one",
                               text::without_password(url_), text::list_some(names));
    }
    return names.front();
  }

  Json request_of(const Json& messages) {
    const SamplingArguments& sampling = options_.sampling;
    Json request = {{"model", model_}, {"messages", messages}, {"stream", true}};
    if (options_.max_new_tokens) request["max_tokens"] = *options_.max_new_tokens;
    if (sampling.temperature) request["temperature"] = *sampling.temperature;
    if (sampling.top_p) request["top_p"] = *sampling.top_p;
    if (sampling.top_k) request["top_k"] = *sampling.top_k;
    if (sampling.min_p) request["min_p"] = *sampling.min_p;
    if (!options_.stop.empty()) request["stop"] = options_.stop;
    if (!template_variables_.empty()) request["chat_template_kwargs"] = template_variables_;
    constexpr std::uint64_t kSeeds = std::uint64_t{1} << 31;
    request["seed"] = (sampling.seed + answers_++) % kSeeds;
    return request;
  }

  data::AnswerDelta read_event(std::string_view data, bool& is_cut) const {
    const Json event = Json::parse(data, nullptr, /*allow_exceptions=*/false);
    if (!event.is_object()) {
      throw_error<DataError>("{}: expected an event of OpenAI's API, found '{}'",
                             text::without_password(url_), text::shown(std::string(data), 80));
    }
    if (event.contains("error")) {
      const Json& error = event["error"];
      throw_error<DataError>(
          "{}: {}", text::without_password(url_),
          text::shown(error.is_object() ? text_of(error, "message") : error.dump(), 2000));
    }
    data::AnswerDelta delta;
    if (!event.contains("choices") || !event["choices"].is_array()) return delta;
    for (const Json& choice : event["choices"]) {
      if (!choice.is_object()) continue;
      if (text_of(choice, "finish_reason") == "length") is_cut = true;
      if (!choice.contains("delta") || !choice["delta"].is_object()) continue;
      delta.content += text_of(choice["delta"], "content");
      // Servers differ in the name.
      for (const char* name : {"reasoning_content", "reasoning"}) {
        const std::string reasoning = text_of(choice["delta"], name);
        delta.reasoning += reasoning;
        if (!reasoning.empty()) break;
      }
    }
    return delta;
  }

  ChatPartnerOptions options_;
  std::string url_, model_;
  Json template_variables_;
  std::uint64_t answers_ = 0;
};

}  // namespace

bool is_server(const std::string& model) {
  return model.starts_with("http://") || model.starts_with("https://");
}

std::unique_ptr<ChatPartner> server_partner(const ChatPartnerOptions& options) {
  return std::make_unique<ServerPartner>(options);
}

}  // namespace heddle::cli
