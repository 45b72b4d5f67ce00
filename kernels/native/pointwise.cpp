#include "pointwise.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "codes.h"
#include "entry.h"
#include "vector.h"

namespace kvrelay {
namespace {

using namespace vectors;

constexpr int kSums = 4;  // vectors that a sum of squares is spread over

/// Calls `each(first, num)` for every vector of a row, the last one perhaps in part.
template <class Each>
inline KVRELAY_INLINE void over(int64_t size, const Each& each) {
  int64_t first = 0;
  for (; first + kLanes <= size; first += kLanes) each(first, kLanes);
  if (first < size) each(first, int(size - first));
}

inline KVRELAY_INLINE Floats load_some(const float* from, int num) {
  return num == kLanes ? load(from) : load_part(from, num);
}

template <class To>
inline KVRELAY_INLINE void store_some(To* to, Floats value, int num) {
  if (num == kLanes)
    store(to, value);
  else
    store_part(to, value, num);
}

float inverse_root_mean_square(const float* x, int64_t size, float eps) {
  Floats sums[kSums] = {};
  over(size, [&](int64_t first, int num) {
    const Floats value = load_some(x + first, num);
    Floats& total = sums[first / kLanes % kSums];
    total = fma(value, value, total);
  });
  return 1.0f / std::sqrt(sum((sums[0] + sums[1]) + (sums[2] + sums[3])) / float(size) + eps);
}

template <class Out>
void norm_row(const float* x, const float* weight, float eps, Out* to, int64_t size) {
  const Floats scale = splat(inverse_root_mean_square(x, size, eps));
  over(size, [&](int64_t first, int num) {
    store_some(to + first, load_some(x + first, num) * scale * load_some(weight + first, num), num);
  });
}

/// Each element is paired with the one half a head away.
template <class Out>
void rotate(const float* x, const float* cos, const float* sin, Out* to, int64_t head_dim) {
  const int64_t half = head_dim / 2;
  for (int64_t side = 0; side < head_dim; side += half)
    over(half, [&](int64_t first, int num) {
      const int64_t own = side + first, other = half - side + first;
      const Floats kept = load_some(x + own, num) * load_some(cos + own, num);
      store_some(to + own, fma(load_some(x + other, num), load_some(sin + own, num), kept), num);
    });
}

template <class Out>
void copy(const float* x, Out* to, int64_t size) {
  over(size, [&](int64_t first, int num) { store_some(to + first, load_some(x + first, num), num); });
}

/// Codes, and behind them what a unit of them is worth.
void copy(const float* x, int8_t* to, int64_t size) {
  const float scale = encode(x, size, to);
  std::memcpy(to + size, &scale, sizeof scale);
}

template <class Query, class KV>
void write_row(const HeadWrite& call, int64_t row, float* normed) {
  const int64_t dim = call.head_dim, size = row_size<KV>(dim), strip = call.block_size * size;
  const int64_t block = call.slots[row] / call.block_size, offset = call.slots[row] % call.block_size;
  const float* from = call.qkv + row * (call.num_heads + 2 * call.num_kv_heads) * dim;
  const float *cos = call.cos + call.positions[row] * dim, *sin = call.sin + call.positions[row] * dim;
  Query* query = static_cast<Query*>(call.query) + row * call.num_heads * dim;
  KV* key = static_cast<KV*>(call.kv) + block * 2 * call.num_kv_heads * strip + offset * size;
  const auto rotated = [&](const float* weight, auto* to) {
    if (weight) norm_row(from, weight, call.eps, normed, dim);
    rotate(weight ? normed : from, cos, sin, to, dim);
    from += dim;
  };
  for (int64_t head = 0; head < call.num_heads; ++head) rotated(call.q_norm, query + head * dim);
  for (int64_t head = 0; head < call.num_kv_heads; ++head) {
    if constexpr (std::is_same_v<KV, int8_t>) {
      rotated(call.k_norm, normed + dim);
      copy(normed + dim, key + head * strip, dim);
    } else {
      rotated(call.k_norm, key + head * strip);
    }
  }
  for (int64_t head = 0; head < call.num_kv_heads; ++head, from += dim)
    copy(from, key + (call.num_kv_heads + head) * strip, dim);
}

template <class Query, class KV>
void write_with(const HeadWrite& call, int num_threads) {
  const int64_t strips = 2 * call.num_kv_heads, row_bytes = row_size<KV>(call.head_dim) * int64_t(sizeof(KV));
  const int64_t block_bytes = strips * call.block_size * row_bytes;
  for (int64_t index = 0; index < call.num_begun; ++index)
    std::memset(static_cast<char*>(call.kv) + call.begun[index] * block_bytes, 0, size_t(block_bytes));
#pragma omp parallel num_threads(num_threads) if (num_threads > 1 && call.num_rows > 1)
  {
    std::vector<float> normed(2 * size_t(call.head_dim));
#pragma omp for schedule(static)
    for (int64_t row = 0; row < call.num_rows; ++row) write_row<Query, KV>(call, row, normed.data());
  }
}

template <class Query>
void write_query(const HeadWrite& call, int num_threads) {
  if (call.kv_type == Type::kFloat32)
    write_with<Query, float>(call, num_threads);
  else if (call.kv_type == Type::kBFloat16)
    write_with<Query, BFloat16>(call, num_threads);
  else
    write_with<Query, int8_t>(call, num_threads);
}

template <class Out>
void norm_rows(float* residual, const float* added, const float* weight, float eps, Out* output, int64_t num_rows,
               int64_t size, int num_threads) {
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_threads > 1 && num_rows > 1)
  for (int64_t row = 0; row < num_rows; ++row) {
    float* x = residual + row * size;
    if (added)
      over(size, [&](int64_t first, int num) {
        store_some(x + first, load_some(x + first, num) + load_some(added + row * size + first, num), num);
      });
    norm_row(x, weight, eps, output + row * size, size);
  }
}

/// x / (1 + e**-x); far below zero, where that is nothing, it stops at the largest power that there is.
inline Floats silu(Floats x) {
  const Floats power = x * splat(-1.44269504f);
  return x / (exp2(power > splat(127.0f) ? splat(127.0f) : power) + splat(1.0f));
}

template <class Out>
void silu_rows(const float* x, Out* output, int64_t num_rows, int64_t size, int num_threads) {
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_threads > 1 && num_rows > 1)
  for (int64_t row = 0; row < num_rows; ++row)
    over(size, [&](int64_t first, int num) {
      const float* gate = x + row * 2 * size + first;
      store_some(output + row * size + first, silu(load_some(gate, num)) * load_some(gate + size, num), num);
    });
}

}  // namespace

