// Weights and activations as integers in groups of 32 columns. The products of a group are exact; the groups are added
// up one after the other, each with one fused operation for the minima and one for the products.
#include "amx.h"
#include "linear_tiles.h"

namespace kvrelay {
namespace {

#if defined(__AMX_INT8__)
constexpr bool kHasAmx = true;
#else
constexpr bool kHasAmx = false;
#endif
constexpr int64_t kVector = 4 * kLanes;  // bytes that are multiplied at once: four columns of sixteen outputs
constexpr int64_t kAhead = 4096;         // bytes that many rows fetch 4-bit weights ahead; 8-bit ones do not gain

struct Int4 {
  static constexpr bool kAmx = kHasAmx;
  QuantizedRows x;
  int64_t groups;
  const uint8_t* weights;

  int64_t tile_bytes() const { return groups * 5 * kVector; }

  template <int R>
  inline void multiply(int64_t row, int64_t tile, Floats (&products)[R]) const {
    const uint8_t* codes = weights + tile * tile_bytes();
    for (int r = 0; r < R; r++) products[r] = floats(0);
    for (int64_t at = row * groups; at < (row + 1) * groups; at++, codes += 5 * kVector) {
      Ints dots[R];
      for (int r = 0; r < R; r++) dots[r] = ints(0);
      for (int64_t i = 0; i < 4; i++) {
        if (R >= 8) __builtin_prefetch(codes + i * kVector + kAhead);
        const Bytes both = load_bytes(codes + i * kVector), low = low_nibbles(both), high = high_nibbles(both);
        for (int r = 0; r < R; r++) {
          const int8_t* four = x.codes + (at + r * groups) * kGroup + 4 * i;
          dots[r] = dot_nibbles(high, four + kGroup / 2, dot_nibbles(low, four, dots[r]));
        }
      }
      add_group(at, codes, products, [&](int r) { return dots[r]; });
    }
  }

  inline void multiply_by_amx(int64_t row, int64_t tile, Floats (&products)[kAmxRows]) const {
    const uint8_t* codes = weights + tile * tile_bytes();
    alignas(64) uint8_t unpacked[2][8 * kVector];
    alignas(64) AmxDots dots;
    for (int r = 0; r < kAmxRows; r++) products[r] = floats(0);
    for (int64_t group = 0; group < groups; group += 2) {
      const int64_t at = row * groups + group, num = groups - group < 2 ? 1 : 2;
      for (int64_t i = 0; i < num; i++) unpack(codes + (group + i) * 5 * kVector, unpacked[i]);
      const int8_t* from = x.codes + at * kGroup;
      amx_dots(from, from + (num - 1) * kGroup, groups * kGroup, unpacked[0], unpacked[num - 1], dots);
      for (int64_t i = 0; i < num; i++) {
        add_group(at + i, codes + (group + i) * 5 * kVector, products, [&](int r) { return load_ints(dots[i][r]); });
      }
    }
  }

 private:
  static inline void unpack(const uint8_t* codes, uint8_t* to) {
    for (int64_t i = 0; i < 4; i++) {
      const Bytes both = load_bytes(codes + i * kVector);
      store_bytes(to + i * kVector, low_nibbles(both));
      store_bytes(to + (i + 4) * kVector, high_nibbles(both));
    }
  }

  template <int R, class Dots>
  inline void add_group(int64_t at, const uint8_t* codes, Floats (&products)[R], Dots dots) const {
    const Floats scales = load_halves(codes + 4 * kVector), minima = load_halves(codes + 4 * kVector + 2 * kLanes);
    for (int r = 0; r < R; r++) {
      products[r] = multiply_add(minima, floats(x.sums[at + r * groups]), products[r]);
      const Floats scale = times(scales, floats(x.scales[at + r * groups]));
      products[r] = multiply_add(scale, to_floats(dots(r)), products[r]);
    }
  }
};

struct Int8 {
  static constexpr bool kAmx = kHasAmx;
  QuantizedRows x;
  int64_t groups;
  const uint8_t* weights;

  int64_t tile_bytes() const { return (groups + 1) / 2 * 17 * kVector; }

  template <int R>
  inline void multiply(int64_t row, int64_t tile, Floats (&products)[R]) const {
    for (int r = 0; r < R; r++) products[r] = floats(0);
    for (int64_t group = 0; group < groups; group++) {
      const uint8_t* pair = weights + tile * tile_bytes() + group / 2 * 17 * kVector;
      const uint8_t* codes = pair + group % 2 * 8 * kVector;
      const int64_t at = row * groups + group;
      Ints dots[R];
      for (int r = 0; r < R; r++) dots[r] = ints(x.offsets[at + r * groups]);
      for (int64_t i = 0; i < 8; i++) {
        const Bytes bytes = load_bytes(codes + i * kVector);
        for (int r = 0; r < R; r++) {
          dots[r] = dot(bytes, x.codes + (at + r * groups) * kGroup + 4 * i, dots[r]);
        }
      }
      add_group(at, pair + 16 * kVector + group % 2 * 2 * kLanes, products, [&](int r) { return dots[r]; });
    }
  }

  inline void multiply_by_amx(int64_t row, int64_t tile, Floats (&products)[kAmxRows]) const {
    alignas(64) AmxDots dots;
    for (int r = 0; r < kAmxRows; r++) products[r] = floats(0);
    for (int64_t group = 0; group < groups; group += 2) {
      const uint8_t* pair = weights + tile * tile_bytes() + group / 2 * 17 * kVector;
      const int64_t at = row * groups + group, num = groups - group < 2 ? 1 : 2;
      const int8_t* from = x.codes + at * kGroup;
      amx_dots(from, from + (num - 1) * kGroup, groups * kGroup, pair, pair + 8 * kVector, dots);
      for (int64_t i = 0; i < num; i++) {
        add_group(at + i, pair + 16 * kVector + i * 2 * kLanes, products, [&](int r) {
          return plus(ints(x.offsets[at + i + r * groups]), load_ints(dots[i][r]));
        });
      }
    }
  }

 private:
  template <int R, class Dots>
  inline void add_group(int64_t at, const uint8_t* halves, Floats (&products)[R], Dots dots) const {
    const Floats scales = load_halves(halves);
    for (int r = 0; r < R; r++) {
      const Floats scale = times(scales, floats(x.scales[at + r * groups]));
      products[r] = multiply_add(scale, to_floats(dots(r)), products[r]);
    }
  }
};

}  // namespace

void linear_int4(QuantizedRows x, int64_t rows, int64_t columns, const uint8_t* weights, Outputs to, int64_t threads) {
  multiply_all(Int4{x, num_groups(columns), weights}, rows, to, threads);
}

void linear_int8(QuantizedRows x, int64_t rows, int64_t columns, const uint8_t* weights, Outputs to, int64_t threads) {
  multiply_all(Int8{x, num_groups(columns), weights}, rows, to, threads);
}

}  // namespace kvrelay
