// How all linear layers walk over rows and tiles. A product of one row with one tile has its own accumulators and its
// own order of columns, so that nothing beside it changes its bits.
#pragma once

#include "amx.h"
#include "lanes.h"
#include "linear.h"

namespace kvrelay {

#if defined(__AVX512F__)
constexpr int kMaxRows = 8;  // rows that share each load of weights: as many as keep their accumulators in registers
#elif defined(__AVX2__)
constexpr int kMaxRows = 4;
#else
constexpr int kMaxRows = 2;
#endif
constexpr int64_t kPanel = 128;  // rows whose activations stay in the second-level cache while tiles pass by

inline void write(Outputs to, int64_t row, int64_t tile, Floats product) {
  const int64_t first = tile * kLanes, left = to.outputs - first;
  float* place = to.values + row * to.outputs + first;
  if (left >= kLanes) {
    if (to.bias) product = plus(product, load(to.bias + first));
    if (to.add) product = plus(load(place), product);
    store(place, product);
    return;
  }
  float last[kLanes];
  store(last, product);
  for (int64_t i = 0; i < left; i++) {
    const float value = to.bias ? last[i] + to.bias[first + i] : last[i];
    place[i] = to.add ? place[i] + value : value;
  }
}

// While several blocks of rows pass by one tile, each has a part of the next tile fetched into the second-level cache.
// A single block reads its weights as fast as memory gives them, and would only be disturbed.
template <class Kernel>
inline void fetch_next(const Kernel& kernel, int64_t tile, int64_t block, int64_t blocks) {
  if (blocks < 2) return;
  const int64_t bytes = kernel.tile_bytes(), part = (bytes / 64 + blocks) / blocks * 64;
  const char* next = reinterpret_cast<const char*>(kernel.weights) + (tile + 1) * bytes + block * part;
  for (int64_t i = 0; i < part; i += 64) __builtin_prefetch(next + i, 0, 2);
}

// Kernel has `weights`, `int64_t tile_bytes() const` and, for R rows at once,
// `template <int R> void multiply(int64_t row, int64_t tile, Floats (&products)[R]) const`. If it has `kAmx`, then
// `multiply_by_amx` too, which is the same for kAmxRows rows.
template <int R, class Kernel>
inline void multiply_rows(const Kernel& kernel, int64_t row, int64_t tile, Outputs to) {
  Floats products[R];
  if constexpr (Kernel::kAmx && R == kAmxRows) {
    kernel.multiply_by_amx(row, tile, products);
  } else {
    kernel.template multiply<R>(row, tile, products);
  }
  for (int i = 0; i < R; i++) write(to, row + i, tile, products[i]);
}

template <int R, class Kernel>
inline void multiply_rest(const Kernel& kernel, int64_t row, int64_t rows, int64_t tile, Outputs to) {
  if (rows == R) return multiply_rows<R>(kernel, row, tile, to);
  if constexpr (R > 1) multiply_rest<R - 1>(kernel, row, rows, tile, to);
}

// All whole blocks of R rows up to `end`; returns the row behind them.
template <int R, class Kernel>
inline int64_t multiply_blocks(const Kernel& kernel, int64_t row, int64_t end, int64_t tile, Outputs to) {
  const int64_t blocks = (end - row) / R;
  for (int64_t block = 0; block < blocks; block++, row += R) {
    fetch_next(kernel, tile, block, blocks);
    multiply_rows<R>(kernel, row, tile, to);
  }
  return row;
}

template <class Kernel>
void multiply_all(const Kernel& kernel, int64_t rows, Outputs to, int64_t threads) {
  const int64_t tiles = (to.outputs + kLanes - 1) / kLanes;
  const bool amx = Kernel::kAmx && rows >= kAmxRows && has_amx();
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    const AmxTiles while_multiplying(amx, kGroup);
    for (int64_t panel = 0; panel < rows; panel += kPanel) {
      const int64_t end = panel + kPanel < rows ? panel + kPanel : rows;
#pragma omp for schedule(static) nowait
      for (int64_t tile = 0; tile < tiles; tile++) {
        int64_t row = amx ? multiply_blocks<kAmxRows>(kernel, panel, end, tile, to) : panel;
        row = multiply_blocks<kMaxRows>(kernel, row, end, tile, to);
        multiply_rest<kMaxRows - 1>(kernel, row, end - row, tile, to);
      }
    }
  }
}

}  // namespace kvrelay
