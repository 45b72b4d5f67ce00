// Philox4x64-10 (Salmon et al., 2011): random words as a function of a key and a counter.
#pragma once

#include <cstdint>

#include "vector.h"

namespace kvrelay::vectors {

/// Whether some lane is not 0.
inline bool any(Longs value) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
  return _mm512_test_epi64_mask((__m512i)value, (__m512i)value) != 0;
#elif defined(__AVX2__) && defined(__FMA__)
  return !_mm256_testz_si256((__m256i)value, (__m256i)value);
#else
  return (value[0] | value[1]) != 0;
#endif
}

constexpr int kRounds = 10;

/// What names a stream of random words: counter (count, index, 0, 0) under the key (seed, sample) gives four.
struct Stream {
  uint64_t index, seeds[kRounds], samples[kRounds];  // the key of each round

  Stream(uint64_t seed, uint64_t sample, uint64_t index) : index(index) {
    for (int round = 0; round < kRounds; ++round) {
      seeds[round] = seed + uint64_t(round) * 0x9E3779B97F4A7C15u;
      samples[round] = sample + uint64_t(round) * 0xBB67AE8584CAA73Bu;
    }
  }
};

struct WideProduct {
  Longs high, low;
};

#if defined(__AVX2__) && defined(__FMA__)
/// The products of the lower halves of each lane.
inline Longs multiply_halves(Longs a, Longs b) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
  return (Longs)_mm512_mul_epu32((__m512i)a, (__m512i)b);
#else
  return (Longs)_mm256_mul_epu32((__m256i)a, (__m256i)b);
#endif
}

inline WideProduct multiply_wide(Longs a, uint64_t b) {
  const Longs a_high = a >> 32, b_low = Longs{} + uint32_t(b), b_high = Longs{} + (b >> 32);
  const Longs least = multiply_halves(a, b_low);
  const Longs first = multiply_halves(a_high, b_low) + (least >> 32);
  const Longs second = multiply_halves(a, b_high) + (first & 0xffffffffu);
  const Longs most = multiply_halves(a_high, b_high);
  return {most + (first >> 32) + (second >> 32), (second << 32) | (least & 0xffffffffu)};
}
#else
inline WideProduct multiply_wide(Longs a, uint64_t b) {
  WideProduct product;
  for (int lane = 0; lane < kLongLanes; ++lane) {
    const unsigned __int128 wide = static_cast<unsigned __int128>(a[lane]) * b;
    product.high[lane] = uint64_t(wide >> 64);
    product.low[lane] = uint64_t(wide);
  }
  return product;
}
#endif

constexpr int kWays = 2;  // vectors of counters at a time, so that one is not waited for
constexpr int kCounters = kWays * kLongLanes;

/// The words of `kCounters` counters from `count` on: word by word, counter by counter. A call of its own, which needs
/// all registers.
__attribute__((noinline)) inline void philox(const Stream& stream, uint64_t count, Longs (&words)[4][kWays]) {
  Longs a[kWays], b[kWays], c[kWays], d[kWays];
  for (int way = 0; way < kWays; ++way) {
    for (int lane = 0; lane < kLongLanes; ++lane) a[way][lane] = count + uint64_t(way * kLongLanes + lane);
    b[way] = Longs{} + stream.index;
    c[way] = d[way] = Longs{};
  }
#pragma GCC unroll 10
  for (int round = 0; round < kRounds; ++round) {
#pragma GCC unroll 2
    for (int way = 0; way < kWays; ++way) {
      const WideProduct left = multiply_wide(a[way], 0xD2E7470EE14C6C93u);
      const WideProduct right = multiply_wide(c[way], 0xCA5A826395121157u);
      a[way] = right.high ^ b[way] ^ stream.seeds[round];
      b[way] = right.low;
      c[way] = left.high ^ d[way] ^ stream.samples[round];
      d[way] = left.low;
    }
  }
  for (int way = 0; way < kWays; ++way)
    words[0][way] = a[way], words[1][way] = b[way], words[2][way] = c[way], words[3][way] = d[way];
}

}  // namespace kvrelay::vectors
