// Products of small matrices out of the caches nearest to the core, and how the right one is laid out for them.
//
// Units are what a lane multiplies at a time: one float, or, where the processor can, two bfloat16, two integers of 16
// bits or four of 8, of which it adds all products. A lane adds up its products in order, whatever the number of rows
// and columns. Sums of integers lie in the lanes of `Floats` as they are.
#pragma once

#include "vector.h"

namespace kvrelay::vectors {

/// Float by float, fused.
struct Singles {
  using Weights = Singles;  // what weights and values are multiplied by where this multiplies queries and keys
  using Element = float;
  static constexpr int kWidth = 1;  // elements in a unit
  static Floats multiply_add(const float* a, Floats b, Floats sum) { return fma(splat(*a), b, sum); }
};

#if defined(__AVX512BF16__)
/// Two bfloat16 at a time; sums are floats.
struct Pairs {
  using Weights = Pairs;
  using Element = BFloat16;
  static constexpr int kWidth = 2;
  static Floats multiply_add(const BFloat16* a, Floats b, Floats sum) {
    int32_t pair;
    std::memcpy(&pair, a, 4);
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)b);
  }
};
#endif

#if defined(__AVX512VNNI__)
/// Two by two integers of 16 bits.
struct Words {
  using Element = int16_t;
  static constexpr int kWidth = 2;
  static Floats multiply_add(const int16_t* a, Floats b, Floats sum) {
    int32_t pair;
    std::memcpy(&pair, a, 4);
    return (Floats)_mm512_dpwssd_epi32((__m512i)sum, _mm512_set1_epi32(pair), (__m512i)b);
  }
};

/// Four by four integers of 8 bits; those on the right have no sign.
struct Quads {
  using Weights = Words;
  using Element = int8_t;
  static constexpr int kWidth = 4;
  static Floats multiply_add(const int8_t* a, Floats b, Floats sum) {
    int32_t four;
    std::memcpy(&four, a, 4);
    return (Floats)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)b, _mm512_set1_epi32(four));
  }
};
#endif

constexpr int kMaxRows = 6;  // of a product that is held in registers
constexpr int kMaxVectors = kLanes == 16 ? 4 : 2;

/// What is on the right of a product: units `[num_units][stride]`, laid out in memory.
struct Packed {
  const float* units;
  int stride;
  template <int kVectors>
  inline KVRELAY_INLINE void load_columns(int unit, int column, Floats (&columns)[kVectors]) const {
#pragma GCC unroll 4
    for (int vector = 0; vector < kVectors; ++vector)
      columns[vector] = load(units + unit * stride + column + vector * kLanes);
  }
};

/// c[row][column] = c[row][column] * factors[row] + sum over units of a[row][unit] * right[unit][column], for kRows x
/// kVectors * kLanes results; without factors c counts as 0. `meanwhile(unit)` is called before each unit.
template <class Unit, int kRows, int kVectors, class Right, class Meanwhile>
void multiply_block(const typename Unit::Element* a, int a_stride, const Right& right, int column, int num_units,
                    const float* factors, float* c, int c_stride, const Meanwhile& meanwhile) {
  Floats sums[kRows][kVectors];
#pragma GCC unroll 6
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
    for (int vector = 0; vector < kVectors; ++vector)
      sums[row][vector] =
          factors ? load(c + row * c_stride + column + vector * kLanes) * splat(factors[row]) : Floats{};
  for (int unit = 0; unit < num_units; ++unit) {
    meanwhile(unit);
    Floats columns[kVectors];
    right.load_columns(unit, column, columns);
#pragma GCC unroll 6
    for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
      for (int vector = 0; vector < kVectors; ++vector)
        sums[row][vector] =
            Unit::multiply_add(a + row * a_stride + unit * Unit::kWidth, columns[vector], sums[row][vector]);
  }
#pragma GCC unroll 6
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
    for (int vector = 0; vector < kVectors; ++vector)
      store(c + row * c_stride + column + vector * kLanes, sums[row][vector]);
}

template <class Unit, int kRows, class Right, class Meanwhile>
void multiply_rows(const typename Unit::Element* a, int a_stride, const Right& right, int num_units,
                   const float* factors, float* c, int c_stride, int num_columns, const Meanwhile& meanwhile) {
  int column = 0;
  for (; column + kMaxVectors * kLanes <= num_columns; column += kMaxVectors * kLanes)
    multiply_block<Unit, kRows, kMaxVectors>(a, a_stride, right, column, num_units, factors, c, c_stride, meanwhile);
  for (; column < num_columns; column += kLanes)
    multiply_block<Unit, kRows, 1>(a, a_stride, right, column, num_units, factors, c, c_stride, meanwhile);
}

