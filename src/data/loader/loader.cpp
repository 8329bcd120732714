#include "data/loader/loader.h"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <numeric>
#include <thread>
#include <utility>

#include "base/errors.h"
#include "base/text.h"
#include "data/loader/plan.h"

namespace heddle::data {
namespace {

constexpr int kCursorVersion = 1;

struct Position {
  std::int64_t epoch = 0;
  std::int64_t row = 0;  ///< of the epoch's plan
  std::int64_t step = 0;
};

Batch make_batch(const Dataset& dataset, std::span<const std::int64_t> rows,
                 const BatchCapacity& capacity) {
  std::vector<SequenceView> sequences;
  sequences.reserve(rows.size());
  for (const std::int64_t row : rows) sequences.push_back(dataset.row(row));
  const bool has_targets =
      dataset.task() == Task::kClassification || dataset.task() == Task::kRegression;
  return Batch::from_sequences(sequences, capacity, has_targets);
}

/// Settings that the order of the rows depends on; a cursor is only good for equal ones.
nlohmann::json order_of(const Dataset& dataset, const LoaderOptions& options) {
  nlohmann::json weights = nlohmann::json::array();
  for (const Dataset::File& file : dataset.files()) weights.push_back(file.weight);
  return {{"data", dataset.key()},
          {"file_weights", weights},
          {"seed", options.seed},
          {"shuffle", options.shuffle},
          {"packing", options.packing},
          {"max_length", options.packing ? options.max_length : 0},
          {"packing_window", options.packing ? options.packing_window : 0}};
}

void check_options(const Dataset& dataset, const LoaderOptions& options) {
  const auto require = [](bool holds, std::string message) {
    if (!holds) throw ConfigError(std::move(message));
  };
  require(
      options.global_batch_size >= 1,
      fmt::format("train.global_batch_size is {}, expected at least 1", options.global_batch_size));
  require(options.world >= 1 && options.rank >= 0 && options.rank < options.world,
          fmt::format("data rank {} of {} does not exist", options.rank, options.world));
  require(options.epochs >= 0 && options.max_steps >= 0,
          fmt::format("train.epochs {} and train.max_steps {} must not be negative", options.epochs,
                      options.max_steps));
  require(options.epochs > 0 || options.max_steps > 0,
          "train.epochs is 0 (without end), so train.max_steps must be set");
  require(options.micro_batch_tokens >= 0,
          fmt::format("train.micro_batch_tokens is {}, expected at least 0",
                      options.micro_batch_tokens));
  require(options.capacity.sequences != 1,
          "the static capacity of a batch needs room for a sequence and the dummy tail");
  const std::int64_t limit = micro_batch_limit(options.micro_batch_tokens, options.capacity);
  if (options.packing) {
    require(options.max_length >= 1, "data.packing needs data.max_length");
    require(options.packing_window >= 1, "the packing window must hold at least one row");
    require(limit == 0 || options.max_length <= limit,
            fmt::format("a packed row has up to data.max_length = {} tokens but a micro-batch "
                        "holds {}; raise train.micro_batch_tokens",
                        options.max_length, limit));
    const std::int64_t longest = dataset.report().longest_row;
    require(longest <= options.max_length,
            fmt::format("the longest row has {} tokens, more than a packed row of data.max_length "
                        "= {}",
                        longest, options.max_length));
  }
  check_longest_row(dataset, limit);
}

std::int64_t steps_for(std::int64_t rows, std::int64_t global_batch_size) {
  return (rows + global_batch_size - 1) / global_batch_size;
}

/// Steps of a whole run of which `taken` are made and whose next row is `row` of epoch `epoch`,
/// with the batches of the options; max_steps bounds it. `plan`: of that epoch.
std::int64_t total_steps(const Dataset& dataset, const LoaderOptions& options,
                         const EpochPlan& plan, std::int64_t epoch, std::int64_t row,
                         std::int64_t taken) {
  const std::int64_t bound = options.max_steps;
  if (options.epochs == 0) return bound;
  std::int64_t total = taken;
  const std::int64_t size = options.global_batch_size;
  if (epoch < options.epochs)
    total += steps_for(std::max<std::int64_t>(plan.rows() - row, 0), size);
  for (std::int64_t e = epoch + 1; e < options.epochs && (bound == 0 || total < bound); ++e) {
    // Another shuffle packs into another number of rows.
    total += steps_for(options.packing ? EpochPlan(dataset, options, e).rows() : plan.rows(), size);
  }
  return bound > 0 ? std::min(total, bound) : total;
}

LoaderInfo describe(const Dataset& dataset, const LoaderOptions& options, const EpochPlan& first) {
  LoaderInfo info;
  info.sequences_per_epoch = first.sequences();
  info.rows_per_epoch = first.rows();
  for (std::int64_t r = 0; r < first.rows(); ++r) {
    for (const std::int64_t sequence : first.row(r)) {
      info.tokens_per_epoch += dataset.lengths()[sequence];
      info.loss_tokens_per_epoch += dataset.loss_rows(sequence);
    }
  }
  info.steps_per_epoch = steps_for(first.rows(), options.global_batch_size);
  const auto tokens = static_cast<double>(info.tokens_per_epoch);
  const auto rows = static_cast<double>(std::max<std::int64_t>(info.rows_per_epoch, 1));
  info.mean_row_tokens = tokens / rows;
  if (options.packing) {
    info.packing_efficiency = tokens / (rows * static_cast<double>(options.max_length));
  }
  info.total_steps = total_steps(dataset, options, first, 0, 0, 0);
  return info;
}

}  // namespace

/// Makes steps in order, in a thread that runs `prefetch_steps` ahead, or on demand.
class Loader::Producer {
 public:
  Producer(const Dataset& dataset, const LoaderOptions& options,
           std::shared_ptr<const EpochPlan> plan, Position start)
      : dataset_(dataset), options_(options), plan_(std::move(plan)), made_(start), given_(start) {
    if (options_.prefetch_steps > 0) {
      thread_ = std::jthread([this](std::stop_token stop) { run(stop); });
    }
  }

