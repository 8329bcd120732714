#include "ckpt/tensor_io.h"

#include <malloc.h>

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <functional>
#include <limits>

#include "ckpt/checked_tensor.h"
#include "fixtures.h"
#include "testing/temporary_directory.h"

namespace heddle::ckpt {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::is_identical;
using testing::message_of;
using testing::random_tensor;

class TensorIo : public ::testing::Test {
 protected:
  const StoredTensor& store(const at::Tensor& tensor) {
    // An odd name length and a leading byte tensor leave the data unaligned to its element size.
    write_tensors(dir_ / "t.safetensors", {{"x", tensor}});
    file_ = std::make_unique<SafetensorsFile>(dir_ / "t.safetensors");
    return file_->at("x");
  }
  heddle::testing::TemporaryDirectory dir_;
  std::unique_ptr<SafetensorsFile> file_;
};

TEST_F(TensorIo, RoundTripsEveryFloatTypeIntoEveryOther) {
  const std::vector<at::ScalarType> types = {at::kDouble, at::kFloat, at::kBFloat16, at::kHalf};
  for (const at::ScalarType stored : types) {
    const at::Tensor x = random_tensor("x", {29, 7}, stored);
    const StoredTensor& on_disk = store(x);
    EXPECT_TRUE(is_identical(read_tensor(on_disk), x));
    for (const at::ScalarType wanted : types) {
      EXPECT_TRUE(is_identical(read_tensor(on_disk, wanted), x.to(wanted)))
          << stored << " -> " << wanted;
    }
  }
}

TEST_F(TensorIo, ReadsUnalignedData) {
  const std::string header =
      R"({"b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"x":{"dtype":"F64","shape":[3],"data_offsets":[1,25]}})";
  std::string bytes = testing::raw_safetensors(header, 1);
  const std::array<double, 3> values = {1.5, -2.25, 1e300};
  bytes.append(reinterpret_cast<const char*>(values.data()), sizeof values);
  files::write_atomically(dir_ / "odd.safetensors", bytes);
  const SafetensorsFile file(dir_ / "odd.safetensors");
  const at::Tensor x = read_tensor(file.at("x"), at::kDouble);
  EXPECT_EQ(std::memcmp(x.data_ptr(), values.data(), sizeof values), 0);
}

TEST_F(TensorIo, ReadsPartsAsNarrowDoes) {
  for (const std::vector<std::int64_t>& shape :
       {std::vector<std::int64_t>{65}, {29, 63}, {5, 1, 9}, {3, 4, 5, 6}, {0, 4}}) {
    const at::Tensor x = random_tensor("x", shape);
    const StoredTensor& on_disk = store(x);
    for (std::int64_t dim = 0; dim < x.dim(); ++dim) {
      for (std::int64_t start = 0; start <= shape[dim]; start += 1 + shape[dim] / 4) {
        const std::int64_t length = std::min<std::int64_t>(3, shape[dim] - start);
        const at::Tensor expected = x.narrow(dim, start, length).contiguous();
        EXPECT_TRUE(is_identical(read_tensor(on_disk, at::kFloat, at::kCPU, {{dim, start, length}}),
                                 expected));
        EXPECT_TRUE(
            is_identical(read_tensor(on_disk, at::kBFloat16, at::kCPU, {{dim, start, length}}),
                         expected.to(at::kBFloat16)));
      }
    }
  }
  const at::Tensor x = random_tensor("x", {6, 7, 8});
  EXPECT_TRUE(is_identical(read_tensor(store(x), at::kDouble, at::kCPU, {{2, 3, 4}, {0, 1, 5}}),
                           x.narrow(2, 3, 4).narrow(0, 1, 5).contiguous().to(at::kDouble)));
}

TEST_F(TensorIo, FillsViewsOfALargerTensorAndTouchesNothingElse) {
  const at::Tensor x = random_tensor("x", {4, 6});
  const StoredTensor& on_disk = store(x);
  at::Tensor fused = at::full({6, 10}, 7.0, at::TensorOptions(at::kDouble));
  at::Tensor part = fused.narrow(0, 1, 4).narrow(1, 2, 6);
  copy_into(on_disk, part);
  EXPECT_TRUE(is_identical(fused.narrow(0, 1, 4).narrow(1, 2, 6).contiguous(), x.to(at::kDouble)));
  fused.narrow(0, 1, 4).narrow(1, 2, 6).fill_(7.0);
  EXPECT_TRUE(is_identical(fused, at::full({6, 10}, 7.0, at::TensorOptions(at::kDouble))));
  at::Tensor transposed = at::zeros({6, 4}).t();
  copy_into(on_disk, transposed);
  EXPECT_TRUE(is_identical(transposed.contiguous(), x));
}

