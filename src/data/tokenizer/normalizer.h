#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace heddle::data {

enum class NormalForm { kNfc, kNfd, kNfkc, kNfkd };

/// Name in tokenizer.json ("NFC", ...) -> form. Returns false for any other name.
bool parse_normal_form(std::string_view name, NormalForm& form);

/// Applies the forms one after the other to valid UTF-8. Returns false, and leaves `out` alone, if
/// nothing changes. Characters that Unicode 9 did not have are left alone, as the `tokenizers`
/// library's tables do.
bool normalize(const std::vector<NormalForm>& forms, std::string_view text, std::string& out);

}  // namespace heddle::data