/// As `multiply_block`, for 1 to kMaxRows rows and any multiple of kLanes columns.
template <class Unit, class Right, class Meanwhile>
void multiply(int num_rows, const typename Unit::Element* a, int a_stride, const Right& right, int num_units,
              const float* factors, float* c, int c_stride, int num_columns, const Meanwhile& meanwhile) {
  static_assert(kMaxRows == 6, "one case for each number of rows");
  switch (num_rows) {
    case 1:
      return multiply_rows<Unit, 1>(a, a_stride, right, num_units, factors, c, c_stride, num_columns, meanwhile);
    case 2:
      return multiply_rows<Unit, 2>(a, a_stride, right, num_units, factors, c, c_stride, num_columns, meanwhile);
    case 3:
      return multiply_rows<Unit, 3>(a, a_stride, right, num_units, factors, c, c_stride, num_columns, meanwhile);
    case 4:
      return multiply_rows<Unit, 4>(a, a_stride, right, num_units, factors, c, c_stride, num_columns, meanwhile);
    case 5:
      return multiply_rows<Unit, 5>(a, a_stride, right, num_units, factors, c, c_stride, num_columns, meanwhile);
    default:
      return multiply_rows<Unit, 6>(a, a_stride, right, num_units, factors, c, c_stride, num_columns, meanwhile);
  }
}

#define KVRELAY_SHUFFLED(a, b, ...) __builtin_shuffle(a, b, Ints{__VA_ARGS__})

/// Transposes kLanes x kLanes units: squares of four by four within 128 bits, then those among each other.
inline void transpose(Floats (&rows)[kLanes]) {
  Floats steps[kLanes];
#pragma GCC unroll 4
  for (int row = 0; row < kLanes; row += 4) {
    const Floats a = rows[row], b = rows[row + 1], c = rows[row + 2], d = rows[row + 3];
#if defined(__AVX512F__) && defined(__AVX512BW__)
    const __m512 ab0 = _mm512_unpacklo_ps(a, b), ab1 = _mm512_unpackhi_ps(a, b);
    const __m512 cd0 = _mm512_unpacklo_ps(c, d), cd1 = _mm512_unpackhi_ps(c, d);
    steps[row] = _mm512_shuffle_ps(ab0, cd0, 0x44);
    steps[row + 1] = _mm512_shuffle_ps(ab0, cd0, 0xee);
    steps[row + 2] = _mm512_shuffle_ps(ab1, cd1, 0x44);
    steps[row + 3] = _mm512_shuffle_ps(ab1, cd1, 0xee);
#elif defined(__AVX2__) && defined(__FMA__)
    const __m256 ab0 = _mm256_unpacklo_ps(a, b), ab1 = _mm256_unpackhi_ps(a, b);
    const __m256 cd0 = _mm256_unpacklo_ps(c, d), cd1 = _mm256_unpackhi_ps(c, d);
    steps[row] = _mm256_shuffle_ps(ab0, cd0, 0x44);
    steps[row + 1] = _mm256_shuffle_ps(ab0, cd0, 0xee);
    steps[row + 2] = _mm256_shuffle_ps(ab1, cd1, 0x44);
    steps[row + 3] = _mm256_shuffle_ps(ab1, cd1, 0xee);
#else
    const Floats ab0 = KVRELAY_SHUFFLED(a, b, 0, 4, 1, 5), ab1 = KVRELAY_SHUFFLED(a, b, 2, 6, 3, 7);
    const Floats cd0 = KVRELAY_SHUFFLED(c, d, 0, 4, 1, 5), cd1 = KVRELAY_SHUFFLED(c, d, 2, 6, 3, 7);
    steps[row] = KVRELAY_SHUFFLED(ab0, cd0, 0, 1, 4, 5);
    steps[row + 1] = KVRELAY_SHUFFLED(ab0, cd0, 2, 3, 6, 7);
    steps[row + 2] = KVRELAY_SHUFFLED(ab1, cd1, 0, 1, 4, 5);
    steps[row + 3] = KVRELAY_SHUFFLED(ab1, cd1, 2, 3, 6, 7);
#endif
  }
#pragma GCC unroll 4
  for (int row = 0; row < 4; ++row) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
    const __m512 a = steps[row], b = steps[row + 4], c = steps[row + 8], d = steps[row + 12];
    const __m512 ab0 = _mm512_shuffle_f32x4(a, b, 0x44), ab1 = _mm512_shuffle_f32x4(a, b, 0xee);
    const __m512 cd0 = _mm512_shuffle_f32x4(c, d, 0x44), cd1 = _mm512_shuffle_f32x4(c, d, 0xee);
    rows[row] = _mm512_shuffle_f32x4(ab0, cd0, 0x88);
    rows[row + 4] = _mm512_shuffle_f32x4(ab0, cd0, 0xdd);
    rows[row + 8] = _mm512_shuffle_f32x4(ab1, cd1, 0x88);
    rows[row + 12] = _mm512_shuffle_f32x4(ab1, cd1, 0xdd);
#elif defined(__AVX2__) && defined(__FMA__)
    rows[row] = _mm256_permute2f128_ps(steps[row], steps[row + 4], 0x20);
    rows[row + 4] = _mm256_permute2f128_ps(steps[row], steps[row + 4], 0x31);
#else
    rows[row] = steps[row];
#endif
  }
}

}  // namespace kvrelay::vectors