TEST_F(TensorIo, FillsAParameterThatRequiresGrad) {
  const at::Tensor x = random_tensor("x", {3});
  at::Tensor parameter = at::zeros({3}).set_requires_grad(true);
  copy_into(store(x), parameter);
  EXPECT_TRUE(parameter.is_leaf());
  EXPECT_TRUE(is_identical(parameter.detach(), x));
}

TEST_F(TensorIo, LargeRowsGoInPieces) {
  // One row is 12 MB: beyond a piece, so the copy descends into it.
  const at::Tensor x = random_tensor("x", {2, 3, 1024}).repeat({1, 1, 1024}).contiguous();
  const StoredTensor& on_disk = store(x);
  EXPECT_TRUE(is_identical(read_tensor(on_disk, at::kDouble), x.to(at::kDouble)));
  EXPECT_TRUE(is_identical(read_tensor(on_disk, at::kFloat, at::kCPU, {{2, 17, 1'000'000}}),
                           x.narrow(2, 17, 1'000'000).contiguous()));
}

TEST_F(TensorIo, NaNAndInfinityAreNamedWithTheTensor) {
  const double infinity = std::numeric_limits<double>::infinity();
  const auto read = [&](double value, at::ScalarType stored, at::ScalarType wanted) {
    at::Tensor x = random_tensor("x", {29, 7}).to(stored);
    x[28][6] = value;
    store(x);
    return message_of<ModelError>([&] { read_finite_tensor(file_->at("x"), wanted); });
  };
  for (const at::ScalarType type : {at::kDouble, at::kFloat, at::kBFloat16, at::kHalf}) {
    for (const double value : {std::nan(""), infinity, -infinity}) {
      EXPECT_THAT(read(value, type, type),
                  HasSubstr("t.safetensors: tensor 'x' holds NaN or infinity"))
          << type << " " << value;
    }
  }
  EXPECT_THAT(read(1e300, at::kDouble, at::kFloat), HasSubstr("'x' holds NaN or infinity"));
  EXPECT_THAT(read(1e30, at::kFloat, at::kHalf), HasSubstr("'x' holds NaN or infinity"));
  EXPECT_TRUE(is_identical(read_finite_tensor(store(at::zeros({0, 3}))), at::zeros({0, 3})));
}

TEST_F(TensorIo, AFileThatChangesWhileItIsLoadedIsAnError) {
  namespace fs = std::filesystem;
  const auto load_after = [&](const std::function<void(const fs::path&)>& change) {
    fs::remove_all(dir_ / "m");
    testing::write_model(dir_ / "m", {{"a", random_tensor("a", {64, 8})}});
    const auto model = ModelDirectory::open(dir_ / "m");
    change(dir_ / "m/model.safetensors");
    try {
      load_tensors(model, {{"a", at::empty({64, 8})}});
    } catch (const UserError& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_EQ(load_after([](const fs::path&) {}), "");
  EXPECT_EQ(load_after([](const fs::path& p) { files::write_atomically(p, "another file"); }), "");
  EXPECT_THAT(load_after([](const fs::path& p) {
                std::fstream file(p, std::ios::in | std::ios::out);
                file.seekp(-4, std::ios::end) << "abcd";
              }),
              HasSubstr("model.safetensors was changed while it was in use"));
  EXPECT_THAT(load_after([](const fs::path& p) { fs::resize_file(p, fs::file_size(p) + 1); }),
              HasSubstr("was changed"));
  EXPECT_THAT(load_after([](const fs::path& p) { fs::last_write_time(p, fs::file_time_type()); }),
              HasSubstr("was changed"));
}

TEST_F(TensorIo, WrongShapesRangesAndTypesNameTheTensor) {
  const StoredTensor& x = store(random_tensor("x", {4, 6}));
  at::Tensor wrong = at::empty({6, 4});
  EXPECT_THAT(message_of<ModelError>([&] { copy_into(x, wrong); }),
              HasSubstr("t.safetensors: tensor 'x' has shape [4, 6], expected [6, 4]"));
  EXPECT_THAT(message_of<ModelError>([&] {
                read_tensor(x, at::kFloat, at::kCPU, {{0, 3, 2}});
              }),
              HasSubstr("there is no part [3, 3 + 2) of dimension 0"));
  EXPECT_THROW(read_tensor(x, at::kFloat, at::kCPU, {{2, 0, 1}}), ModelError);
  EXPECT_THROW(read_tensor(x, at::kFloat, at::kCPU, {{0, 0, 1}, {0, 0, 1}}), ModelError);
  EXPECT_THROW(read_tensor(x, at::kFloat, at::kCPU, {{0, -1, 1}}), ModelError);
  EXPECT_THAT(message_of<ModelError>([&] { read_tensor(x, at::kLong); }),
              HasSubstr("tensor 'x' is F32, which is not converted to Long"));
}

TEST_F(TensorIo, LoadListsAllThatIsWrongAtOnceAndChangesNothing) {
  testing::write_model(dir_ / "m", {{"a", random_tensor("a", {3})},
                                    {"b", random_tensor("b", {2, 2})},
                                    {"extra", random_tensor("e", {1})},
                                    {"model.visual.x", random_tensor("v", {1})}});
  const auto model = ModelDirectory::open(dir_ / "m");
  const at::Tensor a = at::zeros({3});
  const std::vector<NamedTensor> targets = {{"a", a}, {"b", at::zeros({4})}, {"c", at::zeros({1})}};
  EXPECT_THAT(
      message_of<ModelError>([&] { load_tensors(model, targets, {"model.visual.*"}); }),
      AllOf(HasSubstr("1 missing: c"), HasSubstr("1 of a wrong shape: b is [2, 2], expected [4]"),
            HasSubstr("1 that the model has no place for: extra")));
  EXPECT_TRUE(is_identical(a, at::zeros({3})));
}

TEST_F(TensorIo, LoadReportsWhatItConvertedAndCarried) {
  const at::Tensor a = random_tensor("a", {3}), b = random_tensor("b", {5, 2}, at::kBFloat16);
  testing::write_model(dir_ / "m", {{"a", a}, {"b", b}, {"mtp.x", random_tensor("v", {1})}});
  const auto model = ModelDirectory::open(dir_ / "m");
  std::vector<LoadTarget> targets = {{"a", {3}, at::zeros({3})},
                                     {"b", {5, 2}, at::zeros({2, 2}), {{0, 0, 2}}},
                                     {"b", {5, 2}, at::zeros({3, 2}), {{0, 2, 3}}}};
  const LoadReport report = load_tensors(model, targets, {"mtp.*"});
  EXPECT_TRUE(is_identical(targets[0].destination, a));
  EXPECT_TRUE(is_identical(targets[2].destination, b.narrow(0, 2, 3).to(at::kFloat)));
  EXPECT_THAT(report.carried, ElementsAre("mtp.x"));
  EXPECT_THAT(report.converted, ElementsAre("b (BF16 -> Float)"));
  EXPECT_EQ(report.bytes_read, 12u + 20u);
}

/// Memory of this process: resident bytes now, or their peak since reset_peak().
std::int64_t resident_bytes(const std::string& key) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with(key)) return std::stoll(line.substr(key.size() + 1)) * 1024;
  }
  return 0;
}
void reset_peak() { std::ofstream("/proc/self/clear_refs") << "5"; }

