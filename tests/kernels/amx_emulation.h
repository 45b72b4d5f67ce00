// The instructions of AMX that the kernels use, one number at a time, for processors that have none. Every misuse that
// the processor would refuse ends the process: tiles that are not configured, or shapes that do not fit.
#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace amx_emulation {

struct Tile {
  uint8_t bytes[16][64];
  int rows, row_bytes;
};
inline thread_local Tile tiles[8];
inline thread_local bool configured = false;

inline void demand(bool condition) {
  if (!condition) std::abort();
}
template <class Number>
Number number(const uint8_t* place) {
  Number read;
  std::memcpy(&read, place, sizeof read);
  return read;
}
inline float bfloat16(const uint8_t* place) {
  const uint32_t bits = static_cast<uint32_t>(number<uint16_t>(place)) << 16;
  return number<float>(reinterpret_cast<const uint8_t*>(&bits));
}

inline void configure(const void* shapes) {
  const uint8_t* bytes = static_cast<const uint8_t*>(shapes);
  demand(reinterpret_cast<uintptr_t>(shapes) % 64 == 0 && bytes[0] == 1 && bytes[1] == 0);
  for (int i = 2; i < 16; i++) demand(bytes[i] == 0);
  for (int i = 0; i < 8; i++) {
    tiles[i] = {{}, bytes[48 + i], number<uint16_t>(bytes + 16 + 2 * i)};
    demand(tiles[i].rows <= 16 && tiles[i].row_bytes <= 64);
  }
  configured = true;
}
inline void release() { configured = false; }
inline void zero(int tile) {
  demand(configured && tiles[tile].rows > 0);
  std::memset(tiles[tile].bytes, 0, sizeof tiles[tile].bytes);
}
inline void load(int tile, const void* from, long stride) {
  zero(tile);
  Tile& to = tiles[tile];
  for (int i = 0; i < to.rows; i++) std::memcpy(to.bytes[i], static_cast<const char*>(from) + i * stride, to.row_bytes);
}
inline void store(int tile, void* to, long stride) {
  demand(configured);
  const Tile& from = tiles[tile];
  for (int i = 0; i < from.rows; i++) std::memcpy(static_cast<char*>(to) + i * stride, from.bytes[i], from.row_bytes);
}

// sums += step(a, b) for each pair of four bytes along a row of a and a column of b.
template <class Number, class Step>
void multiply(int sums, int a, int b, Step step) {
  Tile &to = tiles[sums], &rows = tiles[a], &columns = tiles[b];
  demand(configured && sums != a && sums != b && a != b);
  demand(to.rows == rows.rows && to.row_bytes == columns.row_bytes && rows.row_bytes == 4 * columns.rows);
  for (int i = 0; i < to.rows; i++) {
    for (int j = 0; j < to.row_bytes; j += 4) {
      Number sum = number<Number>(to.bytes[i] + j);
      for (int k = 0; k < columns.rows; k++) sum += step(rows.bytes[i] + 4 * k, columns.bytes[k] + j);
      std::memcpy(to.bytes[i] + j, &sum, 4);
    }
  }
}
inline void signed_by_unsigned(int sums, int a, int b) {
  multiply<int32_t>(sums, a, b, [](const uint8_t* x, const uint8_t* w) {
    int32_t sum = 0;
    for (int i = 0; i < 4; i++) sum += static_cast<int8_t>(x[i]) * w[i];
    return sum;
  });
}
inline void bfloat16_pairs(int sums, int a, int b) {
  multiply<float>(sums, a, b, [](const uint8_t* x, const uint8_t* w) {
    return bfloat16(x) * bfloat16(w) + bfloat16(x + 2) * bfloat16(w + 2);
  });
}

}  // namespace amx_emulation

#define __AMX_INT8__ 1
#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbsud
#undef _tile_dpbf16ps
#define _tile_loadconfig amx_emulation::configure
#define _tile_release amx_emulation::release
#define _tile_zero amx_emulation::zero
#define _tile_loadd amx_emulation::load
#define _tile_stored amx_emulation::store
#define _tile_dpbsud amx_emulation::signed_by_unsigned
#define _tile_dpbf16ps amx_emulation::bfloat16_pairs
#define syscall(...) 0  // the system grants what is asked of it