  std::optional<Step> next() {
    Item item;
    if (options_.prefetch_steps > 0) {
      std::unique_lock lock(mutex_);
      // The producer always ends with an item that says so, and thus this wait ends.
      changed_.wait(lock, [&] { return !queue_.empty(); });
      if (queue_.front().failure) std::rethrow_exception(queue_.front().failure);
      if (!queue_.front().step) return std::nullopt;
      item = std::move(queue_.front());
      queue_.pop_front();
      changed_.notify_all();
    } else {
      item = make();
      if (!item.step) return std::nullopt;
    }
    given_ = item.after;
    return std::move(item.step);
  }

  const Position& given() const { return given_; }

 private:
  struct Item {
    std::optional<Step> step;
    Position after;
    std::exception_ptr failure;
  };

  void run(const std::stop_token& stop) {
    while (!stop.stop_requested()) {
      Item item;
      try {
        item = make();
      } catch (...) {
        item.failure = std::current_exception();
      }
      const bool is_last = !item.step;
      std::unique_lock lock(mutex_);
      changed_.wait(lock, stop, [&] {
        return queue_.size() < static_cast<std::size_t>(options_.prefetch_steps);
      });
      if (stop.stop_requested()) return;
      queue_.push_back(std::move(item));
      changed_.notify_all();
      if (is_last) return;
    }
  }

  Item make() {
    Item item;
    if (plan_ == nullptr || plan_->epoch() != made_.epoch) {
      plan_ = std::make_shared<EpochPlan>(dataset_, options_, made_.epoch);
    }
    if (made_.row >= plan_->rows()) {
      // The next epoch's plan is only made when there is a next epoch.
      if (options_.epochs > 0 && made_.epoch + 1 >= options_.epochs) return item;
      if (options_.max_steps > 0 && made_.step >= options_.max_steps) return item;
      made_ = {made_.epoch + 1, 0, made_.step};
      plan_ = std::make_shared<EpochPlan>(dataset_, options_, made_.epoch);
    }
    if (options_.epochs > 0 && made_.epoch >= options_.epochs) return item;
    if (options_.max_steps > 0 && made_.step >= options_.max_steps) return item;

    const std::int64_t last = std::min(made_.row + options_.global_batch_size, plan_->rows());
    const StepPlan plan = plan_step(dataset_, options_, *plan_, made_.row, last);
    Step step;
    step.step = made_.step;
    step.epoch = made_.epoch;
    step.rows = last - made_.row;
    for (std::int64_t r = made_.row; r < last; ++r) {
      for (const std::int64_t sequence : plan_->row(r)) {
        step.tokens += dataset_.lengths()[sequence];
        step.loss_rows += dataset_.loss_rows(sequence);
        step.loss_weight_sum += dataset_.loss_weight(sequence);
        ++step.sequences;
      }
    }
    for (const auto& rows : plan.micro_batches[options_.rank]) {
      step.micro_batches.push_back(make_batch(dataset_, rows, options_.capacity));
    }
    made_ = {made_.epoch, last, made_.step + 1};
    item.step = std::move(step);
    item.after = made_;
    return item;
  }

