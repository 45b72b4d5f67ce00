#pragma once

#include <cstdint>

#include "quantize.h"

namespace kvrelay {

// Where products go: [rows, outputs]. With `bias`, [outputs] or null, and added to what is there if `add`.
struct Outputs {
  float* values;
  const float* bias;
  int64_t outputs;
  bool add;
};

// Weights lie in tiles of 16 outputs, a tile after the other, so that one row reads them as one stream. The last tile
// is filled up with outputs of zeros, and groups (or pairs) of columns with columns of zeros.
//
// int4: for each group of 32 columns 4 x 64 bytes of codes, in byte [i][4 * output + j] column 4 * i + j in the low and
// 16 + 4 * i + j in the high half; then 16 scales and 16 minima in float16. w = scale * code + minimum.
void linear_int4(QuantizedRows x, int64_t rows, int64_t columns, const uint8_t* weights, Outputs to, int64_t threads);

// int8: for each pair of groups, of which the last may be empty, twice 8 x 64 bytes of codes, in byte [i][4 * output +
// j] column 4 * i + j; then twice 16 scales in float16. w = scale * (code - 128).
void linear_int8(QuantizedRows x, int64_t rows, int64_t columns, const uint8_t* weights, Outputs to, int64_t threads);

// bf16: for each pair of columns 16 x 2 weights. x is [rows, groups * kGroup], rounded to bfloat16 and filled up with
// zeros; up to a multiple of 16 rows are read, though nothing comes of those beyond.
void linear_bf16(const uint16_t* x, int64_t rows, int64_t columns, const uint16_t* weights, Outputs to,
                 int64_t threads);

// fp32: for each column 16 weights. x is [rows, columns].
void linear_fp32(const float* x, int64_t rows, int64_t columns, const float* weights, Outputs to, int64_t threads);

enum class Form : int64_t { kInt4, kInt8, kBf16, kFp32 };

// A whole layer: x is [rows, columns], finite, and is quantised or rounded into the workspace first.
void linear(Form form, const float* x, int64_t rows, int64_t columns, const void* weights, Outputs to, void* workspace,
            int64_t threads);

// Whatever the form, for whole blocks of 16 rows, which are what AMX reads.
constexpr int64_t kWorkspaceBytes = 64;  // for a row and a group of columns
static_assert(kWorkspaceBytes >= kGroup * static_cast<int64_t>(sizeof(uint16_t)), "as bfloat16");
static_assert(kWorkspaceBytes >= kGroup + 2 * static_cast<int64_t>(sizeof(float)) + 4, "as QuantizedRows");

inline int64_t workspace_bytes(int64_t rows, int64_t columns) {
  return (rows + 15) / 16 * 16 * num_groups(columns) * kWorkspaceBytes;
}

}  // namespace kvrelay
