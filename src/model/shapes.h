#pragma once
// Shapes of published models, for measurements without their files. From their config.json.
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "io/model_config.h"

namespace clo {

std::vector<std::string> shape_names();
// Fails: kBadFlag, naming the shapes there are.
Result<ModelConfig> model_shape(std::string_view name);

}  // namespace clo
