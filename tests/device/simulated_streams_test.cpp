// Streams that are really deferred, in processes of their own: a platform starts once, with one set
// of options. What is not waited for is read as NaN.
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/isnan.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <functional>
#include <string>

#include "device/sim/simulation.h"
#include "testing/message_of.h"

namespace heddle::device::sim {
namespace {

using heddle::testing::message_of;

const c10::Device kNpu(c10::DeviceType::PrivateUse1, 0);

using c10::impl::VirtualGuardImpl;

double first(const at::Tensor& host) { return host.view({-1})[0].item<double>(); }

bool one_stream_sees_its_own_work() {
  at::Tensor x = at::full({3}, 2.0, kNpu);
  x.add_(1);
  return first((x * x).cpu()) == 9 && x.sum().item<double>() == 9;
}

bool another_stream_must_wait_for_the_event() {
  const VirtualGuardImpl device(kNpu.type());
  const c10::Stream main = device.getStream(kNpu), side = device.getNewStream(kNpu);
  const at::Tensor x = at::full({3}, 2.0, kNpu) + 1;
  const c10::StreamGuard guard(side);
  const bool is_poison = std::isnan(first((x + 0).cpu()));
  c10::Event event(kNpu.type());
  event.record(main);
  event.block(side);
  return is_poison && first((x + 0).cpu()) == 3;
}

bool an_event_covers_what_was_queued_before_it() {
  const VirtualGuardImpl device(kNpu.type());
  const c10::Stream main = device.getStream(kNpu), side = device.getNewStream(kNpu);
  const at::Tensor before = at::full({3}, 2.0, kNpu) + 1;
  c10::Event event(kNpu.type());
  event.record(main);
  const at::Tensor after = before + 1;
  event.block(side);
  const c10::StreamGuard guard(side);
  return first((before + 0).cpu()) == 3 && std::isnan(first((after + 0).cpu()));
}

bool the_host_must_wait_for_a_copy_that_does_not_block() {
  const at::Tensor x = at::full({3}, 2.0, kNpu) + 1;
  at::Tensor host = at::empty({3});
  host.copy_(x, /*non_blocking=*/true);
  const bool is_poison = std::isnan(first(host));
  VirtualGuardImpl(kNpu.type()).synchronizeDevice(0);
  return is_poison && first(host) == 3;
}

bool is_refused(const std::function<void()>& work) {
  return message_of(work).find("rule stream-order") != std::string::npos;
}

/// Work of a stream of its own reads or writes x, which the main stream has.
void touch_on_side_stream(const at::Tensor& x, bool writes, c10::Event* done = nullptr) {
  const VirtualGuardImpl device(kNpu.type());
  const c10::Stream main = device.getStream(kNpu), side = device.getNewStream(kNpu);
  c10::Event ready(kNpu.type());
  ready.record(main);
  ready.block(side);
  const c10::StreamGuard guard(side);
  if (writes) {
    x.add_(1);
  } else {
    (void)(x + 1);
  }
  if (done != nullptr) done->record(side);
}

bool nothing_is_overwritten_that_another_stream_still_uses() {
  const at::Tensor x = at::full({3}, 2.0, kNpu);
  for (const bool writes : {false, true}) {
    c10::Event done(kNpu.type());
    touch_on_side_stream(x, writes, &done);
    if (!is_refused([&] { x.add_(1); })) return false;
    done.block(VirtualGuardImpl(kNpu.type()).getStream(kNpu));
    if (is_refused([&] { x.add_(1); })) return false;
  }
  return first(x.cpu()) == 5;
}

bool nothing_is_freed_that_another_stream_still_uses() {
  const VirtualGuardImpl device(kNpu.type());
  const auto frees = [&](bool names_the_stream) {
    at::Tensor x = at::full({3}, 2.0, kNpu);
    const c10::Stream side = device.getNewStream(kNpu);
    device.synchronizeDevice(0);
    {
      const c10::StreamGuard guard(side);
      x.fill_(1);
    }
    if (names_the_stream) x.record_stream(side);
    x.reset();
    return is_refused([&] { (void)at::full({3}, 2.0, kNpu); });
  };
  return frees(false) && !frees(true);
}

bool what_is_copied_without_waiting_stays_as_it_is() {
  const VirtualGuardImpl device(kNpu.type());
  at::Tensor host = at::full({3}, 2.0).pin_memory();
  const at::Tensor x = host.to(kNpu, /*non_blocking=*/true);
  host.fill_(7);
  if (!is_refused([&] { device.synchronizeDevice(0); })) return false;
  const at::Tensor y = host.to(kNpu, /*non_blocking=*/true);
  device.synchronizeDevice(0);
  host.fill_(8);
  const at::Tensor z = host.to(kNpu);
  host.fill_(9);
  device.synchronizeDevice(0);
  return first(y.cpu()) == 7 && first(z.cpu()) == 8;
}

/// Ends the process, with 0 if `holds` does where streams are deferred.
[[noreturn]] void exit_with(bool (*holds)()) {
  start({.defers_streams = true});
  std::exit(holds() ? 0 : 1);
}

TEST(SimulatedStreamsDeathTest, ShowWhatWasWaitedForAndNoMore) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  for (bool (*holds)() : {one_stream_sees_its_own_work, another_stream_must_wait_for_the_event,
                          an_event_covers_what_was_queued_before_it,
                          the_host_must_wait_for_a_copy_that_does_not_block,
                          nothing_is_overwritten_that_another_stream_still_uses,
                          nothing_is_freed_that_another_stream_still_uses,
                          what_is_copied_without_waiting_stays_as_it_is}) {
    EXPECT_EXIT(exit_with(holds), ::testing::ExitedWithCode(0), "");
  }
}

}  // namespace
}  // namespace heddle::device::sim
