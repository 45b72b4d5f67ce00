#include "linear.h"

#include "entry.h"

namespace kvrelay {
namespace {

// One after the other in the workspace; each part is a multiple of 4 bytes.
QuantizedRows quantized_in(void* workspace, int64_t rows, int64_t columns) {
  const int64_t count = rows * num_groups(columns);
  int8_t* codes = static_cast<int8_t*>(workspace);
  float* scales = reinterpret_cast<float*>(codes + count * kGroup);
  return {codes, scales, scales + count, reinterpret_cast<int32_t*>(scales + 2 * count)};
}

}  // namespace

void linear(Form form, const float* x, int64_t rows, int64_t columns, const void* weights, Outputs to, void* workspace,
            int64_t threads) {
  if (form == Form::kFp32) return linear_fp32(x, rows, columns, static_cast<const float*>(weights), to, threads);
  if (form == Form::kBf16) {
    uint16_t* rounded = static_cast<uint16_t*>(workspace);
    round_rows(x, rows, columns, rounded, threads);
    return linear_bf16(rounded, rows, columns, static_cast<const uint16_t*>(weights), to, threads);
  }
  const QuantizedRows quantized = quantized_in(workspace, rows, columns);
  const auto multiply = form == Form::kInt4 ? linear_int4 : linear_int8;
  quantize_rows(x, rows, columns, quantized, threads);
  multiply(quantized, rows, columns, static_cast<const uint8_t*>(weights), to, threads);
}

}  // namespace kvrelay

KVRELAY_ENTRY void kvrelay_linear(int64_t form, const float* x, int64_t rows, int64_t columns, const void* weights,
                                  const float* bias, int64_t outputs, int64_t add, float* values, void* workspace,
                                  int64_t threads) {
  kvrelay::linear(static_cast<kvrelay::Form>(form), x, rows, columns, weights, {values, bias, outputs, add != 0},
                  workspace, threads);
}
