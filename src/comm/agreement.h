#pragma once

#include <string>
#include <vector>

namespace heddle::comm {

class World;

/// Something that must be the same on all ranks of a job.
struct Fact {
  std::string name;        ///< "optim.lr"
  std::string value;       ///< Compared with the others' value.
  std::string shown = {};  ///< Stands for the value in messages; "": the value itself.
};

/// Contents that are compared by their hash; `where` they come from is shown with a part of it.
Fact content_fact(std::string name, std::string hash, const std::string& where);

/// "optim.lr is 0.001 on rank 0 and 0.05 on ranks 1, 4 to 7": what differs between the ranks, whose
/// facts come in the order of their numbers; "" if nothing does. A fact that a rank lacks differs.
std::string disagreement(const std::vector<std::vector<Fact>>& ranks);

/// Returns when every rank has called it with the same facts about `subject` ("configuration").
/// Otherwise throws, within a second of the last rank's call and on all of them, the same
/// ConfigError: what differs, the values, and which rank has which. Throws CommError if another
/// rank fails or does not call it before the World's deadline.
void require_agreement(World& world, const std::string& subject, const std::vector<Fact>& facts);

}  // namespace heddle::comm
