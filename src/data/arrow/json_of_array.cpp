#include "data/arrow/json_of_array.h"

#include <charconv>
#include <cmath>
#include <string_view>

#include <arrow/api.h>
#include <arrow/extension_type.h>
#include <arrow/util/float16.h>

namespace heddle::arrow_rows {
namespace {

using arrow::Type;

/// Decodes no deeper than the readers of rows do.
constexpr int kDeepest = 100;

class Writer {
 public:
  Writer(const std::string& column, std::string& out) : column_(column), out_(out) {}

  void write(const arrow::Array& array, std::int64_t i, int depth) {
    if (depth > kDeepest) fail("is nested more than 100 deep");
    if (array.IsNull(i)) {
      out_ += "null";
      return;
    }
    switch (array.type_id()) {
      case Type::NA:
        out_ += "null";
        break;
      case Type::BOOL:
        out_ += of<arrow::BooleanArray>(array).Value(i) ? "true" : "false";
        break;
      case Type::INT8:
        number(of<arrow::Int8Array>(array).Value(i));
        break;
      case Type::INT16:
        number(of<arrow::Int16Array>(array).Value(i));
        break;
      case Type::INT32:
        number(of<arrow::Int32Array>(array).Value(i));
        break;
      case Type::INT64:
        number(of<arrow::Int64Array>(array).Value(i));
        break;
      case Type::UINT8:
        number(of<arrow::UInt8Array>(array).Value(i));
        break;
      case Type::UINT16:
        number(of<arrow::UInt16Array>(array).Value(i));
        break;
      case Type::UINT32:
        number(of<arrow::UInt32Array>(array).Value(i));
        break;
      case Type::UINT64:
        number(of<arrow::UInt64Array>(array).Value(i));
        break;
      case Type::HALF_FLOAT:
        real(arrow::util::Float16::FromBits(of<arrow::HalfFloatArray>(array).Value(i)).ToDouble());
        break;
      case Type::FLOAT:
        real(of<arrow::FloatArray>(array).Value(i));
        break;
      case Type::DOUBLE:
        real(of<arrow::DoubleArray>(array).Value(i));
        break;
      case Type::STRING:
        append_json_string(of<arrow::StringArray>(array).GetView(i), out_);
        break;
      case Type::LARGE_STRING:
        append_json_string(of<arrow::LargeStringArray>(array).GetView(i), out_);
        break;
      case Type::STRING_VIEW:
        append_json_string(of<arrow::StringViewArray>(array).GetView(i), out_);
        break;
      case Type::DICTIONARY: {
        const auto& dictionary = of<arrow::DictionaryArray>(array);
        write(*dictionary.dictionary(), dictionary.GetValueIndex(i), depth + 1);
        break;
      }
      case Type::LIST:
        items<arrow::ListArray>(array, i, depth);
        break;
      case Type::LARGE_LIST:
        items<arrow::LargeListArray>(array, i, depth);
        break;
      case Type::FIXED_SIZE_LIST:
        items<arrow::FixedSizeListArray>(array, i, depth);
        break;
      case Type::LIST_VIEW:
        items<arrow::ListViewArray>(array, i, depth);
        break;
      case Type::LARGE_LIST_VIEW:
        items<arrow::LargeListViewArray>(array, i, depth);
        break;
      case Type::MAP:
        map(of<arrow::MapArray>(array), i, depth);
        break;
      case Type::STRUCT:
        fields(of<arrow::StructArray>(array), i, depth);
        break;
      case Type::EXTENSION:
        write(*of<arrow::ExtensionArray>(array).storage(), i, depth + 1);
        break;
      case Type::DECIMAL32:
      case Type::DECIMAL64:
      case Type::DECIMAL128:
      case Type::DECIMAL256:
        out_ += scalar_text(array, i);
        break;
      case Type::DATE32:
      case Type::DATE64:
      case Type::TIME32:
      case Type::TIME64:
      case Type::TIMESTAMP:
        append_json_string(scalar_text(array, i), out_);
        break;
      default:
        fail("is of type " + array.type()->ToString() +
             ", which has no form in JSON: leave the column out");
    }
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    throw NotJson("column '" + column_ + "' " + what);
  }
  template <class T>
  static const T& of(const arrow::Array& array) {
    return static_cast<const T&>(array);
  }
  template <class T>
  void number(T value) {
    char digits[24];
    out_.append(digits, std::to_chars(digits, digits + sizeof digits, value).ptr);
  }
  /// The shortest text that reads back as the same double, which stays a fraction: 2.0, not 2.
  void real(double value) {
    if (!std::isfinite(value)) {
      fail(std::isnan(value) ? "is NaN, which JSON has not: write null"
                             : "is infinite, which JSON has not: write null");
    }
    char digits[32];
    const std::string_view text(
        digits, static_cast<std::size_t>(std::to_chars(digits, digits + sizeof digits, value).ptr -
                                         digits));
    out_ += text;
    if (text.find_first_of(".e") == std::string_view::npos) out_ += ".0";
  }
  template <class List>
  void items(const arrow::Array& array, std::int64_t i, int depth) {
    const List& list = of<List>(array);
    const arrow::Array& values = *list.values();
    const std::int64_t begin = list.value_offset(i), end = begin + list.value_length(i);
    out_ += '[';
    for (std::int64_t k = begin; k < end; ++k) {
      if (k > begin) out_ += ',';
      write(values, k, depth + 1);
    }
    out_ += ']';
  }
  void map(const arrow::MapArray& array, std::int64_t i, int depth) {
    const arrow::Array& keys = *array.keys();
    if (keys.type_id() != Type::STRING && keys.type_id() != Type::LARGE_STRING)
      fail("is a map with keys of type " + keys.type()->ToString() + ", JSON has texts");
    const std::int64_t begin = array.value_offset(i), end = begin + array.value_length(i);
    out_ += '{';
    for (std::int64_t k = begin; k < end; ++k) {
      if (k > begin) out_ += ',';
      write(keys, k, depth + 1);
      out_ += ':';
      write(*array.items(), k, depth + 1);
    }
    out_ += '}';
  }
  void fields(const arrow::StructArray& array, std::int64_t i, int depth) {
    out_ += '{';
    for (int f = 0; f < array.num_fields(); ++f) {
      if (f > 0) out_ += ',';
      append_json_string(array.struct_type()->field(f)->name(), out_);
      out_ += ':';
      write(*array.field(f), i, depth + 1);
    }
    out_ += '}';
  }
  std::string scalar_text(const arrow::Array& array, std::int64_t i) const {
    const auto scalar = array.GetScalar(i);
    if (!scalar.ok()) fail("cannot be read: " + scalar.status().message());
    return (*scalar)->ToString();
  }

  const std::string& column_;
  std::string& out_;
};

}  // namespace

void append_json(const arrow::Array& array, std::int64_t index, const std::string& column,
                 std::string& out) {
  Writer(column, out).write(array, index, 0);
}

void append_json_string(std::string_view text, std::string& out) {
  constexpr char kHex[] = "0123456789abcdef";
  out += '"';
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (byte < 0x20) {
      out += "\\u00";
      out += kHex[byte >> 4];
      out += kHex[byte & 15];
    } else {
      out += c;
    }
  }
  out += '"';
}

}  // namespace heddle::arrow_rows