  const Dataset& dataset_;
  const LoaderOptions& options_;
  std::shared_ptr<const EpochPlan> plan_;
  Position made_;   ///< after the last step made; of the thread alone once it runs
  Position given_;  ///< after the last step given out
  std::mutex mutex_;
  std::condition_variable_any changed_;
  std::deque<Item> queue_;
  std::jthread thread_;  ///< last, so that it ends before what it uses
};

Loader::Loader(std::shared_ptr<const Dataset> dataset, LoaderOptions options)
    : dataset_(std::move(dataset)), options_(std::move(options)) {
  check_options(*dataset_, options_);
  auto first = std::make_shared<const EpochPlan>(*dataset_, options_, 0);
  if (first->rows() == 0) {
    throw_error<ConfigError>("the file weights leave no row of the data in an epoch");
  }
  info_ = describe(*dataset_, options_, *first);
  producer_ = std::make_unique<Producer>(*dataset_, options_, std::move(first), Position());
}

Loader::~Loader() = default;

std::optional<Step> Loader::next() { return producer_->next(); }

nlohmann::json Loader::cursor() const {
  const Position& position = producer_->given();
  nlohmann::json cursor = order_of(*dataset_, options_);
  cursor["version"] = kCursorVersion;
  cursor["epoch"] = position.epoch;
  cursor["row"] = position.row;
  cursor["step"] = position.step;
  return cursor;
}

void Loader::seek(const nlohmann::json& cursor) {
  Position position;
  try {
    if (cursor.at("version") != kCursorVersion) {
      throw_error<DataError>("the data cursor has version {}, expected {}",
                             cursor.at("version").dump(), kCursorVersion);
    }
    cursor.at("epoch").get_to(position.epoch);
    cursor.at("row").get_to(position.row);
    cursor.at("step").get_to(position.step);
  } catch (const nlohmann::json::exception& error) {
    throw_error<DataError>("the data cursor cannot be read: {}", error.what());
  }
  if (position.epoch < 0 || position.row < 0 || position.step < 0) {
    throw_error<DataError>("the data cursor lies before the start: {}", cursor.dump());
  }
  const nlohmann::json order = order_of(*dataset_, options_);
  std::vector<std::string> differences;
  for (const auto& [name, value] : order.items()) {
    const nlohmann::json was = cursor.value(name, nlohmann::json());
    if (was == value) continue;
    if (name == "data") {
      std::vector<std::string> files;
      for (const Dataset::File& file : dataset_->files())
        files.push_back(fmt::format("{}: {} rows", file.path, file.rows));
      differences.push_back(fmt::format(
          "the rows are others ({}): a file was changed, added or removed, or tokenizer, "
          "chat template or a key of data did",
          text::list_some(files, 4)));
    } else {
      differences.push_back(fmt::format("{} was {}, is {}", name, was.dump(), value.dump()));
    }
  }
  if (!differences.empty()) {
    throw_error<DataError>("cannot resume in the middle of the data, its order is another now: {}",
                           text::join(differences, "; "));
  }
  producer_.reset();
  // Steps before may have had batches of another size.
  auto plan = std::make_shared<const EpochPlan>(*dataset_, options_, position.epoch);
  info_.total_steps =
      total_steps(*dataset_, options_, *plan, position.epoch, position.row, position.step);
  producer_ = std::make_unique<Producer>(*dataset_, options_, std::move(plan), position);
}

EvaluationLoader::EvaluationLoader(std::shared_ptr<const Dataset> dataset, Options options)
    : dataset_(std::move(dataset)), options_(options) {
  if (options_.world < 1 || options_.rank < 0 || options_.rank >= options_.world) {
    throw_error<ConfigError>("data rank {} of {} does not exist", options_.rank, options_.world);
  }
  if (options_.capacity.sequences == 1) {
    throw_error<ConfigError>(
        "the static capacity of a batch needs room for a sequence and the dummy tail");
  }
  const std::int64_t limit = micro_batch_limit(options_.micro_batch_tokens, options_.capacity);
  check_longest_row(*dataset_, limit);
  const std::int64_t rows =
      options_.max_rows > 0 ? std::min(options_.max_rows, dataset_->rows()) : dataset_->rows();
  const std::int64_t most_sequences =
      options_.capacity.sequences > 0 ? options_.capacity.sequences - 1 : rows;
  starts_ = {0};
  std::int64_t tokens = 0;
  for (std::int64_t row = 0; row < rows; ++row) {
    const std::int64_t length = dataset_->lengths()[row];
    const bool is_full =
        limit == 0 || tokens + length > limit || row - starts_.back() >= most_sequences;
    if (row > starts_.back() && is_full) {
      starts_.push_back(row);
      tokens = 0;
    }
    tokens += length;
  }
  starts_.push_back(rows);
  const auto batches = static_cast<std::int64_t>(starts_.size()) - 1;
  rounds_ = (batches + options_.world - 1) / options_.world;
}

std::optional<Batch> EvaluationLoader::next() {
  if (next_ >= rounds_) return std::nullopt;
  const auto number = static_cast<std::size_t>(next_++ * options_.world + options_.rank);
  std::vector<std::int64_t> rows;
  if (number + 1 < starts_.size()) {
    rows.resize(static_cast<std::size_t>(starts_[number + 1] - starts_[number]));
    std::iota(rows.begin(), rows.end(), starts_[number]);
  }
  return make_batch(*dataset_, rows, options_.capacity);
}

}  // namespace heddle::data
