// The softmax is taken online, tile by tile in the order of positions (Milakov and Gimelshein, 2018; Dao et al., 2022):
// per query vector the largest score so far, the sum of the weights and the weighted sum of the values. A tile's keys
// are transposed and its values laid out once for all query heads that share them and for a block of rows of one
// sequence.
//
// What is rounded where: with KV in bfloat16 queries and weights are rounded to bfloat16 too (the weights' sum is that
// of the rounded ones); all else is float32. Of KV in int8 the codes are multiplied; what they are worth goes into the
// scores and into the weights. Where the processor multiplies integers (VNNI), queries are rounded to 127ths of the
// largest value of their head, and a row's weights of a tile, times what their values are worth, to 32767ths of the
// largest of them.
#include "attention.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "attention_tile.h"
#include "entry.h"

namespace kvrelay {
namespace {

using namespace vectors;

constexpr int kTasksOfThread = 4;  // so many at least before heads share a task
constexpr int kFactors = kLanes > 8 ? kLanes : 8;
constexpr float kLeast = -3e38f;  // below all scores
constexpr auto kNothing = [](int) {};

/// A block of rows of one sequence, under some of the KV heads.
struct Task {
  int64_t sequence, first_row, num_rows, first_position;
  int first_head, num_heads;
  int64_t stop() const { return first_position + num_rows; }
};

float largest_of(const float* scores, int visible, int count) {
  Floats most = splat(kLeast);
  for (int position = 0; position < count; position += kLanes) {
    const Floats score = load(scores + position);
    most = maximum(most, position + kLanes <= visible ? score : lanes_below(position, visible) ? score : most);
  }
  return largest(most);
}

/// Sums of codes of keys become scores.
inline void multiply_by(const float* scales, int count, float* scores) {
  for (int position = 0; position < count; position += kLanes)
    store(scores + position, load(scores + position) * load(scales + position));
}

/// Weights of kLanes scores from `position` on, 0 for what the row does not see.
inline Floats weights_of(const float* scores, float scale, float largest, int position, int visible) {
  const Floats power = exp2(fma(load(scores + position), splat(scale), splat(-largest)));
  return position + kLanes <= visible ? power : lanes_below(position, visible) ? power : Floats{};
}

/// Weights as the codes of values are multiplied by; none of what has no weight, whatever its codes are worth.
inline Floats weights_of_codes(Floats weights, const float* scales) {
  return weights == Floats{} ? weights : weights * load(scales);
}

/// Weights of a row's scores, as they are multiplied; their sum by lanes.
template <class KV>
Floats weigh(const float* scores, float scale, float largest, int visible, int count, const Scales<KV>& scales,
             float* weights) {
  Floats total = {};
  for (int position = 0; position < count; position += kLanes) {
    Floats weight = weights_of(scores, scale, largest, position, visible);
    if constexpr (std::is_same_v<KV, BFloat16>) weight = round_to_bfloat16(weight);
    total += weight;
    if constexpr (std::is_same_v<KV, int8_t>) weight = weights_of_codes(weight, scales.values + position);
    store(weights + position, weight);
  }
  return total;
}

#if defined(__AVX512BF16__)
template <class KV>
Floats weigh(const float* scores, float scale, float largest, int visible, int count, const Scales<KV>&,
             BFloat16* weights) {
  const BFloat16 ones[2] = {{0x3f80}, {0x3f80}};
  Floats total = {};
  for (int position = 0; position < count; position += 2 * kLanes) {
    const Floats pairs = round_to_pairs(weights_of(scores, scale, largest, position, visible),
                                        weights_of(scores, scale, largest, position + kLanes, visible));
    std::memcpy(weights + position, &pairs, sizeof pairs);
    total = Pairs::multiply_add(ones, pairs, total);
  }
  return total;
}
#endif

#if defined(__AVX512VNNI__)
/// Sums of four by four codes become scores.
inline void multiply_by(const float* scales, int32_t offset, float worth, int count, float* scores) {
  for (int position = 0; position < count; position += kLanes) {
    const Ints sums = (Ints)load(scores + position) + splat(offset);
    store(scores + position, __builtin_convertvector(sums, Floats) * (splat(worth) * load(scales + position)));
  }
}

/// As `weigh`, with weights of 16 bits; `worth` is what a unit of them is, not a number if a weight is not. Scores are
/// overwritten.
inline Floats weigh_codes(float* scores, float scale, float largest, int visible, int count,
                          const Scales<int8_t>& scales, int16_t* weights, float* worth) {
  Floats total = {};
  Ints most = {};
  for (int position = 0; position < count; position += kLanes) {
    const Floats weight = weights_of(scores, scale, largest, position, visible);
    const Floats of_codes = weights_of_codes(weight, scales.values + position);
    total += weight;
    most = magnitudes(of_codes) > most ? magnitudes(of_codes) : most;
    store(scores + position, of_codes);
  }
  const float magnitude = largest_magnitude(most);
  *worth = magnitude / 32767.0f;
  const Floats inverse = splat(magnitude > 0 ? 32767.0f / magnitude : 0.0f);
  for (int position = 0; position < count; position += kLanes)
    store(weights + position, load(scores + position) * inverse);
  return total;
}

/// output = output * factor + products * worth, row by row; products are integers.
inline void add_products(const float* products, int num, const float* factors, const float* worth, int columns,
                         float* output) {
  for (int row = 0; row < num; ++row)
    for (int column = row * columns; column < (row + 1) * columns; column += kLanes) {
      const Floats product = __builtin_convertvector((Ints)load(products + column), Floats);
      store(output + column, fma(load(output + column), splat(factors[row]), product * splat(worth[row])));
    }
}
#endif

/// The scores of up to kMaxRows query vectors become weights; `factors` bring what was summed so far to the new
/// largest score.
template <class Unit, class KV>
void weigh_rows(const Scratch<Unit>& scratch, float scale, int first, int num, const int* visible, int count,
                const Scales<KV>& scales, float* factors, float* worth) {
  float* largest = scratch.largest + first;
  float before[kFactors] = {}, after[kFactors] = {};
  for (int row = 0; row < num; ++row) {
    float* scores = scratch.scores + row * kTile;
    if constexpr (Unit::kWidth == 4)
      multiply_by(scales.keys, scratch.offsets[first + row], scratch.worth[first + row], count, scores);
    else if constexpr (std::is_same_v<KV, int8_t>)
      multiply_by(scales.keys, count, scores);
    before[row] = largest[row];
    after[row] = std::max(before[row], largest_of(scores, visible[row], count) * scale);
    largest[row] = after[row];
  }
  for (int row = 0; row < num; row += kLanes) store(factors + row, exp2(load(before + row) - load(after + row)));
  for (int row = 0; row < num; ++row) {
    float* sums = scratch.sums + (first + row) * kLanes;
    float* scores = scratch.scores + row * kTile;
    auto* weights = scratch.weights + row * kTile;
    Floats total;
    if constexpr (Unit::kWidth == 4)
      total = weigh_codes(scores, scale, after[row], visible[row], count, scales, weights, worth + row);
    else
      total = weigh<KV>(scores, scale, after[row], visible[row], count, scales, weights);
    store(sums, fma(load(sums), splat(factors[row]), total));
  }
}

/// One task from its queries to its outputs. Query vectors are ordered by KV head, then row, then query head.
template <class Unit, bool Whole, class KV>
class Attending {
  using Weights = typename Unit::Weights;
  static constexpr bool kIntegers = Unit::kWidth == 4;
  static constexpr int kFetches = kIntegers ? 2 : 1;  // beside each unit of keys, which are half as many