void write_heads(const HeadWrite& call, int num_threads) {
  if (call.query_type == Type::kFloat32)
    write_query<float>(call, num_threads);
  else
    write_query<BFloat16>(call, num_threads);
}

void add_and_norm(float* residual, const float* added, const float* weight, float eps, void* output, Type output_type,
                  int64_t num_rows, int64_t size, int num_threads) {
  if (output_type == Type::kFloat32)
    norm_rows(residual, added, weight, eps, static_cast<float*>(output), num_rows, size, num_threads);
  else
    norm_rows(residual, added, weight, eps, static_cast<BFloat16*>(output), num_rows, size, num_threads);
}

void silu_and_multiply(const float* x, void* output, Type output_type, int64_t num_rows, int64_t size,
                       int num_threads) {
  if (output_type == Type::kFloat32)
    silu_rows(x, static_cast<float*>(output), num_rows, size, num_threads);
  else
    silu_rows(x, static_cast<BFloat16*>(output), num_rows, size, num_threads);
}

}  // namespace kvrelay

using kvrelay::Type;

KVRELAY_ENTRY void kvrelay_write_heads(const float* qkv, const float* q_norm, const float* k_norm, const float* cos,
                                       const float* sin, const int64_t* positions, const int64_t* slots,
                                       const int64_t* begun, void* query, void* kv, int64_t query_type, int64_t kv_type,
                                       int64_t num_rows, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                                       int64_t block_size, int64_t num_begun, float eps, int64_t num_threads) {
  kvrelay::write_heads({qkv, q_norm, k_norm, cos, sin, positions, slots, begun, query, kv, Type(query_type),
                        Type(kv_type), num_rows, num_heads, num_kv_heads, head_dim, block_size, num_begun, eps},
                       int(num_threads));
}

KVRELAY_ENTRY void kvrelay_add_and_norm(float* residual, const float* added, const float* weight, float eps,
                                        void* output, int64_t output_type, int64_t num_rows, int64_t size,
                                        int64_t num_threads) {
  kvrelay::add_and_norm(residual, added, weight, eps, output, Type(output_type), num_rows, size, int(num_threads));
}

KVRELAY_ENTRY void kvrelay_silu_and_multiply(const float* x, void* output, int64_t output_type, int64_t num_rows,
                                             int64_t size, int64_t num_threads) {
  kvrelay::silu_and_multiply(x, output, Type(output_type), num_rows, size, int(num_threads));
}
