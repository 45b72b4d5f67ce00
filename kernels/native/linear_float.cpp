// Weights as floating-point numbers: products are added up column after column (of bfloat16 pair after pair).
#include "linear_tiles.h"

namespace kvrelay {
namespace {

struct Bf16 {
  const uint16_t* x;
  int64_t pairs;
  const uint16_t* weights;
  int64_t tile_bytes() const { return pairs * 4 * kLanes; }

  template <int R>
  inline void multiply(int64_t row, int64_t tile, Floats (&products)[R]) const {
    const uint16_t* from = weights + tile * pairs * 2 * kLanes;
    for (int r = 0; r < R; r++) products[r] = floats(0);
    for (int64_t at = row * pairs; at < (row + 1) * pairs; at++, from += 2 * kLanes) {
      const Bytes two = load_bytes(from);
      for (int r = 0; r < R; r++) products[r] = dot_bf16(two, x + (at + r * pairs) * 2, products[r]);
    }
  }
};

struct Fp32 {
  const float* x;
  int64_t columns;
  const float* weights;
  int64_t tile_bytes() const { return columns * 4 * kLanes; }

  template <int R>
  inline void multiply(int64_t row, int64_t tile, Floats (&products)[R]) const {
    const float* from = weights + tile * columns * kLanes;
    for (int r = 0; r < R; r++) products[r] = floats(0);
    for (int64_t at = row * columns; at < (row + 1) * columns; at++, from += kLanes) {
      const Floats one = load(from);
      for (int r = 0; r < R; r++) products[r] = multiply_add(one, floats(x[at + r * columns]), products[r]);
    }
  }
};

}  // namespace

void linear_bf16(const uint16_t* x, int64_t rows, int64_t columns, const uint16_t* weights, Outputs to,
                 int64_t threads) {
  multiply_all(Bf16{x, (columns + 1) / 2, weights}, rows, to, threads);
}

void linear_fp32(const float* x, int64_t rows, int64_t columns, const float* weights, Outputs to, int64_t threads) {
  multiply_all(Fp32{x, columns, weights}, rows, to, threads);
}

}  // namespace kvrelay