 public:
  Attending(const Attention& call, const Task& task, const Shape<Unit>& shape, const Scratch<Unit>& scratch)
      : call(call),
        task(task),
        shape(shape),
        scratch(scratch),
        vectors_of_head(int(task.num_rows) * shape.group),
        num_vectors(vectors_of_head * task.num_heads),
        strip(int64_t(call.block_size) * row_size<KV>(call.head_dim)),
        scale(1.44269504f / std::sqrt(float(call.head_dim))) {}

  void run() {
    begin();
    Rows<KV> rows = find(0);
    for (int64_t start = 0; start < task.stop(); start += kTile) {
      const int64_t after = start + kTile;
      const Rows<KV> next = after < task.stop() ? find(after) : rows;
      for (int head = 0; head < task.num_heads; ++head) {
        const bool last = head + 1 == task.num_heads;
        tile(start, head, under(rows, head), last ? under(next, 0) : under(rows, head + 1));
      }
      rows = next;
    }
    for (int vector = 0; vector < num_vectors; ++vector)
      if (call.output_type == Type::kFloat32)
        finish(vector, static_cast<float*>(call.output));
      else
        finish(vector, static_cast<BFloat16*>(call.output));
  }

 private:
  const Attention& call;
  const Task& task;
  const Shape<Unit>& shape;
  const Scratch<Unit>& scratch;
  const int vectors_of_head, num_vectors;
  const int64_t strip;  // elements of one head of one block
  const float scale;    // of scores, as powers of 2

