#pragma once

#include "ops/embedding/embedding.h"
