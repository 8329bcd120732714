#pragma once

#include <chrono>
#include <future>
#include <memory>
#include <optional>
#include <thread>
#include <utility>

namespace heddle::comm {

/// Runs `call` on a thread of its own and looks every `slice` whether `give_up` wants to throw; for
/// calls of a library that do not keep to a deadline. A call that is given up stays behind on its
/// thread, so it must own what it uses.
template <class Call, class GiveUp>
auto run_watched(Call call, std::chrono::milliseconds slice, GiveUp&& give_up) {
  using Result = decltype(call());
  auto made = std::make_shared<std::promise<Result>>();
  std::future<Result> future = made->get_future();
  std::thread([made, call = std::move(call)] {
    try {
      made->set_value(call());
    } catch (...) {
      made->set_exception(std::current_exception());
    }
  }).detach();
  while (future.wait_for(slice) != std::future_status::ready) give_up();
  return future.get();
}

}  // namespace heddle::comm