  int64_t offset_of(int vector) const {
    const int head = task.first_head + vector / vectors_of_head, within = vector % vectors_of_head;
    const int64_t row = task.first_row + within / shape.group;
    return (row * call.num_heads + head * shape.group + within % shape.group) * shape.head_dim;
  }

  void begin() {
    constexpr bool rounded = std::is_same_v<KV, BFloat16>;
    for (int vector = 0; vector < num_vectors; ++vector) {
      auto* to = scratch.query + vector * shape.query_stride;
      if constexpr (kIntegers) {
        const auto encoded = [&](const auto* query) {
          return load_query(query + offset_of(vector), shape.head_dim, scratch.products, to, scratch.offsets + vector);
        };
        scratch.worth[vector] = call.query_type == Type::kFloat32 ? encoded(static_cast<const float*>(call.query))
                                                                  : encoded(static_cast<const BFloat16*>(call.query));
      } else if (call.query_type == Type::kFloat32)
        load_query(static_cast<const float*>(call.query) + offset_of(vector), shape.head_dim, rounded, to);
      else
        load_query(static_cast<const BFloat16*>(call.query) + offset_of(vector), shape.head_dim, rounded, to);
    }
    std::fill_n(scratch.output, num_vectors * shape.columns, 0.0f);
    std::fill_n(scratch.sums, num_vectors * kLanes, 0.0f);
    std::fill_n(scratch.largest, num_vectors, kLeast);
  }

  /// Where the tile that begins at a position lies, under the task's first head.
  Rows<KV> find(int64_t start) const {
    Rows<KV> rows;
    const int size = row_size<KV>(shape.head_dim);
    rows.to_values = call.num_kv_heads * strip;
    rows.num_lines = int(rounded_up(size * int64_t(sizeof(KV)), kLine) / kLine);
    const int64_t* table = call.block_ids + call.table_offsets[task.sequence] + start / call.block_size;
    int offset = int(start % call.block_size), position = 0;
    const int count = int(std::min<int64_t>(task.stop() - start, kTile));
    while (position < count) {
      const KV* key = static_cast<const KV*>(call.kv) + *table++ * 2 * call.num_kv_heads * strip +
                      task.first_head * strip + offset * size;
      for (; offset < call.block_size && position < count; ++offset, key += size) rows.keys[position++] = key;
      offset = 0;
    }
    std::fill(rows.keys + count, rows.keys + kTile, rows.keys[count - 1]);
    return rows;
  }

  Rows<KV> under(Rows<KV> rows, int head) const {
    for (const KV*& key : rows.keys) key += head * strip;
    return rows;
  }

  void tile(int64_t start, int head, const Rows<KV>& rows, const Rows<KV>& next) const {
    const int count = int(rounded_up(std::min<int64_t>(task.stop() - start, kTile), kLanes * Weights::kWidth));
    pack_keys<Unit, Whole>(shape, rows, count, next, scratch.keys);
    const Unpacked<Unit, Whole, KV> values{shape, rows};
    const Scales<KV> scales(rows, shape.head_dim, count);
    // Few queries do not pay for values that are laid out; those whose width does not fit want zeros behind them.
    const bool few = Whole && vectors_of_head <= kMaxRows;
    if (!few) pack_values(shape, values, count / Weights::kWidth, scratch.values);
    const int unseen = int(std::max<int64_t>(start - task.first_position, 0));  // rows that end before this tile
    for (int within = unseen * shape.group; within < vectors_of_head; within += kMaxRows) {
      const int num = std::min(kMaxRows, vectors_of_head - within), first = head * vectors_of_head + within;
      int visible[kMaxRows];
      for (int row = 0; row < num; ++row)
        visible[row] = int(std::min<int64_t>(task.first_position + (within + row) / shape.group + 1 - start, kTile));
      const auto score = [&](const auto& meanwhile) {
        multiply<Unit>(num, scratch.query + first * shape.query_stride, shape.query_stride, Packed{scratch.keys, kTile},
                       shape.num_units, nullptr, scratch.scores, kTile, count, meanwhile);
      };
      if (few)
        score([&](int unit) KVRELAY_INLINE {
          for (int row = unit * kFetches; row < (unit + 1) * kFetches; ++row)
            if (row < kTile / 2) next.fetch(kTile / 2 + row);
        });
      else
        score(kNothing);
      float factors[kFactors], worth[kMaxRows];
      weigh_rows<Unit, KV>(scratch, scale, first, num, visible, count, scales, factors, worth);
      const int num_units = (visible[num - 1] + Weights::kWidth - 1) / Weights::kWidth;
      float* output = scratch.output + first * shape.columns;
      const float* kept = kIntegers ? nullptr : factors;
      float* to = kIntegers ? scratch.products : output;
      if (few)
        multiply<Weights>(num, scratch.weights, kTile, values, num_units, kept, to, shape.columns, shape.columns,
                          [&](int unit) KVRELAY_INLINE {
                            for (int row = 0; row < Weights::kWidth; ++row)
                              next.fetch(kTile + unit * Weights::kWidth + row);
                          });
      else
        multiply<Weights>(num, scratch.weights, kTile, Packed{scratch.values, shape.columns}, num_units, kept, to,
                          shape.columns, shape.columns, kNothing);
      if constexpr (kIntegers) add_products(scratch.products, num, factors, worth, shape.columns, output);
    }
  }

