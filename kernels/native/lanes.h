// Sixteen numbers at a time, whatever the instruction set: the only place that knows intrinsics. All arithmetic on
// integers is exact. That on floats gives the same bits on all levels but `portable`, which has no fused
// multiply-add and rounds products.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace kvrelay {

constexpr int64_t kLanes = 16;

inline float half_to_float(uint16_t half) {  // finite ones, subnormal too
  uint32_t bits = static_cast<uint32_t>(half & 0x7fff) << 13;
  float magnitude;
  std::memcpy(&magnitude, &bits, 4);
  magnitude *= 0x1p112f;
  return half & 0x8000 ? -magnitude : magnitude;
}

inline int32_t word_at(const void* x) {
  int32_t word;
  std::memcpy(&word, x, 4);
  return word;
}

#if defined(__AVX512F__)

struct Floats {
  __m512 v;
};
struct Ints {
  __m512i v;
};
struct Bytes {  // four unsigned bytes for each of the sixteen lanes
  __m512i v;
};

inline Floats floats(float x) { return {_mm512_set1_ps(x)}; }
inline Floats load(const float* x) { return {_mm512_loadu_ps(x)}; }
inline void store(float* to, Floats x) { _mm512_storeu_ps(to, x.v); }
inline Floats load_halves(const uint8_t* x) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)x))}; }
inline Floats plus(Floats a, Floats b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Floats times(Floats a, Floats b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Floats multiply_add(Floats a, Floats b, Floats c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Floats larger_magnitude(Floats a, Floats b) { return {_mm512_max_ps(_mm512_abs_ps(a.v), _mm512_abs_ps(b.v))}; }
inline float largest(Floats a) { return _mm512_reduce_max_ps(a.v); }
inline Ints ints(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline Ints plus(Ints a, Ints b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline int32_t sum(Ints a) { return _mm512_reduce_add_epi32(a.v); }
inline Floats to_floats(Ints a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline Ints round_to_ints(Floats a) { return {_mm512_cvtps_epi32(a.v)}; }  // ties to even
inline void store_as_bytes(int8_t* to, Ints a) { _mm_storeu_si128((__m128i*)to, _mm512_cvtsepi32_epi8(a.v)); }
inline Ints load_ints(const int32_t* x) { return {_mm512_loadu_si512(x)}; }
inline Bytes load_bytes(const void* x) { return {_mm512_loadu_si512(x)}; }
inline void store_bytes(uint8_t* to, Bytes x) { _mm512_storeu_si512(to, x.v); }
inline Bytes low_nibbles(Bytes a) { return {_mm512_and_si512(a.v, _mm512_set1_epi8(15))}; }
inline Bytes high_nibbles(Bytes a) { return {_mm512_and_si512(_mm512_srli_epi16(a.v, 4), _mm512_set1_epi8(15))}; }

// c + the dot products of each lane's four bytes with the four at x.
inline Ints dot(Bytes w, const int8_t* x, Ints c) {
  const __m512i v = _mm512_set1_epi32(word_at(x));
#if defined(__AVX512VNNI__)
  return {_mm512_dpbusd_epi32(c.v, w.v, v)};
#else
  const __m512i even = _mm512_madd_epi16(_mm512_and_si512(w.v, _mm512_set1_epi16(255)),
                                         _mm512_srai_epi16(_mm512_slli_epi16(v, 8), 8));
  const __m512i odd = _mm512_madd_epi16(_mm512_srli_epi16(w.v, 8), _mm512_srai_epi16(v, 8));
  return {_mm512_add_epi32(c.v, _mm512_add_epi32(even, odd))};
#endif
}

// The same for bytes below 16.
inline Ints dot_nibbles(Bytes w, const int8_t* x, Ints c) {
#if defined(__AVX512VNNI__)
  return dot(w, x, c);
#else
  const __m512i pairs = _mm512_maddubs_epi16(w.v, _mm512_set1_epi32(word_at(x)));
  return {_mm512_add_epi32(c.v, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)))};
#endif
}

// c + the sum of each lane's two bfloat16 times the two at x.
inline Floats dot_bf16(Bytes w, const uint16_t* x, Floats c) {
  const __m512i v = _mm512_set1_epi32(word_at(x));
#if defined(__AVX512BF16__)
  return {_mm512_dpbf16_ps(c.v, (__m512bh)w.v, (__m512bh)v)};
#else
  const __m512i high = _mm512_set1_epi32(-65536);
  const auto even = [](__m512i a) { return _mm512_castsi512_ps(_mm512_slli_epi32(a, 16)); };
  const auto odd = [&](__m512i a) { return _mm512_castsi512_ps(_mm512_and_si512(a, high)); };
  return {_mm512_fmadd_ps(odd(w.v), odd(v), _mm512_fmadd_ps(even(w.v), even(v), c.v))};
#endif
}

#elif defined(__AVX2__)

struct Floats {
  __m256 v[2];
};
struct Ints {
  __m256i v[2];
};
struct Bytes {  // four unsigned bytes for each of the sixteen lanes
  __m256i v[2];
};

inline __m256i half_of(const void* x, int i) { return _mm256_loadu_si256((const __m256i*)x + i); }
inline Floats floats(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Floats load(const float* x) { return {_mm256_loadu_ps(x), _mm256_loadu_ps(x + 8)}; }
inline void store(float* to, Floats x) {
  _mm256_storeu_ps(to, x.v[0]);
  _mm256_storeu_ps(to + 8, x.v[1]);
}
inline Floats load_halves(const uint8_t* x) {
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)x)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)x + 1))};
}
inline Floats plus(Floats a, Floats b) { return {_mm256_add_ps(a.v[0], b.v[0]), _mm256_add_ps(a.v[1], b.v[1])}; }
inline Floats times(Floats a, Floats b) { return {_mm256_mul_ps(a.v[0], b.v[0]), _mm256_mul_ps(a.v[1], b.v[1])}; }
inline Floats multiply_add(Floats a, Floats b, Floats c) {
  return {_mm256_fmadd_ps(a.v[0], b.v[0], c.v[0]), _mm256_fmadd_ps(a.v[1], b.v[1], c.v[1])};
}
inline __m256 magnitude(__m256 a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
inline Floats larger_magnitude(Floats a, Floats b) {
  return {_mm256_max_ps(magnitude(a.v[0]), magnitude(b.v[0])), _mm256_max_ps(magnitude(a.v[1]), magnitude(b.v[1]))};
}
inline float largest(Floats a) {
  float all[kLanes], found;
  store(all, a);
  found = all[0];
  for (float each : all) found = each > found ? each : found;
  return found;
}
inline Ints ints(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline Ints plus(Ints a, Ints b) { return {_mm256_add_epi32(a.v[0], b.v[0]), _mm256_add_epi32(a.v[1], b.v[1])}; }
inline int32_t sum(Ints a) {
  int32_t all[8], total = 0;
  _mm256_storeu_si256((__m256i*)all, _mm256_add_epi32(a.v[0], a.v[1]));
  for (int32_t each : all) total += each;
  return total;
}
inline Floats to_floats(Ints a) { return {_mm256_cvtepi32_ps(a.v[0]), _mm256_cvtepi32_ps(a.v[1])}; }
inline Ints round_to_ints(Floats a) { return {_mm256_cvtps_epi32(a.v[0]), _mm256_cvtps_epi32(a.v[1])}; }
inline void store_as_bytes(int8_t* to, Ints a) {
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(a.v[0], a.v[1]), 0xd8);
  _mm_storeu_si128((__m128i*)to, _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}
inline Ints load_ints(const int32_t* x) { return {half_of(x, 0), half_of(x, 1)}; }
inline Bytes load_bytes(const void* x) { return {half_of(x, 0), half_of(x, 1)}; }
inline void store_bytes(uint8_t* to, Bytes x) {
  _mm256_storeu_si256((__m256i*)to, x.v[0]);
  _mm256_storeu_si256((__m256i*)to + 1, x.v[1]);
}
inline Bytes low_nibbles(Bytes a) {
  const __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(a.v[0], mask), _mm256_and_si256(a.v[1], mask)};
}
inline Bytes high_nibbles(Bytes a) {
  return low_nibbles({_mm256_srli_epi16(a.v[0], 4), _mm256_srli_epi16(a.v[1], 4)});
}

// c + the dot products of each lane's four bytes with the four at x.
inline Ints dot(Bytes w, const int8_t* x, Ints c) {
  const __m256i v = _mm256_set1_epi32(word_at(x));
  const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(v, 8), 8), odd = _mm256_srai_epi16(v, 8);
  for (int i = 0; i < 2; i++) {
    const __m256i evens = _mm256_madd_epi16(_mm256_and_si256(w.v[i], _mm256_set1_epi16(255)), even);
    const __m256i odds = _mm256_madd_epi16(_mm256_srli_epi16(w.v[i], 8), odd);
    c.v[i] = _mm256_add_epi32(c.v[i], _mm256_add_epi32(evens, odds));
  }
  return c;
}

