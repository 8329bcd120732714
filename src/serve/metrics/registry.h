#pragma once

#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace heddle::serve {

/// Names and values of labels.
using Labels = std::map<std::string, std::string>;

/// Metrics in the text form of Prometheus. All functions may be called from any thread; each family
/// is declared before it is used.
class Registry {
 public:
  void declare_counter(const std::string& name, const std::string& help);
  void declare_gauge(const std::string& name, const std::string& help);
  /// `bounds`: upper ends of the buckets, in order; the last bucket has none.
  void declare_histogram(const std::string& name, const std::string& help,
                         std::vector<double> bounds);

  void add(const std::string& counter, const Labels& labels, double count = 1);
  void set(const std::string& gauge, const Labels& labels, double value);
  void observe(const std::string& histogram, const Labels& labels, double value);
  /// Forgets the values of a gauge, whose labels have changed.
  void clear(const std::string& gauge);

  /// Text exposition format 0.0.4.
  std::string text() const;
  static constexpr const char* kContentType = "text/plain; version=0.0.4; charset=utf-8";

 private:
  enum class Kind { kCounter, kGauge, kHistogram };
  struct Series {
    double value = 0;                    ///< A histogram has its sum.
    std::vector<std::uint64_t> buckets;  ///< Observations at most each bound, then all.
  };
  struct Family {
    Kind kind = Kind::kCounter;
    std::string help;
    std::vector<double> bounds;
    std::map<Labels, Series> series;
  };
  void declare(const std::string& name, Family family);
  Family& family(const std::string& name, Kind kind);

  mutable std::mutex mutex_;
  std::map<std::string, Family> families_;
};

}  // namespace heddle::serve
