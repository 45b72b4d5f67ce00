#pragma once

#include <cstdint>

namespace kvrelay {

constexpr int64_t kGroup = 32;  // columns that share a scale, in weights and in activations

// Rows of activations as integers: a value is `codes * scales`, with codes from -127 to 127. The columns are
// filled up with zeros to whole groups.
struct QuantizedRows {
  int8_t* codes;     // [rows, groups * kGroup]
  float* scales;     // [rows, groups]: largest magnitude / 127
  float* sums;       // [rows, groups]: the sum of the values
  int32_t* offsets;  // [rows, groups]: -128 times the sum of the codes, which takes back the 128 of 8-bit weights
};

inline int64_t num_groups(int64_t columns) { return (columns + kGroup - 1) / kGroup; }

// x is [rows, columns], finite. Every group is rounded by itself, to the nearest, ties to even.
void quantize_rows(const float* x, int64_t rows, int64_t columns, QuantizedRows to, int64_t threads);

// To bfloat16, the nearest, ties to even: [rows, groups * kGroup], filled up with zeros. x is finite.
void round_rows(const float* x, int64_t rows, int64_t columns, uint16_t* to, int64_t threads);

}  // namespace kvrelay
