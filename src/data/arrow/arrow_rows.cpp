#include "data/arrow/arrow_rows.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include <arrow/api.h>
#include <arrow/io/file.h>
#include <arrow/ipc/reader.h>
#include <parquet/arrow/reader.h>
#include <parquet/file_reader.h>

#include "data/arrow/json_of_array.h"

namespace heddle::arrow_rows {
namespace {

/// Rows of a Parquet file that are decoded at a time.
constexpr std::int64_t kBatchRows = 1024;

void require(const arrow::Status& status) {
  if (!status.ok()) throw std::runtime_error(status.message());
}

template <class T>
T take(arrow::Result<T> result) {
  require(result.status());
  return std::move(result).ValueUnsafe();
}

/// Batches of rows, one at a time.
class Batches {
 public:
  virtual ~Batches() = default;
  /// Null at the end.
  virtual std::shared_ptr<arrow::RecordBatch> next() = 0;
  virtual double fraction() const = 0;
};

/// Reads columns in pieces: of a row group no more than the pages of one batch is decoded.
class ParquetBatches : public Batches {
 public:
  explicit ParquetBatches(const std::shared_ptr<arrow::io::RandomAccessFile>& file) {
    parquet::ReaderProperties properties;
    properties.enable_buffered_stream();
    parquet::ArrowReaderProperties columns;
    columns.set_batch_size(kBatchRows);
    columns.set_pre_buffer(false);
    parquet::arrow::FileReaderBuilder builder;
    require(builder.Open(file, properties));
    require(builder.memory_pool(arrow::default_memory_pool())->properties(columns)->Build(&file_));
    rows_ = file_->parquet_reader()->metadata()->num_rows();
    std::vector<int> groups;
    for (int group = 0; group < file_->num_row_groups(); ++group) groups.push_back(group);
    batches_ = take(file_->GetRecordBatchReader(groups));
  }
  std::shared_ptr<arrow::RecordBatch> next() override {
    std::shared_ptr<arrow::RecordBatch> batch;
    require(batches_->ReadNext(&batch));
    if (batch) done_ += batch->num_rows();
    return batch;
  }
  double fraction() const override {
    return rows_ > 0 ? static_cast<double>(done_) / static_cast<double>(rows_) : 1;
  }

 private:
  std::unique_ptr<parquet::arrow::FileReader> file_;
  std::unique_ptr<arrow::RecordBatchReader> batches_;
  std::int64_t rows_ = 0, done_ = 0;
};

class IpcFileBatches : public Batches {
 public:
  explicit IpcFileBatches(const std::shared_ptr<arrow::io::RandomAccessFile>& file)
      : file_(take(arrow::ipc::RecordBatchFileReader::Open(file))) {}
  std::shared_ptr<arrow::RecordBatch> next() override {
    if (done_ == file_->num_record_batches()) return nullptr;
    return take(file_->ReadRecordBatch(done_++));
  }
  double fraction() const override {
    return static_cast<double>(done_) / std::max(1, file_->num_record_batches());
  }

 private:
  std::shared_ptr<arrow::ipc::RecordBatchFileReader> file_;
  int done_ = 0;
};

class IpcStreamBatches : public Batches {
 public:
  explicit IpcStreamBatches(const std::shared_ptr<arrow::io::RandomAccessFile>& file)
      : bytes_(static_cast<double>(take(file->GetSize()))),
        file_(file),
        stream_(take(arrow::ipc::RecordBatchStreamReader::Open(file))) {}
  std::shared_ptr<arrow::RecordBatch> next() override {
    std::shared_ptr<arrow::RecordBatch> batch;
    require(stream_->ReadNext(&batch));
    return batch;
  }
  double fraction() const override {
    const auto at = file_->Tell();
    return at.ok() && bytes_ > 0 ? static_cast<double>(*at) / bytes_ : 1;
  }

 private:
  double bytes_;
  std::shared_ptr<arrow::io::RandomAccessFile> file_;
  std::shared_ptr<arrow::ipc::RecordBatchStreamReader> stream_;
};

std::unique_ptr<Batches> open(const char* path) {
  const std::shared_ptr<arrow::io::RandomAccessFile> file =
      take(arrow::io::ReadableFile::Open(path));
  const std::shared_ptr<arrow::Buffer> head = take(file->ReadAt(0, 6));
  const std::string_view mark(reinterpret_cast<const char*>(head->data()),
                              static_cast<std::size_t>(head->size()));
  if (mark.starts_with("PAR1")) return std::make_unique<ParquetBatches>(file);
  if (mark == "ARROW1") return std::make_unique<IpcFileBatches>(file);
  require(file->Seek(0));  // ReadAt() leaves the place undefined
  return std::make_unique<IpcStreamBatches>(file);
}

void tell(HeddleArrowError error, const char* text) {
  const std::size_t length = std::min(std::strlen(text), error.size - 1);
  std::memcpy(error.text, text, length);
  error.text[length] = '\0';
}

}  // namespace
}  // namespace heddle::arrow_rows

using namespace heddle::arrow_rows;

struct HeddleArrowRows {
  std::unique_ptr<Batches> batches;
  std::shared_ptr<arrow::RecordBatch> batch;
  std::int64_t at = 0;
  std::string json;

  bool next() {
    while (!batch || at == batch->num_rows()) {
      batch = batches->next();
      at = 0;
      if (!batch) return false;
      // Offsets of a damaged file would lead outside of its memory.
      require(batch->ValidateFull());
    }
    const std::int64_t row = at++;
    json.assign(1, '{');
    for (int c = 0; c < batch->num_columns(); ++c) {
      if (c > 0) json += ',';
      const std::string& name = batch->column_name(c);
      append_json_string(name, json);
      json += ':';
      append_json(*batch->column(c), row, name, json);
    }
    json += '}';
    return true;
  }
};

namespace {

HeddleArrowRows* open_rows(const char* path, HeddleArrowError error) {
  try {
    auto rows = std::make_unique<HeddleArrowRows>();
    rows->batches = open(path);
    return rows.release();
  } catch (const std::exception& failure) {
    tell(error, failure.what());
    return nullptr;
  }
}

int next_row(HeddleArrowRows* rows, const char** json, std::size_t* bytes, HeddleArrowError error) {
  try {
    if (!rows->next()) return 0;
    *json = rows->json.data();
    *bytes = rows->json.size();
    return 1;
  } catch (const NotJson& failure) {
    tell(error, failure.what());
    return -1;
  } catch (const std::exception& failure) {
    tell(error, failure.what());
    return -2;
  }
}

double fraction(const HeddleArrowRows* rows) { return rows->batches->fraction(); }

void close_rows(HeddleArrowRows* rows) { delete rows; }

}  // namespace

const HeddleArrow* heddle_arrow() {
  static constexpr HeddleArrow kFunctions{kHeddleArrowInterface, open_rows, next_row, fraction,
                                          close_rows};
  return &kFunctions;
}
