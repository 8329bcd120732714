#include "runtime/context.h"

#include "base/errors.h"

namespace heddle::runtime {

c10::ScalarType parse_dtype(const std::string& text, const char* key) {
  if (text == "float32" || text == "fp32") return c10::ScalarType::Float;
  if (text == "bfloat16" || text == "bf16") return c10::ScalarType::BFloat16;
  if (text == "float64" || text == "fp64") return c10::ScalarType::Double;
  if (text == "float16" || text == "fp16") return c10::ScalarType::Half;
  throw_error<ConfigError>("{} is '{}': expected float32, bfloat16 or float64", key, text);
}

const char* dtype_name(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::ScalarType::Float:
      return "float32";
    case c10::ScalarType::BFloat16:
      return "bfloat16";
    case c10::ScalarType::Double:
      return "float64";
    case c10::ScalarType::Half:
      return "float16";
    default:
      return c10::toString(dtype);
  }
}

}  // namespace heddle::runtime
