#pragma once

#include <memory>

namespace torch {
class Library;
}

namespace heddle::plan {

/// For as long as it lives, the operators of ATen that libtorch runs on shapes from Python alone do
/// so here too. One at a time.
class ShapeKernels {
 public:
  ShapeKernels();
  ~ShapeKernels();
  ShapeKernels(const ShapeKernels&) = delete;
  ShapeKernels& operator=(const ShapeKernels&) = delete;

 private:
  std::unique_ptr<torch::Library> library_;
};

}  // namespace heddle::plan
