#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <set>
#include <system_error>
#include <thread>
#include <utility>

#include "base/chosen_directory.h"
#include "base/errors.h"
#include "base/files.h"
#include "base/hash.h"
#include "base/json.h"
#include "base/log.h"
#include "base/quote.h"
#include "ckpt/checkpoint_format.h"
#include "ckpt/staging_directory.h"
#include "ckpt/tensor_io.h"
#include "ckpt/training_checkpoint.h"
#include "comm/world.h"

namespace heddle::ckpt {
namespace {

using Clock = std::chrono::steady_clock;

// How often a rank that waits for another one's part looks whether the job still stands.
constexpr comm::Seconds kSlice{0.5};
// How long a part may still come after a rank has failed: that rank ends its own before it leaves,
// and `heddle launch` leaves it a few seconds.
constexpr std::chrono::seconds kGrace{5};

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

/// A copy in host memory that later steps do not change.
at::Tensor snapshot(const at::Tensor& tensor) {
  const at::Tensor values = tensor.detach();
  return values.is_cpu() ? values.clone(at::MemoryFormat::Contiguous)
                         : values.to(at::kCPU).contiguous();
}

/// "weights.safetensors", or of one of several ranks "weights-00001-of-00004.safetensors".
std::string file_of(const std::string& tensor, const comm::World* world) {
  const auto slash = tensor.find('/');
  const std::string group = slash == std::string::npos ? "tensors" : tensor.substr(0, slash);
  const bool is_plain =
      !group.empty() && std::all_of(group.begin(), group.end(), [](unsigned char c) {
        return std::isalnum(c) || c == '_' || c == '-';
      });
  if (!is_plain) {
    throw_error<InternalError>(
        "tensor '{}': the part before '/' must be letters, digits, '_' and '-'", tensor);
  }
  if (world == nullptr) return group + ".safetensors";
  return fmt::format("{}-{:05}-of-{:05}.safetensors", group, world->rank() + 1, world->size());
}

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

/// Writes one file and lets go of each tensor as soon as it is on its way to the disk.
ManifestFile write_group(const Path& directory, const std::string& name, NamedTensors& all,
                         const std::vector<std::size_t>& members) {
  std::vector<TensorSpec> specs;
  std::map<std::string_view, std::size_t> by_name;
  for (const std::size_t i : members) {
    specs.push_back(spec_of(all[i].first, all[i].second));
    by_name.emplace(all[i].first, i);
  }
  hash::Hasher hasher;
  SafetensorsWriter writer(directory / name, std::move(specs), {{"format", "pt"}}, &hasher);
  for (const TensorSpec& spec : writer.order()) {
    at::Tensor& tensor = all[by_name.at(spec.name)].second;
    append_tensor(writer, spec.name, tensor, spec.dtype);
    tensor.reset();
  }
  writer.commit();
  return {name, writer.bytes_written(), hasher.hex()};
}

ManifestFile write_state(const Path& directory, const nlohmann::ordered_json& state) {
  const std::string text = state.dump(2) + "\n";
  files::write_atomically(directory / kStateFile, text);
  return {kStateFile, text.size(), hash::Hasher().append(text).hex()};
}

}  // namespace

/// One save: what is to be written, the thread that does it, and how it ended.
struct CheckpointStore::Writing {
  std::int64_t step = 0;
  std::int64_t number = 0;  ///< Number of this save, equal on all ranks.
  CheckpointState state;
  std::optional<double> metric;
  std::thread thread;
  std::exception_ptr error;
};

CheckpointStore::CheckpointStore(Path directory, CheckpointStoreOptions options)
    : directory_(without_trailing_slash(std::move(directory))), options_(options) {
  if (options_.keep_last < 1 || options_.keep_best < 0) {
    throw_error<ConfigError>(
        "checkpoints: keep_last must be at least 1 and keep_best at least 0, they are {} and {}",
        options_.keep_last, options_.keep_best);
  }
  files::make_chosen_directory(directory_, "train.output_dir");
  if (options_.world && options_.world->rank() > 0) return;
  for (const Path& removed : remove_stale_temporaries(directory_)) {
    log::info("removed {}, which an interrupted run left", removed.string());
  }
}

CheckpointStore::~CheckpointStore() {
  try {
    wait();
  } catch (const std::exception& error) {
    log::error("the last checkpoint was not saved: {}", error.what());
  }
}

void CheckpointStore::wait() {
  if (!writing_) return;
  if (writing_->thread.joinable()) writing_->thread.join();
  const std::unique_ptr<Writing> ended = std::move(writing_);
  if (ended->error) std::rethrow_exception(ended->error);
}

void CheckpointStore::save(std::int64_t step, CheckpointState state, std::optional<double> metric) {
  if (step < 0) throw_error<InternalError>("a checkpoint of step {}", step);
  for (TensorPart& part : state.parts) {
    state.tensors.emplace_back(to_text(PartName{part.name, part.shape, part.offset}), part.tensor);
  }
  state.parts.clear();
  for (const auto& [name, tensor] : state.tensors) {
    file_of(name, nullptr);
    spec_of(name, tensor);
  }
  wait();
  auto writing = std::make_unique<Writing>();
  writing->step = step;
  writing->number = saves_++;
  writing->metric = metric;
  writing->state = std::move(state);
  const auto run = [this](Writing& job) {
    try {
      write(job);
    } catch (...) {
      job.error = std::current_exception();
    }
    job.state = {};
  };
  if (!options_.background) {
    run(*writing);
    writing_ = std::move(writing);
    wait();
    return;
  }
  for (auto& [name, tensor] : writing->state.tensors) tensor = snapshot(tensor);
  // Signals stay with the threads that the program set up for them.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, &before);
  Writing& job = *writing;
  writing->thread = std::thread([run, &job] { run(job); });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  writing_ = std::move(writing);
}

Path CheckpointStore::temporary_for(const Path& checkpoint) const {
  return fmt::format("{}.tmp-{}", checkpoint.string(), ::getpid());
}

void CheckpointStore::write(Writing& writing) const {
  if (options_.world) {
    write_with_others(writing);
  } else {
    write_alone(writing);
  }
}

namespace {

/// Writes this rank's tensors to their files.
std::vector<ManifestFile> write_groups(const Path& directory, NamedTensors& tensors,
                                       const comm::World* world) {
  std::map<std::string, std::vector<std::size_t>> groups;
  for (std::size_t i = 0; i < tensors.size(); ++i)
    groups[file_of(tensors[i].first, world)].push_back(i);
  std::vector<ManifestFile> written;
  for (const auto& [name, members] : groups)
    written.push_back(write_group(directory, name, tensors, members));
  return written;
}

std::uint64_t bytes_of(const NamedTensors& tensors) {
  std::uint64_t bytes = 0;
  for (const auto& [name, tensor] : tensors) bytes += tensor.nbytes();
  return bytes;
}

/// Messages of the ranks about one save, through the job's store.
class SaveExchange {
 public:
  SaveExchange(const comm::World& world, const comm::Store& connection, std::int64_t number)
      : world_(world), store_(connection.below(fmt::format("checkpoint/{}", number))) {}

