#pragma once

#include <atomic>
#include <filesystem>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "client.h"
#include "recording_backend.h"
#include "serve/admin/admin.h"
#include "serve/quotas.h"
#include "serve/store/keys.h"
#include "serve/tinker/service.h"
#include "testing/temporary_directory.h"

namespace heddle::serve::testing {

using nlohmann::json;

/// A server over a recording model; may be started again over the same data.
class Served {
 public:
  explicit Served(const std::filesystem::path& path, tinker::ServiceOptions options = quick(),
                  Limits limits = {.max_runs = 3}, const ServerOptions& of_server = {})
      : data_(path), keys_(data_.database()), limits_(limits), server_(of_server) {
    data_.lock();
    const auto identify = [this](const Request& request) {
      if (keys_.is_empty()) return Caller{"local", "", {"train", "sample", "admin"}, limits_};
      const auto owner = keys_.owner(std::string(request.header("x-api-key")), limits_);
      if (!owner) throw HttpError(401, "no such key");
      return *owner;
    };
    server_.authenticate_by(identify);
    server_.meter_by(
        [this](const Caller& caller, Cost cost) { return quotas_.admit(caller, cost); });
    auto backend = std::make_unique<RecordingBackend>();
    backend_ = backend.get();
    model_ = std::make_unique<ModelThread>(std::move(backend));
    service_ = std::make_unique<tinker::Service>(server_, *model_, data_, options);
    service_->serve();
    admin_ = std::make_unique<admin::Admin>(
        server_,
        admin::Sources{*model_, *service_, data_, keys_, quotas_,
                       [] { return std::vector<std::string>{"adapter"}; }},
        identify);
    admin_->serve();
    port_ = server_.listen("127.0.0.1", 0);
    thread_ = std::thread([this] { server_.run(stop_, [this] { service_->drain(); }); });
  }
  ~Served() {
    stop_ = true;
    thread_.join();
    model_.reset();
  }

  static tinker::ServiceOptions quick() {
    tinker::ServiceOptions options;
    options.promises.poll_s = 0.2;
    return options;
  }

  int port() const { return port_; }
  Keys& keys() { return keys_; }
  RecordingBackend& backend() const { return *backend_; }
  std::int64_t rows_scanned() {
    return on_loop([this] { return data_.database().rows_scanned(); });
  }
  /// The database takes so many pages more.
  void leave_room(int pages) {
    on_loop([&] {
      Statement now(data_.database(), "PRAGMA page_count");
      now.step();
      const std::int64_t most = now.integer(0) + pages;
      data_.database().execute(("PRAGMA max_page_count=" + std::to_string(most)).c_str());
      return true;
    });
  }
  /// Uses up what room is left.
  void fill() {
    on_loop([&] {
      data_.database().execute("CREATE TABLE IF NOT EXISTS filler(bytes BLOB)");
      for (int bytes = 4000; bytes > 0; bytes -= 500) {
        try {
          for (int i = 0; i < 100; ++i)
            data_.database().execute(
                ("INSERT INTO filler VALUES (zeroblob(" + std::to_string(bytes) + "))").c_str());
        } catch (const FileError&) {
        }
      }
      return true;
    });
  }
  /// Keeps the loop from its work while `work` sends requests, which come in one turn then.
  void in_one_turn(const std::function<void()>& work) {
    std::promise<void> waits, sent;
    server_.post([&] {
      waits.set_value();
      sent.get_future().wait();
    });
    waits.get_future().wait();
    work();
    sent.set_value();
  }
  std::uint64_t seed_of(const std::string& run) {
    return on_loop([&] {
      Statement row(data_.database(), "SELECT options FROM run WHERE id = ?");
      return row.bind(run).step() ? json::parse(row.text(0)).at("seed").get<std::uint64_t>() : 0;
    });
  }

 private:
  DataDirectory data_;
  Keys keys_;
  Limits limits_;
  Quotas quotas_;
  Server server_;
  RecordingBackend* backend_;
  std::unique_ptr<ModelThread> model_;
  std::unique_ptr<tinker::Service> service_;
  std::unique_ptr<admin::Admin> admin_;
  std::atomic<bool> stop_ = false;
  int port_ = 0;
  std::thread thread_;

