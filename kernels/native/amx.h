// Tiles of AMX: 16 rows of activations times one tile of weights at once. In integers, so that the bits are those of the
// vectors of `lanes.h`; in bfloat16 sums are rounded in another order, so that all rows take this way or none.
#pragma once

#include "lanes.h"
#include "quantize.h"

#if defined(__AMX_INT8__)
#include <sys/syscall.h>
#include <unistd.h>

#include <cstring>
#endif

namespace kvrelay {

constexpr int64_t kAmxRows = 16;
using AmxDots = int32_t[2][kAmxRows][kLanes];  // of two groups

#if defined(__AMX_INT8__)

// Linux wants to be asked before a process uses tiles; where it refuses, vectors do all.
inline bool has_amx() {
  constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool granted = syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
  return granted;
}

struct alignas(64) AmxShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// Sums of 16 x 16 numbers are tiles 0 to 3, 16 rows of activations 4 and 5, weights of 16 outputs 6 and 7.
inline AmxShapes shapes_for(int64_t x_row_bytes) {
  AmxShapes shapes;
  for (int i = 0; i < 8; i++) {
    const bool is_x = i == 4 || i == 5, is_sum = i < 4;
    shapes.row_bytes[i] = static_cast<uint16_t>(is_x ? x_row_bytes : 64);
    shapes.rows[i] = static_cast<uint8_t>(is_x || is_sum ? kAmxRows : x_row_bytes / 4);
  }
  return shapes;
}

// This thread's tiles, while it lives.
class AmxTiles {
 public:
  AmxTiles(bool used, int64_t x_row_bytes) : used_(used) {
    const AmxShapes shapes = shapes_for(x_row_bytes);
    asm volatile("" : : "r"(&shapes) : "memory");  // the compiler does not know that all of it is read
    if (used_) _tile_loadconfig(&shapes);
  }
  ~AmxTiles() {
    if (used_) _tile_release();
  }
  AmxTiles(const AmxTiles&) = delete;
  AmxTiles& operator=(const AmxTiles&) = delete;

 private:
  bool used_;
};

// The dot products of two groups, with tiles for kGroup bytes of x; each of the two x has rows of `row_bytes`.
inline void amx_dots(const int8_t* x, const int8_t* next_x, int64_t row_bytes, const uint8_t* codes,
                     const uint8_t* next_codes, AmxDots& dots) {
  asm volatile("" : : : "memory");  // the compiler does not know that loading tiles reads memory
  _tile_zero(0);
  _tile_zero(1);
  _tile_loadd(4, x, row_bytes);
  _tile_loadd(6, codes, 64);
  _tile_dpbsud(0, 4, 6);
  _tile_loadd(5, next_x, row_bytes);
  _tile_loadd(7, next_codes, 64);
  _tile_dpbsud(1, 5, 7);
  _tile_stored(0, dots[0], 64);
  _tile_stored(1, dots[1], 64);
}

#define KVRELAY_AMX_STEP(block, x_tile, w_tile)                                  \
  if constexpr (B > block) {                                                     \
    _tile_loadd(x_tile, x + block * kAmxRows * width + step * 32, width * 2);    \
    _tile_dpbf16ps(block, x_tile, w_tile);                                       \
  }

// Sums of B blocks of 16 rows with one tile of weights, in steps of 32 columns, with tiles for 64 bytes of x. x has rows
// of `width` columns, a multiple of 32, of which those behind the last pair are zeros.
template <int B>
inline void amx_bf16(const uint16_t* x, int64_t width, const uint16_t* weights, int64_t pairs,
                     float (&sums)[4][kAmxRows][kLanes]) {
  alignas(64) uint16_t last[32 * kLanes] = {};
  std::memcpy(last, weights + pairs / 16 * 32 * kLanes, static_cast<size_t>(pairs % 16 * 4 * kLanes));
  asm volatile("" : : "r"(last) : "memory");  // the compiler does not know that loading tiles reads memory
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t step = 0; step < width / 32; step++) {
    const uint16_t* from = step < pairs / 16 ? weights + step * 32 * kLanes : last;
    _tile_loadd(6, from, 64);
    KVRELAY_AMX_STEP(0, 4, 6)
    KVRELAY_AMX_STEP(1, 5, 6)
    KVRELAY_AMX_STEP(2, 4, 6)
    KVRELAY_AMX_STEP(3, 5, 6)
  }
  _tile_stored(0, sums[0], 64);
  _tile_stored(1, sums[1], 64);
  _tile_stored(2, sums[2], 64);
  _tile_stored(3, sums[3], 64);
}

#undef KVRELAY_AMX_STEP

#else

inline bool has_amx() { return false; }
class AmxTiles {
 public:
  AmxTiles(bool, int64_t) {}
};
inline void amx_dots(const int8_t*, const int8_t*, int64_t, const uint8_t*, const uint8_t*, AmxDots&) {}
template <int B>
inline void amx_bf16(const uint16_t*, int64_t, const uint16_t*, int64_t, float (&)[4][kAmxRows][kLanes]) {}

#endif

}  // namespace kvrelay
