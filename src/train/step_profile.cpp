#include "train/step_profile.h"

#include <fmt/format.h>
#include <torch/csrc/autograd/profiler_kineto.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/files.h"
#include "device/device.h"

namespace heddle::train {
namespace {

using torch::autograd::profiler::KinetoEvent;
using torch::autograd::profiler::ProfilerResult;
using torch::profiler::impl::ActivityType;
using torch::profiler::impl::ProfilerConfig;
using torch::profiler::impl::ProfilerState;

struct Row {
  std::string name;
  std::int64_t calls = 0;
  double ms = 0;
};

struct Interval {
  std::uint64_t from, to;
  std::string name;
};

/// Nanoseconds in which at least one of the intervals was open.
double covered_ns(std::vector<std::pair<std::uint64_t, std::uint64_t>> intervals) {
  std::sort(intervals.begin(), intervals.end());
  double total = 0;
  std::uint64_t end = 0;
  for (const auto& [from, to] : intervals) {
    if (to <= end) continue;
    total += static_cast<double>(to - std::max(from, end));
    end = to;
  }
  return total;
}

bool is_communication(const std::string& name) {
  return name.starts_with("nccl") || name.starts_with("hccl");
}

/// How long collectives ran on the device, and for how long of it nothing else did.
std::string communication(const std::vector<Interval>& intervals) {
  std::vector<std::pair<std::uint64_t, std::uint64_t>> collectives, others, all;
  for (const Interval& interval : intervals) {
    all.emplace_back(interval.from, interval.to);
    (is_communication(interval.name) ? collectives : others).push_back(all.back());
  }
  if (collectives.empty()) return "";
  const double exposed = covered_ns(std::move(all)) - covered_ns(std::move(others));
  return fmt::format("communication {:.1f} ms, {:.1f} ms of it exposed\n",
                     covered_ns(std::move(collectives)) * 1e-6, exposed * 1e-6);
}

/// Templates of libtorch have names of hundreds of characters; the front tells them apart.
std::string shortened(const std::string& name) {
  constexpr std::size_t kWidth = 150;
  return name.size() <= kWidth ? name : name.substr(0, kWidth - 3) + "...";
}

/// The longest waits of the device, with what ran before and after: host work that nothing hides.
std::string waits(std::vector<Interval> intervals) {
  constexpr std::size_t kShown = 12;
  std::sort(intervals.begin(), intervals.end(),
            [](const Interval& a, const Interval& b) { return a.from < b.from; });
  std::vector<std::pair<double, std::string>> gaps;
  const Interval* last = nullptr;
  for (const Interval& next : intervals) {
    if (last != nullptr && next.from > last->to) {
      gaps.emplace_back(static_cast<double>(next.from - last->to) * 1e-6,
                        fmt::format("{:.60} -> {:.60}", last->name, next.name));
    }
    if (last == nullptr || next.to > last->to) last = &next;
  }
  std::stable_sort(gaps.begin(), gaps.end(),
                   [](const auto& a, const auto& b) { return a.first > b.first; });
  if (gaps.size() > kShown) gaps.resize(kShown);
  std::string text = "\nlongest waits of the device\n";
  for (const auto& [ms, between] : gaps) text += fmt::format("{:10.3f} ms  {}\n", ms, between);
  return text;
}

std::string table(const ProfilerResult& result, c10::DeviceType device) {
  std::map<std::string, Row> rows;
  std::vector<std::pair<std::uint64_t, std::uint64_t>> busy;
  std::vector<Interval> intervals;
  std::uint64_t first = ~std::uint64_t{0}, last = 0;
  for (const KinetoEvent& event : result.events()) {
    first = std::min(first, event.startNs());
    last = std::max(last, event.endNs());
    if (event.deviceType() != device) continue;
    Row& row = rows[event.name()];
    row.name = event.name();
    ++row.calls;
    row.ms += static_cast<double>(event.durationNs()) * 1e-6;
    busy.emplace_back(event.startNs(), event.endNs());
    intervals.push_back({event.startNs(), event.endNs(), event.name()});
  }
  std::vector<Row> sorted;
  double sum = 0;
  std::int64_t calls = 0;
  for (auto& [name, row] : rows) {
    sum += row.ms;
    calls += row.calls;
    sorted.push_back(std::move(row));
  }
  std::stable_sort(sorted.begin(), sorted.end(),
                   [](const Row& a, const Row& b) { return a.ms > b.ms; });
  const double span = last > first ? static_cast<double>(last - first) * 1e-6 : 0;
  std::string text = fmt::format(
      "{:.1f} ms from first to last event, device busy {:.1f} ms; {} calls, {:.1f} ms in all\n{}\n"
      "{:>10} {:>7} {:>7}  {}\n",
      span, covered_ns(std::move(busy)) * 1e-6, calls, sum, communication(intervals), "ms", "share",
      "calls", "name");
  for (const Row& row : sorted) {
    text += fmt::format("{:10.3f} {:6.1f}% {:7}  {}\n", row.ms, sum > 0 ? 100 * row.ms / sum : 0,
                        row.calls, shortened(row.name));
  }
  if (device != c10::DeviceType::CPU) text += waits(std::move(intervals));
  return text;
}

}  // namespace

StepProfile::StepProfile(c10::Device device) : device_(device) {
  device::synchronize(device_);
  std::set<ActivityType> activities = {ActivityType::CPU};
  if (device_.is_cuda()) activities.insert(ActivityType::CUDA);
  const ProfilerConfig config(ProfilerState::KINETO);
  torch::autograd::profiler::prepareProfiler(config, activities);
  torch::autograd::profiler::enableProfiler(config, activities);
  running_ = true;
}

StepProfile::~StepProfile() {
  if (running_) torch::autograd::profiler::disableProfiler();
}

void StepProfile::finish(const std::filesystem::path& directory) {
  device::synchronize(device_);
  const auto result = torch::autograd::profiler::disableProfiler();
  running_ = false;
  files::write_atomically(directory / "profile.txt", table(*result, device_.type()));
  result->save((directory / "profile.json").string());
}

}  // namespace heddle::train
