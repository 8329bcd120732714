#pragma once

namespace heddle::comm {

/// Key in the store of a part of a job: why its ranks must not wait for each other any more, as a
/// sentence. Set when the part has lost a rank and the job goes on. Every wait in a collective of
/// the part then ends with this sentence.
inline constexpr const char* kPartLossKey = "lost";

}  // namespace heddle::comm
