// One decoder layer in one call: between the kernels nothing returns to the interpreter.
#pragma once

#include <cstdint>

#include "attention.h"
#include "linear.h"

namespace kvrelay {

// A linear layer: see linear.h for the forms. bias is [outputs] or null.
struct Matrix {
  Form form;
  const void* tiles;
  const float* bias;
  int64_t outputs;
  int64_t columns;
};

struct DecoderLayer {
  Matrix qkv, output, gate_up, down;
  const float* attention_norm;  // [hidden]
  const float* mlp_norm;        // [hidden]
  const float* q_norm;          // [head_dim], or null
  const float* k_norm;
};

// What is the same for all layers of a step. Sequences and their blocks are those of `Attention`.
struct Step {
  float* residual;           // [num_rows, hidden], the stream that every layer adds to
  const float* cos;          // [num_positions, head_dim]: see `HeadWrite`
  const float* sin;
  const int64_t* positions;  // [num_rows]
  const int64_t* slots;      // [num_rows]: block * block_size + offset
  const int64_t* begun;      // [num_begun] blocks that are filled with zeros first
  const int64_t* row_offsets;
  const int64_t* starts;
  const int64_t* table_offsets;
  const int64_t* block_ids;
  void* scratch;  // of scratch_bytes
  int64_t num_rows, num_begun, num_sequences, num_heads, num_kv_heads, head_dim, block_size;
  int64_t kv_type;
  int64_t threads;
  float eps;
};

// kv is the layer's cache, [num_blocks, 2, num_kv_heads, block_size, row_size].
void decoder_layer(const DecoderLayer& layer, const Step& step, void* kv);

// What a step needs for any layer of this shape.
int64_t scratch_bytes(const DecoderLayer& layer, const Step& step);

}  // namespace kvrelay
