#pragma once
// The recipe that HATA (arXiv 2506.02572) trains its projections with, to compare with. Inside this
// room only; see train_hash.h.
#include <span>
#include <vector>

#include "profile/train_hash.h"
#include "profile/training_parts.h"

namespace clo::training {

// W [head_dim + 1, bits], without a bias, from standard normal values.
std::vector<float> train_published(const HeadShape& shape, std::span<const HeadSample> samples,
                                   const PolicyOptions& policy, const HashTraining& training,
                                   Random& random);

}  // namespace clo::training
