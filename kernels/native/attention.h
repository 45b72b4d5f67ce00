// Attention over a paged KV cache for the packed rows of a step: decoding rows and prefill chunks alike.
#pragma once

#include <cstdint>

namespace kvrelay {

enum class Type : int32_t { kFloat32 = 0, kBFloat16 = 1, kInt8 = 2 };  // int8 only in the cache

/// Elements of one head of one token in the cache. Codes of int8 are followed by what a unit of them is worth, a float.
template <class KV, class Size>
constexpr Size row_size(Size head_dim) {
  return sizeof(KV) == 1 ? head_dim + Size(sizeof(float)) : head_dim;
}

/// One call. Sequence s has rows `row_offsets[s]` to `row_offsets[s + 1]`, which are its positions from `starts[s]`
/// on, and the blocks `block_ids[table_offsets[s]]` onwards. A row sees positions 0 to its own. What lies behind the
/// last position of a sequence is not read.
struct Attention {
  const void* query;  // [N, num_heads, head_dim] of query_type
  const void* kv;     // [num_blocks, 2, num_kv_heads, block_size, row_size] of kv_type, keys first
  void* output;       // [N, num_heads, head_dim] of output_type
  Type query_type, kv_type, output_type;
  int32_t num_heads, num_kv_heads, head_dim, block_size;
  const int64_t* row_offsets;    // [num_sequences + 1]
  const int64_t* starts;         // [num_sequences]
  const int64_t* table_offsets;  // [num_sequences + 1]
  const int64_t* block_ids;
  int64_t num_sequences;
};

/// Computes all rows. Each one's bits depend on its query and its sequence's KV alone: not on the other rows, the
/// block size, where blocks lie, or the number of threads.
void attend(const Attention& call, int num_threads);

}  // namespace kvrelay