  template <class Work>
  auto on_loop(const Work& work) -> decltype(work()) {
    std::promise<decltype(work())> found;
    server_.post([&] { found.set_value(work()); });
    return found.get_future().get();
  }
};

/// One client of it.
class ApiClient {
 public:
  explicit ApiClient(int port, std::string key = "", std::string accept = "application/x-protobuf")
      : client_(port), key_(std::move(key)), accept_(std::move(accept)) {}

  std::string raw(const std::string& method, const std::string& path, const std::string& body,
                  const std::string& type = "application/json") {
    return client_.ask(method, "/api/v1/" + path, body, headers(type));
  }
  json post(const std::string& path, const json& body) {
    return read(raw("POST", path, body.dump()));
  }
  /// post() in two parts: returns when the request has arrived, and its answer later.
  void begin_post(const std::string& path, const json& body) const {
    client_.request("POST", "/api/v1/" + path, body.dump(), headers("application/json"));
    client_.await_arrival();
  }
  json end_post() { return read(client_.answer()); }
  json get(const std::string& path) {
    const std::string answer = raw("GET", path, "");
    status = status_of(answer);
    return json::parse(body_of(answer));
  }
  /// The outcome of a promise.
  json wait(const json& promise) {
    while (true) {
      const json answer = post("retrieve_future", {{"request_id", promise.at("request_id")}});
      if (!answer.is_object() || answer.value("type", "") != "try_again") return answer;
    }
  }
  std::string session() {
    return post("create_session", {{"tags", json::array()}, {"sdk_version", "0.38.0"}})
        .at("session_id");
  }
  json create_model(const std::string& session, int number = 0, int rank = 8) {
    return post("create_model", {{"session_id", session},
                                 {"model_seq_id", number},
                                 {"base_model", "base"},
                                 {"lora_config", {{"rank", rank}, {"seed", 1}}}});
  }
  static json work(const std::string& run, int seq, std::vector<int> tokens) {
    return {
        {"model_id", run},
        {"seq_id", seq},
        {"forward_backward_input",
         {{"loss_fn", "cross_entropy"},
          {"data",
           {{{"model_input", {{"chunks", {{{"type", "encoded_text"}, {"tokens", tokens}}}}}},
             {"loss_fn_inputs", {{"target_tokens", {{"data", tokens}, {"dtype", "int64"}}}}}}}}}}};
  }
  static json step(const std::string& run, int seq) {
    return {{"model_id", run}, {"seq_id", seq}, {"adam_params", {{"learning_rate", 0.5}}}};
  }

  int status = 0;

 private:
  std::string headers(const std::string& type) const {
    const std::string key = key_.empty() ? "" : "X-API-Key: " + key_ + "\r\n";
    return key + "Content-Type: " + type + "\r\nAccept: " + accept_ + "\r\n";
  }
  json read(const std::string& answer) {
    status = status_of(answer);
    const std::string text = body_of(answer);
    return json::accept(text) ? json::parse(text) : json(text);
  }

  Client client_;
  std::string key_, accept_;
};

/// A server in a folder of its own with one client, who has a session and a run in it.
struct OneRun : public ::testing::Test {
  explicit OneRun(const tinker::ServiceOptions& options = Served::quick())
      : served(folder.path(), options) {}

  heddle::testing::TemporaryDirectory folder;
  Served served;
  ApiClient caller{served.port()};
  std::string session = caller.session();
  std::string run = caller.create_model(session).at("model_id");
};

/// The number that the run's weights are after its steps.
inline double weights_after(ApiClient& caller, const std::vector<json>& requests) {
  std::vector<json> promises;
  double norm = 0;
  for (const json& request : requests) {
    const bool is_step = request.contains("adam_params");
    promises.push_back(caller.post(is_step ? "optim_step" : "forward_backward", request));
    EXPECT_EQ(caller.status, 200) << promises.back();
  }
  for (std::size_t i = 0; i < requests.size(); ++i) {
    const json outcome = caller.wait(promises[i]);
    if (outcome.is_object() && outcome.contains("metrics"))
      norm = outcome["metrics"]["grad_norm:mean"];
  }
  return norm;
}

}  // namespace heddle::serve::testing
