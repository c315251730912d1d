#pragma once
// Structured mutation for readers of JSON: blind changes rarely keep a text parseable.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <span>
#include <string_view>
#include <vector>

namespace clo {

// Inserts one of `fragments` ("key":value, or 1, with its comma) behind a random '{', '[' or ','
// of data[first..size). Returns the new size; the old one when nothing fits.
inline size_t insert_json_fragment(uint8_t* data, size_t first, size_t size, size_t max_size,
                                   std::span<const std::string_view> fragments,
                                   std::minstd_rand& random) {
  std::vector<size_t> places;
  for (size_t i = first; i < size; ++i) {
    if (data[i] == '{' || data[i] == '[' || data[i] == ',') places.push_back(i + 1);
  }
  const std::string_view fragment = fragments[random() % fragments.size()];
  if (places.empty() || size + fragment.size() > max_size) return size;
  const size_t place = places[random() % places.size()];
  std::memmove(data + place + fragment.size(), data + place, size - place);
  std::memcpy(data + place, fragment.data(), fragment.size());
  return size + fragment.size();
}

}  // namespace clo
