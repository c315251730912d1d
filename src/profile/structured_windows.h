#pragma once
// Windows without a model, for measuring speed and for tests: keys and queries of every head have a
// constant part of their own and differ in a few directions, as those of real heads do, and the
// queries of adjacent steps are alike. Their recall says that training works, nothing of a model.
#include <cstdint>
#include <vector>

#include "base/thread_pool.h"
#include "profile/trace.h"

namespace clo {

// Deterministic by seed; a head's rows do not depend on how many other heads and windows there are.
std::vector<WindowTrace> structured_windows(const KvShape& shape, int64_t windows,
                                            int64_t num_tokens, int64_t num_steps, int64_t num_runs,
                                            uint64_t seed, ThreadPool& pool);

}  // namespace clo
