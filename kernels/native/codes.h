// Floats as integers from -127 to 127, of which a unit is worth the same in all of a row.
#pragma once

#include <algorithm>

#include "vector.h"

namespace kvrelay::vectors {

/// Magnitudes, as integers, order as the floats do; what is not a number is above all others.
inline Ints magnitudes(Floats value) { return (Ints)value & splat(int32_t(0x7fffffff)); }

inline float largest_magnitude(Ints values) {
  int32_t lanes[kLanes];
  std::memcpy(lanes, &values, sizeof lanes);
  const int32_t most = *std::max_element(lanes, lanes + kLanes);
  float magnitude;
  std::memcpy(&magnitude, &most, sizeof magnitude);
  return magnitude;
}

/// Writes the codes of a row and gives what a unit is worth: the largest magnitude / 127, which is not finite if a
/// value is not. Where that makes no codes they are 0, which the lowest byte of no number is.
inline float encode(const float* x, int64_t size, int8_t* codes) {
  Ints most = {};
  int64_t first = 0;
  for (; first + kLanes <= size; first += kLanes) {
    const Ints each = magnitudes(load(x + first));
    most = each > most ? each : most;
  }
  const int rest = int(size - first);
  if (rest) {
    const Ints each = magnitudes(load_part(x + first, rest));
    most = each > most ? each : most;
  }
  const float magnitude = largest_magnitude(most);
  const Floats inverse = splat(127.0f / magnitude);
  for (first = 0; first + kLanes <= size; first += kLanes) store(codes + first, load(x + first) * inverse);
  if (rest) store_part(codes + first, load_part(x + first, rest) * inverse, rest);
  return magnitude / 127.0f;
}

}  // namespace kvrelay::vectors
