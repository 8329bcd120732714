#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "serve/tinker/wire.h"
#include "tenants/trainer.h"

namespace heddle::serve::tinker {

/// Input of a datum: one number a token, or a matrix [tokens,width] that may be in CSR form.
struct Cells {
  std::vector<double> numbers;
  std::int64_t width = 0;            ///< 0: one number a token.
  std::vector<std::int64_t> places;  ///< [numbers] ascending, row by row; empty without a width.

  bool is_matrix() const { return width > 0; }
};

/// Throws HttpError 400 that begins with `where` for a tensor that is neither.
Cells cells_of(const Tensor& tensor, std::size_t tokens, const std::string& where);

/// Numbers of an input at the targets' cells: 0 where a CSR matrix has none. Throws HttpError 400
/// for another shape, and for numbers other than 0 where there is no target.
std::vector<float> at_cells(const Cells& input, const tenants::Datum& targets,
                            const std::string& where);

}  // namespace heddle::serve::tinker
