// Weights as floating-point numbers: products are added up column after column (of bfloat16 pair after pair).
#include "amx.h"
#include "linear_tiles.h"

namespace kvrelay {
namespace {

// Rows that share a line of weights multiply so long with it that the processor no longer looks far enough ahead by
// itself; one row alone it serves well. Measured on Zen 4: from half of what memory gives to nearly all.
constexpr int64_t kAhead = 16384;  // bytes

template <int R>
inline void fetch_ahead(const void* weights) {
  if (R >= 4) __builtin_prefetch(static_cast<const char*>(weights) + kAhead, 0, 2);
}

struct Bf16 {
  static constexpr bool kAmx = false;
  const uint16_t* x;
  int64_t width;  // columns of a row of x
  int64_t pairs;
  const uint16_t* weights;
  int64_t tile_bytes() const { return pairs * 4 * kLanes; }

  template <int R>
  inline void multiply(int64_t row, int64_t tile, Floats (&products)[R]) const {
    const uint16_t* from = weights + tile * pairs * 2 * kLanes;
    for (int r = 0; r < R; r++) products[r] = floats(0);
    for (int64_t at = row * width; at < row * width + 2 * pairs; at += 2, from += 2 * kLanes) {
      fetch_ahead<R>(from);
      const Bytes two = load_bytes(from);
      for (int r = 0; r < R; r++) products[r] = dot_bf16(two, x + at + r * width, products[r]);
    }
  }
};

struct Fp32 {
  static constexpr bool kAmx = false;
  const float* x;
  int64_t columns;
  const float* weights;
  int64_t tile_bytes() const { return columns * 4 * kLanes; }

  template <int R>
  inline void multiply(int64_t row, int64_t tile, Floats (&products)[R]) const {
    const float* from = weights + tile * columns * kLanes;
    for (int r = 0; r < R; r++) products[r] = floats(0);
    for (int64_t at = row * columns; at < (row + 1) * columns; at++, from += kLanes) {
      fetch_ahead<R>(from);
      const Floats one = load(from);
      for (int r = 0; r < R; r++) products[r] = multiply_add(one, floats(x[at + r * columns]), products[r]);
    }
  }
};

template <int B>
void write_blocks(const Bf16& kernel, int64_t row, int64_t rows, int64_t tile, Outputs to) {
  alignas(64) float sums[4][kAmxRows][kLanes];
  const uint16_t* weights = kernel.weights + tile * kernel.pairs * 2 * kLanes;
  amx_bf16<B>(kernel.x + row * kernel.width, kernel.width, weights, kernel.pairs, sums);
  for (int64_t i = 0; i < B * kAmxRows && row + i < rows; i++) {
    write(to, row + i, tile, load(sums[i / kAmxRows][i % kAmxRows]));
  }
}

// All rows in blocks of 16, also if there are fewer: reading the weights takes longer than multiplying them.
void multiply_by_amx(const Bf16& kernel, int64_t rows, Outputs to, int64_t threads) {
  const int64_t tiles = (to.outputs + kLanes - 1) / kLanes;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    const AmxTiles while_multiplying(true, 2 * kGroup);
    for (int64_t panel = 0; panel < rows; panel += kPanel) {
      const int64_t end = panel + kPanel < rows ? panel + kPanel : rows;
#pragma omp for schedule(static) nowait
      for (int64_t tile = 0; tile < tiles; tile++) {
        int64_t row = panel;
        for (; end - row > 3 * kAmxRows; row += 4 * kAmxRows) write_blocks<4>(kernel, row, end, tile, to);
        for (; end - row > kAmxRows; row += 2 * kAmxRows) write_blocks<2>(kernel, row, end, tile, to);
        if (row < end) write_blocks<1>(kernel, row, end, tile, to);
      }
    }
  }
}

}  // namespace

void linear_bf16(const uint16_t* x, int64_t rows, int64_t columns, const uint16_t* weights, Outputs to,
                 int64_t threads) {
  const Bf16 kernel{x, num_groups(columns) * kGroup, (columns + 1) / 2, weights};
  if (has_amx()) return multiply_by_amx(kernel, rows, to, threads);
  multiply_all(kernel, rows, to, threads);
}

void linear_fp32(const float* x, int64_t rows, int64_t columns, const float* weights, Outputs to, int64_t threads) {
  multiply_all(Fp32{x, columns, weights}, rows, to, threads);
}

}  // namespace kvrelay