TEST_F(TensorIo, LoadingHoldsTheModelAndLittleElse) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "a sanitizer's shadow memory is resident too";
#endif
  constexpr std::int64_t kRows = 4096, kColumns = 4096;  // 64 MiB each in F32, 320 MiB together
  {
    std::vector<TensorSpec> specs;
    for (int i = 0; i < 5; ++i)
      specs.push_back({fmt::format("w{}", i), Dtype::kF32, {kRows, kColumns}});
    std::filesystem::create_directory(dir_ / "m");
    SafetensorsWriter writer(dir_ / "m" / "model.safetensors", specs);
    const std::vector<std::byte> row(kColumns * 4, std::byte{1});
    for (const TensorSpec& spec : writer.order()) {
      for (std::int64_t r = 0; r < kRows; ++r) writer.append(spec.name, row);
    }
    writer.commit();
    files::write_atomically(dir_ / "m" / "config.json", "{}");
  }
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    malloc_trim(0);  // what earlier tests gave back must not serve the destination
    reset_peak();
    const std::int64_t before = resident_bytes("VmRSS:");
    const auto model = ModelDirectory::open(dir_ / "m");
    std::vector<NamedTensor> targets;
    for (const StoredTensor& stored : model.tensors()) {
      targets.push_back({stored.name, at::empty(stored.shape, at::TensorOptions(dtype))});
    }
    load_tensors(model, targets);
    const std::int64_t held = resident_bytes("VmHWM:") - before;
    const auto size = static_cast<std::int64_t>(model.bytes()) *
                      static_cast<std::int64_t>(c10::elementSize(dtype)) / 4;
    RecordProperty("peak_over_model", std::to_string(static_cast<double>(held) / size));
    EXPECT_LE(held, size * 12 / 10) << dtype << ": " << static_cast<double>(held) / size;
    EXPECT_GE(held, size);
  }
}

TEST_F(TensorIo, APartOfALargeTensorReadsOnlyItsPages) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "a sanitizer's shadow memory is resident too";
#endif
  const StoredTensor& x = store(at::zeros({1024, 65536}));  // 256 MiB
  reset_peak();
  const std::int64_t before = resident_bytes("VmRSS:");
  read_tensor(x, at::kFloat, at::kCPU, {{0, 512, 8}});
  EXPECT_LE(resident_bytes("VmHWM:") - before,
            8 << 20);  // 2 MiB read, 2 MiB of them in the destination
}

}  // namespace
}  // namespace heddle::ckpt
