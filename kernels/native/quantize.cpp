#include "quantize.h"

#include <cstring>

#include "entry.h"
#include "lanes.h"

namespace kvrelay {
namespace {

void quantize_group(const float* x, int8_t* codes, float* scale, float* total, int32_t* offset) {
  const Floats low = load(x), high = load(x + kLanes);
  const float most = largest(larger_magnitude(low, high));
  const Floats inverse = floats(most > 0 ? 127.0f / most : 0.0f);
  const Ints low_codes = round_to_ints(times(low, inverse)), high_codes = round_to_ints(times(high, inverse));
  const int32_t code_sum = sum(plus(low_codes, high_codes));
  store_as_bytes(codes, low_codes);
  store_as_bytes(codes + kLanes, high_codes);
  *scale = most / 127.0f;
  *total = *scale * static_cast<float>(code_sum);
  *offset = -128 * code_sum;
}

}  // namespace

void quantize_rows(const float* x, int64_t rows, int64_t columns, QuantizedRows to, int64_t threads) {
  const int64_t groups = num_groups(columns), whole = columns / kGroup;
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows > 1)
  for (int64_t row = 0; row < rows; row++) {
    for (int64_t group = 0; group < groups; group++) {
      const int64_t i = row * groups + group;
      const float* from = x + row * columns + group * kGroup;
      float padded[kGroup] = {};
      if (group == whole) from = static_cast<float*>(std::memcpy(padded, from, (columns - whole * kGroup) * 4));
      quantize_group(from, to.codes + i * kGroup, to.scales + i, to.sums + i, to.offsets + i);
    }
  }
}

void round_rows(const float* x, int64_t rows, int64_t columns, uint16_t* to, int64_t threads) {
  const int64_t width = num_groups(columns) * kGroup;
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows > 1)
  for (int64_t row = 0; row < rows; row++) {
    const float* from = x + row * columns;
    uint16_t* place = to + row * width;
    std::memset(place + columns, 0, static_cast<size_t>(width - columns) * 2);
    for (int64_t i = 0; i < columns; i++) {
      uint32_t bits;
      std::memcpy(&bits, from + i, 4);
      place[i] = static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
  }
}

}  // namespace kvrelay

KVRELAY_ENTRY void kvrelay_quantize_rows(const float* x, int64_t rows, int64_t columns, int8_t* codes, float* scales,
                                         float* sums, int32_t* offsets, int64_t threads) {
  kvrelay::quantize_rows(x, rows, columns, {codes, scales, sums, offsets}, threads);
}