  template <class Out>
  void finish(int vector, Out* to) const {
    to += offset_of(vector);
    const float whole = sum(load(scratch.sums + vector * kLanes));
    const float* from = scratch.output + vector * shape.columns;
    for (int column = 0; column < shape.head_dim; ++column)
      narrow(from[column] / whole + 0.0f, to + column);  // + 0: whether a zero has a sign depends on other rows
  }
};

std::vector<Task> tasks_of(const Attention& call, int num_threads) {
  const int group = call.num_heads / call.num_kv_heads;
  const int64_t rows_of_task = std::max(1, kVectorsOfTask / group);
  std::vector<Task> tasks;
  for (int64_t sequence = 0; sequence < call.num_sequences; ++sequence) {
    const int64_t begin = call.row_offsets[sequence], end = call.row_offsets[sequence + 1];
    const bool one = end - begin == 1 && call.num_sequences >= kTasksOfThread * num_threads;
    const int heads = one ? call.num_kv_heads : 1;
    for (int64_t row = begin; row < end; row += rows_of_task)
      for (int head = 0; head < call.num_kv_heads; head += heads)
        tasks.push_back({sequence, row, std::min<int64_t>(end - row, rows_of_task), call.starts[sequence] + row - begin,
                         head, heads});
  }
  return tasks;
}

template <class Unit, class KV>
void attend_with(const Attention& call, int num_threads) {
  const Shape<Unit> shape(call);
  const std::vector<Task> tasks = tasks_of(call, num_threads);
  const int64_t num_tasks = int64_t(tasks.size());
#pragma omp parallel num_threads(num_threads) if (num_threads > 1 && num_tasks > 1)
  {
    const Scratch<Unit> scratch(shape);
#pragma omp for schedule(dynamic, 1)
    for (int64_t index = 0; index < num_tasks; ++index)
      if (call.head_dim % kTile == 0)
        Attending<Unit, true, KV>(call, tasks[size_t(index)], shape, scratch).run();
      else
        Attending<Unit, false, KV>(call, tasks[size_t(index)], shape, scratch).run();
  }
}

}  // namespace

void attend(const Attention& call, int num_threads) {
  if (call.kv_type == Type::kFloat32) return attend_with<Singles, float>(call, num_threads);
#if defined(__AVX512BF16__)
  if (call.kv_type == Type::kBFloat16) return attend_with<Pairs, BFloat16>(call, num_threads);
#else
  if (call.kv_type == Type::kBFloat16) return attend_with<Singles, BFloat16>(call, num_threads);
#endif
#if defined(__AVX512VNNI__)
  return attend_with<Quads, int8_t>(call, num_threads);
#else
  return attend_with<Singles, int8_t>(call, num_threads);
#endif
}

}  // namespace kvrelay

KVRELAY_ENTRY void kvrelay_attend(const void* query, const void* kv, void* output, int64_t query_type, int64_t kv_type,
                                  int64_t output_type, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                                  int64_t block_size, const int64_t* row_offsets, const int64_t* starts,
                                  const int64_t* table_offsets, const int64_t* block_ids, int64_t num_sequences,
                                  int64_t num_threads) {
  using kvrelay::Type;
  kvrelay::attend(
      {query, kv, output, Type(query_type), Type(kv_type), Type(output_type), int32_t(num_heads), int32_t(num_kv_heads),
       int32_t(head_dim), int32_t(block_size), row_offsets, starts, table_offsets, block_ids, num_sequences},
      int(num_threads));
}
