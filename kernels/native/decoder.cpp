#include "decoder.h"

#include <algorithm>

#include "entry.h"
#include "pointwise.h"

namespace kvrelay {
namespace {

constexpr int64_t kAlignment = 64;

// Parts of the scratch memory, one after the other; without memory it only counts.
class Parts {
 public:
  explicit Parts(void* memory) : memory_(static_cast<char*>(memory)) {}

  void* take(int64_t bytes) {
    char* part = memory_ == nullptr ? nullptr : memory_ + taken_;
    taken_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    return part;
  }
  float* floats(int64_t count) { return static_cast<float*>(take(count * 4)); }
  int64_t taken() const { return taken_; }

 private:
  char* memory_;
  int64_t taken_ = 0;
};

struct Scratch {
  float* wide;      // [num_rows, outputs of qkv or gate_up]
  float* narrow;    // [num_rows, hidden, or what output and down read]
  float* query;     // [num_rows, num_heads, head_dim]
  void* workspace;  // of linear layers
};

Scratch carve(const DecoderLayer& layer, int64_t rows, Parts& parts) {
  const Matrix* all[] = {&layer.qkv, &layer.output, &layer.gate_up, &layer.down};
  int64_t columns = 0;
  for (const Matrix* matrix : all) columns = std::max(columns, matrix->columns);
  Scratch scratch;
  scratch.wide = parts.floats(rows * std::max(layer.qkv.outputs, layer.gate_up.outputs));
  scratch.narrow = parts.floats(rows * columns);
  scratch.query = parts.floats(rows * layer.output.columns);
  scratch.workspace = parts.take(workspace_bytes(rows, columns));
  return scratch;
}

void multiply(const Matrix& matrix, const float* x, const Step& step, const Scratch& scratch, float* out, bool add) {
  linear(matrix.form, x, step.num_rows, matrix.columns, matrix.tiles, {out, matrix.bias, matrix.outputs, add},
         scratch.workspace, step.threads);
}

void norm(const float* weight, const Step& step, int64_t size, float* out) {
  add_and_norm(step.residual, nullptr, weight, step.eps, out, Type::kFloat32, step.num_rows, size,
               static_cast<int>(step.threads));
}

HeadWrite heads_of(const DecoderLayer& layer, const Step& step, const Scratch& scratch, void* kv) {
  HeadWrite write{};
  write.qkv = scratch.wide;
  write.q_norm = layer.q_norm;
  write.k_norm = layer.k_norm;
  write.cos = step.cos;
  write.sin = step.sin;
  write.positions = step.positions;
  write.slots = step.slots;
  write.begun = step.begun;
  write.query = scratch.query;
  write.kv = kv;
  write.query_type = Type::kFloat32;
  write.kv_type = static_cast<Type>(step.kv_type);
  write.num_rows = step.num_rows;
  write.num_heads = step.num_heads;
  write.num_kv_heads = step.num_kv_heads;
  write.head_dim = step.head_dim;
  write.block_size = step.block_size;
  write.num_begun = step.num_begun;
  write.eps = step.eps;
  return write;
}

Attention attention_of(const Step& step, const Scratch& scratch, const void* kv) {
  Attention call{};
  call.query = scratch.query;
  call.kv = kv;
  call.output = scratch.narrow;
  call.query_type = call.output_type = Type::kFloat32;
  call.kv_type = static_cast<Type>(step.kv_type);
  call.num_heads = static_cast<int32_t>(step.num_heads);
  call.num_kv_heads = static_cast<int32_t>(step.num_kv_heads);
  call.head_dim = static_cast<int32_t>(step.head_dim);
  call.block_size = static_cast<int32_t>(step.block_size);
  call.row_offsets = step.row_offsets;
  call.starts = step.starts;
  call.table_offsets = step.table_offsets;
  call.block_ids = step.block_ids;
  call.num_sequences = step.num_sequences;
  return call;
}

}  // namespace

int64_t scratch_bytes(const DecoderLayer& layer, const Step& step) {
  Parts counted(nullptr);
  carve(layer, step.num_rows, counted);
  return counted.taken();
}

void decoder_layer(const DecoderLayer& layer, const Step& step, void* kv) {
  const int threads = static_cast<int>(step.threads);
  Parts parts(step.scratch);
  const Scratch scratch = carve(layer, step.num_rows, parts);
  norm(layer.attention_norm, step, layer.qkv.columns, scratch.narrow);
  multiply(layer.qkv, scratch.narrow, step, scratch, scratch.wide, false);
  write_heads(heads_of(layer, step, scratch, kv), threads);
  attend(attention_of(step, scratch, kv), threads);
  multiply(layer.output, scratch.narrow, step, scratch, step.residual, true);
  norm(layer.mlp_norm, step, layer.gate_up.columns, scratch.narrow);
  multiply(layer.gate_up, scratch.narrow, step, scratch, scratch.wide, false);
  silu_and_multiply(scratch.wide, scratch.narrow, Type::kFloat32, step.num_rows, layer.down.columns, threads);
  multiply(layer.down, scratch.narrow, step, scratch, step.residual, true);
}

}  // namespace kvrelay

KVRELAY_ENTRY void kvrelay_decoder_layer(const void* layer, const void* step, void* kv) {
  kvrelay::decoder_layer(*static_cast<const kvrelay::DecoderLayer*>(layer), *static_cast<const kvrelay::Step*>(step),
                         kv);
}

KVRELAY_ENTRY void kvrelay_decoder_scratch_bytes(const void* layer, const void* step, int64_t* bytes) {
  *bytes = kvrelay::scratch_bytes(*static_cast<const kvrelay::DecoderLayer*>(layer),
                                  *static_cast<const kvrelay::Step*>(step));
}
