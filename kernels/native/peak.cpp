// What a core could do at most, for benchmarks: the arithmetic of the linear layers without any memory, and reading.
#include "entry.h"
#include "lanes.h"
#include "linear.h"

namespace kvrelay {
namespace {

constexpr int kChains = 12;  // that do not wait for each other, more than the latency of any of the instructions

template <class Sum, class Step>
Sum repeat(int64_t times, Sum zero, Step step) {
  Sum sums[kChains];
  for (Sum& sum : sums) sum = zero;
  for (int64_t i = 0; i < times; i++)
    for (Sum& sum : sums) sum = step(sum);
  for (const Sum& sum : sums) zero = plus(zero, sum);
  return zero;
}

// Returns a number that depends on all, so that no compiler leaves anything out.
float multiply_repeatedly(Form form, int64_t times) {
  const uint16_t pair[2] = {0x3f80, 0x3f80};
  const int8_t four[4] = {1, 1, 1, 1};
  const uint8_t ones[4 * kLanes] = {1};
  const Bytes bytes = load_bytes(ones);
  switch (form) {
    case Form::kInt4:
      return largest(to_floats(repeat(times, ints(0), [&](Ints sum) { return dot_nibbles(bytes, four, sum); })));
    case Form::kInt8:
      return largest(to_floats(repeat(times, ints(0), [&](Ints sum) { return dot(bytes, four, sum); })));
    case Form::kBf16:
      return largest(repeat(times, floats(0), [&](Floats sum) { return dot_bf16(bytes, pair, sum); }));
    default:
      return largest(repeat(times, floats(0), [&](Floats sum) { return multiply_add(sum, floats(0.5f), sum); }));
  }
}

float read_all(const float* x, int64_t count) {
  Floats found[4] = {floats(0), floats(0), floats(0), floats(0)};
  for (int64_t i = 0; i < count; i += 4 * kLanes)
    for (int64_t j = 0; j < 4; j++) found[j] = larger_magnitude(found[j], load(x + i + j * kLanes));
  return largest(larger_magnitude(larger_magnitude(found[0], found[1]), larger_magnitude(found[2], found[3])));
}

}  // namespace
}  // namespace kvrelay

// Of each of the `times`, 12 x 16 lanes multiply 4 (integers), 2 (bf16) or 1 (fp32) pairs of numbers.
KVRELAY_ENTRY void kvrelay_peak(int64_t form, int64_t times, float* result) {
  *result = kvrelay::multiply_repeatedly(static_cast<kvrelay::Form>(form), times);
}

// `count` is a multiple of 64.
KVRELAY_ENTRY void kvrelay_read(const float* x, int64_t count, float* result) { *result = kvrelay::read_all(x, count); }