// The same for bytes below 16, of which two products fit into 16 bits.
inline Ints dot_nibbles(Bytes w, const int8_t* x, Ints c) {
  const __m256i v = _mm256_set1_epi32(word_at(x));
  for (int i = 0; i < 2; i++) {
    const __m256i pairs = _mm256_maddubs_epi16(w.v[i], v);
    c.v[i] = _mm256_add_epi32(c.v[i], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
  return c;
}

// c + the sum of each lane's two bfloat16 times the two at x.
inline Floats dot_bf16(Bytes w, const uint16_t* x, Floats c) {
  const __m256i v = _mm256_set1_epi32(word_at(x)), high = _mm256_set1_epi32(-65536);
  const auto even = [](__m256i a) { return _mm256_castsi256_ps(_mm256_slli_epi32(a, 16)); };
  const auto odd = [&](__m256i a) { return _mm256_castsi256_ps(_mm256_and_si256(a, high)); };
  for (int i = 0; i < 2; i++) {
    c.v[i] = _mm256_fmadd_ps(odd(w.v[i]), odd(v), _mm256_fmadd_ps(even(w.v[i]), even(v), c.v[i]));
  }
  return c;
}

#else

// Vectors of the compiler, of the width that every 64-bit processor has.
typedef float Float4 __attribute__((vector_size(16)));
typedef int32_t Int4x32 __attribute__((vector_size(16)));
typedef uint32_t Uint4x32 __attribute__((vector_size(16)));
typedef int16_t Int8x16 __attribute__((vector_size(16)));

struct Floats {
  Float4 v[4];
};
struct Ints {
  Int4x32 v[4];
};
struct Bytes {  // four unsigned bytes for each of the sixteen lanes
  Uint4x32 v[4];
};

template <class To, class Make>
inline To each(Make make) {
  return {{make(0), make(1), make(2), make(3)}};
}
template <class Vectors>
inline Vectors loaded(const void* x) {
  Vectors made;
  std::memcpy(&made, x, sizeof made);
  return made;
}
inline Floats floats(float x) {
  return each<Floats>([&](int) { return Float4{x, x, x, x}; });
}
inline Floats load(const float* x) { return loaded<Floats>(x); }
inline void store(float* to, Floats x) { std::memcpy(to, &x, sizeof x); }
inline Floats load_halves(const uint8_t* x) {
  float made[kLanes];
  uint16_t halves[kLanes];
  std::memcpy(halves, x, sizeof halves);
  for (int64_t i = 0; i < kLanes; i++) made[i] = half_to_float(halves[i]);
  return load(made);
}
inline Floats plus(Floats a, Floats b) {
  return each<Floats>([&](int i) { return a.v[i] + b.v[i]; });
}
inline Floats times(Floats a, Floats b) {
  return each<Floats>([&](int i) { return a.v[i] * b.v[i]; });
}
inline Floats multiply_add(Floats a, Floats b, Floats c) { return plus(times(a, b), c); }
inline Floats larger_magnitude(Floats a, Floats b) {
  return each<Floats>([&](int i) {
    const Int4x32 x = (Int4x32)a.v[i] & INT32_MAX, y = (Int4x32)b.v[i] & INT32_MAX;  // in the order of magnitudes
    return (Float4)(x > y ? x : y);
  });
}
inline float largest(Floats a) {
  float all[kLanes];
  store(all, a);
  for (float one : all) all[0] = one > all[0] ? one : all[0];
  return all[0];
}
inline Ints ints(int32_t x) {
  return each<Ints>([&](int) { return Int4x32{x, x, x, x}; });
}
inline Ints plus(Ints a, Ints b) {
  return each<Ints>([&](int i) { return a.v[i] + b.v[i]; });
}
inline int32_t sum(Ints a) {
  const Int4x32 four = a.v[0] + a.v[1] + a.v[2] + a.v[3];
  return four[0] + four[1] + four[2] + four[3];
}
inline Floats to_floats(Ints a) {
  return each<Floats>([&](int i) { return __builtin_convertvector(a.v[i], Float4); });
}
inline Ints round_to_ints(Floats a) {  // magnitudes below 2^22: to the sum with 1.5 * 2^23 ties are rounded to even
  return each<Ints>([&](int i) { return __builtin_convertvector(a.v[i] + 0x1.8p23f - 0x1.8p23f, Int4x32); });
}
inline void store_as_bytes(int8_t* to, Ints a) {
  for (int64_t i = 0; i < kLanes; i++) to[i] = static_cast<int8_t>(a.v[i / 4][i % 4]);
}
inline Ints load_ints(const int32_t* x) { return loaded<Ints>(x); }
inline Bytes load_bytes(const void* x) { return loaded<Bytes>(x); }
inline void store_bytes(uint8_t* to, Bytes x) { std::memcpy(to, &x, sizeof x); }
inline Bytes low_nibbles(Bytes a) {
  return each<Bytes>([&](int i) { return a.v[i] & 0x0f0f0f0fu; });
}
inline Bytes high_nibbles(Bytes a) {
  return each<Bytes>([&](int i) { return a.v[i] >> 4 & 0x0f0f0f0fu; });
}

// The products of the even and of the odd bytes in 16 bits, into which all of them fit.
struct Products {
  Int8x16 even, odd;
};
inline Products products_of(Uint4x32 w, const int8_t* x) {
  const Int8x16 even = {x[0], x[2], x[0], x[2], x[0], x[2], x[0], x[2]};
  const Int8x16 odd = {x[1], x[3], x[1], x[3], x[1], x[3], x[1], x[3]};
  return {(Int8x16)(w & 0x00ff00ffu) * even, (Int8x16)(w >> 8 & 0x00ff00ffu) * odd};
}
inline Int4x32 pair_sums(Int8x16 a) { return ((Int4x32)((Uint4x32)a << 16) >> 16) + ((Int4x32)a >> 16); }

// c + the dot products of each lane's four bytes with the four at x.
inline Ints dot(Bytes w, const int8_t* x, Ints c) {
  return each<Ints>([&](int i) {
    const Products both = products_of(w.v[i], x);
    return c.v[i] + pair_sums(both.even) + pair_sums(both.odd);
  });
}

// The same for bytes below 16, of which two products fit into 16 bits.
inline Ints dot_nibbles(Bytes w, const int8_t* x, Ints c) {
  return each<Ints>([&](int i) {
    const Products both = products_of(w.v[i], x);
    return c.v[i] + pair_sums(both.even + both.odd);
  });
}

// c + the sum of each lane's two bfloat16 times the two at x.
inline Floats dot_bf16(Bytes w, const uint16_t* x, Floats c) {
  const uint32_t bits = static_cast<uint32_t>(word_at(x));
  const Uint4x32 both = {bits, bits, bits, bits};
  const Float4 even = (Float4)(both << 16), odd = (Float4)(both & 0xffff0000u);
  return each<Floats>([&](int i) {
    return (Float4)(w.v[i] & 0xffff0000u) * odd + ((Float4)(w.v[i] << 16) * even + c.v[i]);
  });
}

#endif

}  // namespace kvrelay
