// Whole runs of `heddle rl` whose reference follows the policy.
#include "rl/rl_fixture.h"
