#pragma once

#include <atomic>
#include <string>
#include <thread>
#include <utility>

#include <gtest/gtest.h>

#include "serve/http/server.h"

namespace heddle::serve::testing {

inline std::string error_text(int status, const std::string& message) {
  return std::to_string(status) + ": " + message;
}

/// A server that runs until the test ends.
class Http : public ::testing::Test {
 protected:
  void add(const std::string& method, const std::string& pattern, Handler handler,
           bool on_worker = false, const std::string& scope = "", bool is_public = true) {
    server_.route({method, pattern, std::move(handler), error_text, scope, is_public, on_worker});
  }
  void start() {
    port_ = server_.listen("127.0.0.1", 0);
    thread_ = std::thread([this] { server_.run(stop_, [this] { drained_ = true; }); });
  }
  void stop() {
    stop_ = true;
    if (thread_.joinable()) thread_.join();
  }
  void TearDown() override { stop(); }

  static ServerOptions options() {
    ServerOptions options;
    options.most_body_bytes = 100'000;
    options.drain_s = 3600;
    options.error_body = error_text;
    return options;
  }

  Server server_{options()};
  int port_ = 0;
  std::atomic<bool> stop_ = false;
  std::atomic<bool> drained_ = false;
  std::thread thread_;
};

inline Handler echo() {
  return [](Request&& request, const Responder& responder) {
    std::string text = request.body;
    for (const auto& [name, value] : request.parameters) text += "|" + name + "=" + value;
    for (const auto& [name, value] : request.query) text += "|" + name + "=" + value;
    responder.answer(200, text, "text/plain");
  };
}

}  // namespace heddle::serve::testing
