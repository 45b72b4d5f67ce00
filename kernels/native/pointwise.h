// What happens to rows between the matrix products of a decoder layer. Every row by itself, each sum in an order that
// its length alone decides.
#pragma once

#include <cstdint>

#include "attention.h"

namespace kvrelay {

/// One layer's new keys and values on their way into the cache, and its queries on theirs to attention.
struct HeadWrite {
  const float* qkv;     // [N, (num_heads + 2 * num_kv_heads) * head_dim]: queries, keys, values
  const float* q_norm;  // [head_dim], weights of the norm of each query and key head; null: none
  const float* k_norm;
  const float* cos;          // [num_positions, head_dim], both halves the same
  const float* sin;          // the same, the first half negative
  const int64_t* positions;  // [N]
  const int64_t* slots;      // [N]: block * block_size + offset
  const int64_t* begun;      // [num_begun] blocks that are filled with zeros before
  void* query;               // [N, num_heads, head_dim] of query_type
  void* kv;                  // [num_blocks, 2, num_kv_heads, block_size, row_size] of kv_type, keys first
  Type query_type, kv_type;
  int64_t num_rows, num_heads, num_kv_heads, head_dim, block_size, num_begun;
  float eps;
};

/// Normalises (if there are weights) and rotates queries and keys, and stores all in their types.
void write_heads(const HeadWrite& call, int num_threads);

/// Root mean square normalisation (Zhang and Sennrich, 2019) of rows `[num_rows, size]` to `output` of its type, after
/// `residual += added`, unless that is null.
void add_and_norm(float* residual, const float* added, const float* weight, float eps, void* output, Type output_type,
                  int64_t num_rows, int64_t size, int num_threads);

/// SiLU of the first half of each row times the second: `[num_rows, 2 * size]` to `[num_rows, size]` (Shazeer, 2020).
void silu_and_multiply(const float* x, void* output, Type output_type, int64_t num_rows, int64_t size, int num_threads);

}  // namespace kvrelay
