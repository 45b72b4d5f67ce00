// Vectors of floats as wide as the instruction set level allows, by the compiler's vector extensions: `kLanes` floats,
// the usual operators, and below what those cannot say. A fused multiply-add is always asked for by name (`fma`): the
// sources are compiled with -ffp-contract=off, so that the same sum never is fused in one place and not in another.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

// For what must not become a call in a loop; and for what only prefetches, since calls of that count as without effect
// for the compiler, which removes them.
#define KVRELAY_INLINE __attribute__((always_inline))

namespace kvrelay::vectors {

#if defined(__AVX512F__) && defined(__AVX512BW__)
constexpr int kLanes = 16;
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));
typedef double Doubles __attribute__((vector_size(kLanes * 4)));
typedef uint64_t Longs __attribute__((vector_size(kLanes * 4)));
typedef uint16_t Shorts __attribute__((vector_size(kLanes * 2)));
typedef int8_t Codes __attribute__((vector_size(kLanes)));

constexpr int kLongLanes = kLanes / 2;  // of Doubles and Longs

struct BFloat16 {
  uint16_t bits;
};

inline Floats splat(float value) { return value - Floats{}; }
inline Ints splat(int32_t value) { return value - Ints{}; }

inline Floats load(const float* from) {
  Floats value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

inline void store(float* to, Floats value) { std::memcpy(to, &value, sizeof value); }

inline Floats load(const BFloat16* from) {
  Shorts bits;
  std::memcpy(&bits, from, sizeof bits);
  return (Floats)(__builtin_convertvector(bits, Ints) << 16);
}

inline Floats load(const int8_t* from) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
  const Ints codes = (Ints)_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#elif defined(__AVX2__) && defined(__FMA__)
  const Ints codes = (Ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
#else
  Codes bytes;
  std::memcpy(&bytes, from, sizeof bytes);
  const Ints codes = __builtin_convertvector(bytes, Ints);
#endif
  return __builtin_convertvector(codes, Floats);
}

#if defined(__AVX512F__) && defined(__AVX512BW__)
/// Twice as many, as integers of 16 bits.
inline Floats load_words(const int8_t* from) {
  return (Floats)_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
#endif

/// The first `num` lanes, zeros behind them.
template <class From>
inline Floats load_part(const From* from, int num) {
  From part[kLanes] = {};
  std::memcpy(part, from, size_t(num) * sizeof(From));
  return load(part);
}

inline float widen(float value) { return value; }

inline float widen(BFloat16 value) {
  const uint32_t bits = uint32_t(value.bits) << 16;
  float widened;
  std::memcpy(&widened, &bits, 4);
  return widened;
}

/// a * b + c, rounded once where the level has such an instruction, which is everywhere but at `portable`.
inline Floats fma(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__) && defined(__FMA__)
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}

inline float fma(float a, float b, float c) {
#if defined(__FMA__)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

inline Doubles fma(Doubles a, Doubles b, Doubles c) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
  return _mm512_fmadd_pd(a, b, c);
#elif defined(__AVX2__) && defined(__FMA__)
  return _mm256_fmadd_pd(a, b, c);
#else
  return a * b + c;
#endif
}

/// The larger one of each pair; b where one of them is not a number.
inline Floats maximum(Floats a, Floats b) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
  return _mm512_max_ps(a, b);
#elif defined(__AVX2__) && defined(__FMA__)
  return _mm256_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}

/// Rounded to the nearest bfloat16, ties to even; still 32 bits wide.
inline Floats round_to_bfloat16(Floats value) {
  const Ints bits = (Ints)value;
  const Ints rounded = (bits + (((bits >> 16) & 1) + 0x7fff)) & splat(int32_t(0xffff0000));
  return value == value ? (Floats)rounded : (Floats)(bits | 0x00400000);
}

inline void store(BFloat16* to, Floats value) {
  const Shorts bits = __builtin_convertvector((Ints)round_to_bfloat16(value) >> 16, Shorts);
  std::memcpy(to, &bits, sizeof bits);
}

