#pragma once

#include <string>

#include "base/files.h"
#include "hub/repository.h"

/// Settings of hubs in the environment, under the names that huggingface_hub and modelscope read.
namespace heddle::hub {

using files::Path;

/// HF_ENDPOINT or https://huggingface.co; MODELSCOPE_DOMAIN or https://www.modelscope.cn. Without a
/// slash at its end, and without the name and password that the variable may hold: no message and
/// no file shows them.
std::string endpoint(Hub hub);

/// Name and password for the endpoint, "ann:secret", as they stand in the variable; "" without.
std::string endpoint_user(Hub hub);

/// HF_TOKEN, else what `hf auth login` stored (HF_TOKEN_PATH, HF_HOME/token); MODELSCOPE_API_TOKEN.
/// "" without one.
std::string token(Hub hub);

/// HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE: nothing is asked of a network.
bool is_offline();

/// A file of certificate authorities that the user named for Python's tools (REQUESTS_CA_BUNDLE,
/// CURL_CA_BUNDLE, SSL_CERT_FILE), or "".
std::string certificate_file();

/// MODELSCOPE_CACHE, else ~/.cache/modelscope/hub. The Hugging Face cache is
/// files::hugging_face_cache().
Path modelscope_cache();

}  // namespace heddle::hub