  void post(const std::string& key, const nlohmann::ordered_json& value) const {
    store_.set(key, value.dump());
  }
  /// Throws CommError at the deadline, or FileError with what another rank announced as "error".
  nlohmann::ordered_json expect(const std::string& key, const std::string& what) const {
    const auto begun = Clock::now();
    std::optional<Clock::time_point> ending;
    std::optional<std::string> found;
    while (!(found = store_.wait(key, kSlice))) {
      const auto failure = world_.failure_of_another();
      const bool is_ending = failure || world_.has_failed() || world_.is_broken();
      if (is_ending && !ending) ending = Clock::now();
      if (seconds_since(begun) < world_.timeout().count() &&
          (!ending || Clock::now() < *ending + kGrace))
        continue;
      throw_error<CommError>("saving a checkpoint: rank {} waited {:.0f} s for {}{}", world_.rank(),
                             seconds_since(begun), what, failure ? ": " + *failure : "");
    }
    auto value = json::parse_as<CommError>(*found, what);
    if (value.contains("error"))
      throw_error<FileError>("saving a checkpoint: {}: {}", what,
                             value["error"].get<std::string>());
    return value;
  }

 private:
  const comm::World& world_;
  comm::Store store_;
};

nlohmann::ordered_json to_json(const std::vector<ManifestFile>& files) {
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  for (const ManifestFile& file : files) list.push_back({file.name, file.bytes, file.digest});
  return {{"files", list}};
}

/// The folder that rank 0 fills for `checkpoint`, from its name alone: whoever can write to the
/// store must not choose where files go.
Path staging_of(const Path& checkpoint, const std::string& name) {
  const std::string begin = checkpoint.filename().string() + ".tmp-";
  const bool fits = name.starts_with(begin) && name.size() > begin.size() &&
                    name.find_first_not_of("0123456789", begin.size()) == std::string::npos;
  if (!fits)
    throw_error<CommError>("saving a checkpoint: rank 0 names the folder '{}'", text::shown(name));
  return checkpoint.parent_path() / name;
}

/// Checks a rank's account of what it wrote against the names that it may use and against the disk.
ManifestFile told_file(const nlohmann::ordered_json& told, const Path& directory,
                       const comm::World& world, std::int64_t rank) {
  const std::string end = fmt::format("-{:05}-of-{:05}.safetensors", rank + 1, world.size());
  const bool has_types = told.is_array() && told.size() == 3 && told[0].is_string() &&
                         told[1].is_number_unsigned() && told[2].is_string();
  const std::string name = has_types ? told[0].get<std::string>() : "";
  if (!name.ends_with(end) || Path(name).filename() != name) {
    throw_error<CommError>("saving a checkpoint: rank {} lists {}, expected a file '...{}'", rank,
                           json::shown(told), end);
  }
  ManifestFile file = {name, told[1].get<std::uint64_t>(), told[2].get<std::string>()};
  check_file(directory, file, /*contents=*/false);
  return file;
}

/// A rank other than 0: writes where rank 0 says, reports, and waits for the end.
void write_as_follower(const comm::World& world, const SaveExchange& exchange,
                       const Path& checkpoint, NamedTensors& tensors) {
  exchange.post(fmt::format("bytes/{}", world.rank()), {{"bytes", bytes_of(tensors)}});
  const auto place = exchange.expect("directory", "rank 0 to make the directory");
  const std::string mine = fmt::format("files/{}", world.rank());
  try {
    const Path directory = staging_of(checkpoint, place.value("name", ""));
    exchange.post(mine, to_json(write_groups(directory, tensors, &world)));
  } catch (const std::exception& error) {
    exchange.post(mine, {{"error", error.what()}});
    throw;
  }
  exchange.expect("done", "rank 0 to complete it");
}

}  // namespace

void CheckpointStore::write_alone(Writing& writing) const {
  NamedTensors& tensors = writing.state.tensors;
  const Path final = directory_ / step_name(writing.step);
  require_free_space(final, bytes_of(tensors));
  StagingDirectory staging(final, temporary_for(final));
  Manifest manifest{writing.step, writing.metric, options_.metric_name, {}};
  manifest.files.push_back(write_state(staging.path(), writing.state.state));
  for (ManifestFile& file : write_groups(staging.path(), tensors, nullptr))
    manifest.files.push_back(std::move(file));
  files::write_atomically(staging.path() / kManifestFile, to_text(manifest));
  staging.commit();
  prune(writing.step);
}

void CheckpointStore::write_with_others(Writing& writing) const {
  const comm::World& world = *options_.world;
  // Its own connection, because the rank uses the other one meanwhile.
  if (!connection_) connection_ = std::make_unique<comm::Store>(world.store().reconnected());
  const SaveExchange exchange(world, *connection_, writing.number);
  NamedTensors& tensors = writing.state.tensors;
  const Path final = directory_ / step_name(writing.step);
  if (world.rank() > 0) return write_as_follower(world, exchange, final, tensors);
  try {
    // The ranks see one file system: it needs room for the parts of all.
    std::uint64_t bytes = bytes_of(tensors);
    for (std::int64_t rank = 1; rank < world.size(); ++rank) {
      bytes += exchange
                   .expect(fmt::format("bytes/{}", rank),
                           fmt::format("rank {} to say how large its part is", rank))
                   .at("bytes")
                   .get<std::uint64_t>();
    }
    require_free_space(final, bytes);
    StagingDirectory staging(final, temporary_for(final));
    exchange.post("directory", {{"name", staging.path().filename().string()}});
    Manifest manifest{writing.step, writing.metric, options_.metric_name, {}};
    manifest.files.push_back(write_state(staging.path(), writing.state.state));
    for (ManifestFile& file : write_groups(staging.path(), tensors, &world))
      manifest.files.push_back(std::move(file));
    for (std::int64_t rank = 1; rank < world.size(); ++rank) {
      const auto told = exchange.expect(fmt::format("files/{}", rank),
                                        fmt::format("rank {} to write its part", rank));
      for (const auto& file : told.at("files"))
        manifest.files.push_back(told_file(file, staging.path(), world, rank));
    }
    files::write_atomically(staging.path() / kManifestFile, to_text(manifest));
    staging.commit();
  } catch (const std::exception& error) {
    exchange.post("directory", {{"error", error.what()}});
    exchange.post("done", {{"error", error.what()}});
    throw;
  }
  exchange.post("done", nlohmann::ordered_json::object());
  prune(writing.step);
}

bool CheckpointStore::is_rated(const CheckpointInfo& info) const {
  const bool is_same = info.metric_name.empty() || info.metric_name == options_.metric_name;
  return info.metric.has_value() && is_same;
}

void CheckpointStore::prune(std::int64_t newest) const {
  const auto all = list();  // oldest first
  std::set<std::int64_t> kept = {newest};
  for (std::size_t i = 0; i < all.size() && i < static_cast<std::size_t>(options_.keep_last); ++i) {
    kept.insert(all[all.size() - 1 - i].step);
  }
  std::vector<CheckpointInfo> rated;
  std::copy_if(all.begin(), all.end(), std::back_inserter(rated),
               [this](const CheckpointInfo& info) { return is_rated(info); });
  std::stable_sort(
      rated.begin(), rated.end(),
      [](const CheckpointInfo& a, const CheckpointInfo& b) { return *a.metric < *b.metric; });
  for (std::size_t i = 0; i < rated.size() && i < static_cast<std::size_t>(options_.keep_best);
       ++i) {
    kept.insert(rated[i].step);
  }
  for (const CheckpointInfo& info : all) {
    if (!kept.contains(info.step)) remove_directory_whole(info.path, temporary_for(info.path));
  }
}

std::vector<CheckpointInfo> CheckpointStore::list() const { return list_checkpoints(directory_); }

void CheckpointStore::remove_newer_than(std::int64_t step) {
  wait();
  if (options_.world && options_.world->rank() > 0) return;
  for (const CheckpointInfo& info : list()) {
    if (info.step > step) remove_directory_whole(info.path, temporary_for(info.path));
  }
}

std::optional<CheckpointInfo> CheckpointStore::best() const {
  std::optional<CheckpointInfo> best;
  for (const CheckpointInfo& info : list()) {
    if (is_rated(info) && (!best || *info.metric < *best->metric)) best = info;
  }
  return best;
}

CheckpointState CheckpointStore::load(const Path& checkpoint) const {
  const TrainingCheckpoint stored = TrainingCheckpoint::open(checkpoint);
  CheckpointState state;
  state.state = stored.state();
  for (const std::string& name : stored.names()) {
    state.tensors.emplace_back(name, stored.whole(name));
  }
  return state;
}

}  // namespace heddle::ckpt
