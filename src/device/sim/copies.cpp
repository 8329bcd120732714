#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <torch/library.h>

#include "device/sim/capture.h"
#include "device/sim/driver.h"
#include "device/sim/rules.h"
#include "device/sim/streams.h"

namespace heddle::device::sim {
namespace {

at::Tensor on_host(const at::Tensor& tensor) {
  return tensor.device().type() == kType ? host_view(tensor) : tensor;
}

void copy_on_host(const at::Tensor& to, const at::Tensor& from) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  to.copy_(from);
}

/// Again, in the replay of a graph.
void run_copy(const at::Tensor& to, const at::Tensor& from) {
  Streams::Work work(current_stream());
  work.reads(from);
  work.about_to_write("aten::_copy_from", to);
  copy_on_host(to, from);
  work.writes(to);
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  require_running("a copy");
  Driver& d = driver();
  // Memory that is not pinned is read before the call returns.
  const bool is_pageable = from.is_cpu() && from.dim() > 0 && !is_pinned(from);
  const bool waits = (to.is_cpu() || from.is_cpu()) && (!non_blocking || is_pageable);
  if (waits) wait("aten::_copy_from");
  if (d.is_recording) record_call("aten::_copy_from", {from, to});
  const c10::Stream stream = current_stream();
  {
    Streams::Work work(stream);
    const at::Tensor written = on_host(to), read = on_host(from);
    work.reads(read);
    work.about_to_write("aten::_copy_from", written);
    if (Capture* const capture = Capture::current()) {
      capture->keeps(written);
      capture->adds([written, read] { run_copy(written, read); });
    }
    copy_on_host(written, read);
    work.writes(written);
    if (from.is_cpu() && !waits) work.reads_host(read);
  }
  if (waits) Streams::all().publish(stream);
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, /*non_blocking=*/false);
}

at::Scalar local_scalar(const at::Tensor& self) {
  require_running("item()");
  Driver& d = driver();
  wait("aten::_local_scalar_dense");
  if (d.is_recording) record_call("aten::_local_scalar_dense", {self});
  Streams::all().publish(current_stream());
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return at::_local_scalar_dense(host_view(self));
}

}  // namespace

void install_copies() {
  static torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1,
                                __FILE__, __LINE__);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_local_scalar_dense", &local_scalar);
  // A conjugated or negated view is resolved by the copy itself; without this the two would call
  // each other without end.
  for (const auto key : {c10::DispatchKey::Conjugate, c10::DispatchKey::Negative}) {
    static std::vector<std::unique_ptr<torch::Library>> lazy;
    lazy.push_back(
        std::make_unique<torch::Library>(torch::Library::IMPL, "aten", key, __FILE__, __LINE__));
    lazy.back()->impl("_copy_from", torch::CppFunction::makeFallthrough());
  }
}

}  // namespace heddle::device::sim
