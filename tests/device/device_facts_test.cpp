#include "device/device_facts.h"

#include <gtest/gtest.h>

namespace clo {
namespace {

TEST(DeviceFacts, AreUsableOrSayWhyNot) {
  const auto facts = device_facts();
  if (facts) {
    EXPECT_FALSE(facts->name.empty());
    EXPECT_GE(facts->capability_major, 8);
    EXPECT_GT(facts->num_multiprocessors, 0);
    EXPECT_GT(facts->memory_bytes, 0);
    EXPECT_LE(facts->free_memory_bytes, facts->memory_bytes);
    EXPECT_FALSE(facts->features.empty());
    for (const DeviceFeature& feature : facts->features) EXPECT_FALSE(feature.reason.empty());
  } else {
    EXPECT_EQ(facts.error().code, ErrorCode::kDeviceFault);
    EXPECT_NE(facts.error().message.find("--backend cpu"), std::string::npos);
  }
}

}  // namespace
}  // namespace clo