#if defined(__AVX512F__) && defined(__AVX512BW__)
/// Rounded to the nearest integer, ties to even; of at most 16 bits. The sum has it in its lower half.
inline void store(int16_t* to, Floats value) {
  const __m256i words = _mm512_cvtepi32_epi16((__m512i)(value + splat(12582912.0f)));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), words);
}
#endif

/// Rounded to the nearest integer, ties to even; from -127 to 127. The sum has it in its lowest byte.
inline void store(int8_t* to, Floats value) {
  const Ints codes = (Ints)(value + splat(12582912.0f));
#if defined(__AVX512F__) && defined(__AVX512BW__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8((__m512i)codes));
#else
  const Codes bytes = __builtin_convertvector(codes, Codes);
  std::memcpy(to, &bytes, sizeof bytes);
#endif
}

#if defined(__AVX512BF16__)
/// Both rounded to bfloat16, `low` into the lower half of the lanes, two in each.
inline Floats round_to_pairs(Floats low, Floats high) { return (Floats)_mm512_cvtne2ps_pbh(high, low); }
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__)
/// Sixteen pairs of 16 bits of `even` and the one of `odd` in the same place, from the lower half of each.
inline Floats interleave_low(Floats even, Floats odd) {
  const __m512i order = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37,
                                         5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  return (Floats)_mm512_permutex2var_epi16((__m512i)even, order, (__m512i)odd);
}

/// The same from the upper half.
inline Floats interleave_high(Floats even, Floats odd) {
  const __m512i order = _mm512_set_epi16(63, 31, 62, 30, 61, 29, 60, 28, 59, 27, 58, 26, 57, 25, 56, 24, 55, 23, 54, 22,
                                         53, 21, 52, 20, 51, 19, 50, 18, 49, 17, 48, 16);
  return (Floats)_mm512_permutex2var_epi16((__m512i)even, order, (__m512i)odd);
}
#endif

/// The first `num` lanes only.
template <class To>
inline void store_part(To* to, Floats value, int num) {
  To part[kLanes];
  store(part, value);
  std::memcpy(to, part, size_t(num) * sizeof(To));
}

inline void narrow(float value, float* to) { *to = value; }

inline void narrow(float value, BFloat16* to) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  bits = value == value ? bits + (((bits >> 16) & 1) + 0x7fff) : bits | 0x00400000;
  to->bits = uint16_t(bits >> 16);
}

/// The sum of all lanes: halves are added to each other until one is left.
inline float sum(Floats value) {
  float lanes[kLanes];
  store(lanes, value);
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  return lanes[0];
}

inline float largest(Floats value) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
  return _mm512_reduce_max_ps(value);
#else
  float lanes[kLanes];
  store(lanes, value);
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int lane = 0; lane < half; ++lane)
      lanes[lane] = lanes[lane] > lanes[lane + half] ? lanes[lane] : lanes[lane + half];
  return lanes[0];
#endif
}

/// 2 to the power of x <= 127, within 2 units in the last place; 0 below -126; not a number stays so.
///
/// x is split into the nearest integer, which becomes the exponent, and a rest in [-1/2, 1/2], whose power is a
/// polynomial: exactly 1 at 0, and of the least relative error elsewhere (1.1e-7, Lawson's iteration).
inline Floats exp2(Floats x) {
  const Floats shift = splat(12582912.0f);  // 1.5 * 2**23: adding it rounds to an integer, in the lowest bits
  const Floats shifted = x + shift;
  const Floats rest = x - (shifted - shift);
  Floats power = splat(1.3264727e-3f);
  power = fma(power, rest, splat(9.671513e-3f));
  power = fma(power, rest, splat(5.5507336e-2f));
  power = fma(power, rest, splat(2.4022242e-1f));
  power = fma(power, rest, splat(6.93147e-1f));
  power = fma(power, rest, splat(1.0f));
  const Floats scale = (Floats)(((Ints)shifted << 23) + (127 << 23));
  return x < splat(-126.0f) ? Floats{} : power * scale;
}

/// Lanes `first`, `first` + 1, ... are below `limit`.
inline Ints lanes_below(int first, int limit) {
  Ints lanes;
  for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = first + lane;
  return lanes < splat(limit);
}

}  // namespace kvrelay::vectors
