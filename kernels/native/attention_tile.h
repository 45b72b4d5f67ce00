// What attention works on: where a tile of keys and values lies in the cache, and how it is laid out for products.
#pragma once

#include <algorithm>
#include <memory>
#include <type_traits>

#include "attention.h"
#include "codes.h"
#include "tile.h"

namespace kvrelay::vectors {

constexpr int kTile = 64;           // positions that are read, weighted and summed together, whatever the block size
constexpr int kVectorsOfTask = 96;  // query vectors of a task, unless one row has more
constexpr int kLine = 64;           // bytes of a cache line

// Products of four by four take one side without a sign: keys, with 128 more than their codes.
constexpr int32_t kSigns = int32_t(0x80808080);

inline int64_t rounded_up(int64_t number, int64_t multiple) { return (number + multiple - 1) / multiple * multiple; }

/// Sizes of matrices in the units that products take.
template <class Unit>
struct Shape {
  int head_dim, num_units, query_stride, columns, group, max_vectors;

  explicit Shape(const Attention& call)
      : head_dim(call.head_dim),
        num_units((call.head_dim + Unit::kWidth - 1) / Unit::kWidth),
        query_stride(num_units * Unit::kWidth),
        columns(int(rounded_up(call.head_dim, kLanes))),
        group(call.num_heads / call.num_kv_heads),
        max_vectors(std::max(kVectorsOfTask, call.num_heads)) {}
};

/// What a thread works in.
template <class Unit>
struct Scratch {
  using Element = typename Unit::Element;
  using Weight = typename Unit::Weights::Element;
  std::unique_ptr<char[]> memory;
  float *keys, *values, *scores, *output, *sums, *largest;
  // Where these are integers: products of weights and values, [kMaxRows][columns]; what a unit of each query is worth,
  // and what takes back the 128 of its keys, [vectors].
  float *products, *worth;
  int32_t* offsets;
  Element* query;
  Weight* weights;

  explicit Scratch(const Shape<Unit>& shape) {
    const int64_t units = rounded_up(shape.num_units, kLanes), vectors = shape.max_vectors;
    const int64_t num_floats =
        units * kTile + (kTile + kMaxRows) * shape.columns + kMaxRows * kTile + vectors * (shape.columns + kLanes + 3);
    const int64_t num_bytes = num_floats * 4 + kMaxRows * kTile * int64_t(sizeof(Weight)) +
                              vectors * shape.query_stride * int64_t(sizeof(Element));
    memory.reset(new char[size_t(kLine + num_bytes)]);
    keys = reinterpret_cast<float*>((uintptr_t(memory.get()) + kLine - 1) / kLine * kLine);
    values = keys + units * kTile;
    scores = values + kTile * shape.columns;
    output = scores + kMaxRows * kTile;
    sums = output + vectors * shape.columns;
    largest = sums + vectors * kLanes;
    products = largest + vectors;
    worth = products + kMaxRows * shape.columns;
    offsets = reinterpret_cast<int32_t*>(worth + vectors);
    weights = reinterpret_cast<Weight*>(offsets + vectors);
    query = reinterpret_cast<Element*>(weights + kMaxRows * kTile);
  }
};

/// The keys of a tile's positions under one head, and how far behind each its values are. Positions that do not exist
/// repeat the last one: what is read there counts with weight 0.
template <class KV>
struct Rows {
  const KV* keys[kTile];
  int64_t to_values;
  int num_lines;  // of one head of one token

  const KV* values(int position) const { return keys[position] + to_values; }
  static inline KVRELAY_INLINE void fetch_row(const KV* row, int num_lines) {
    for (int line = 0; line < num_lines; ++line)
      __builtin_prefetch(reinterpret_cast<const char*>(row) + line * kLine, 0, 2);
  }
  /// Asks for keys (0 to kTile - 1) and values (kTile and on) to be brought into the second level cache.
  inline KVRELAY_INLINE void fetch(int row) const {
    fetch_row(row < kTile ? keys[row] : values(row - kTile), num_lines);
  }
};

/// What a unit of the keys and values of a tile's positions is worth, where they are integers.
template <class KV>
struct Scales {
  explicit Scales(const Rows<KV>&, int, int) {}
};

template <>
struct Scales<int8_t> {
  float keys[kTile], values[kTile];

  explicit Scales(const Rows<int8_t>& rows, int head_dim, int count) {
    for (int position = 0; position < count; ++position) {
      std::memcpy(keys + position, rows.keys[position] + head_dim, sizeof(float));
      std::memcpy(values + position, rows.values(position) + head_dim, sizeof(float));
    }
  }
};

/// kLanes units of a row of `num` elements from `first` on, zeros behind its end. `Whole` says that there is none.
template <class Unit, bool Whole, class KV>
inline KVRELAY_INLINE Floats load_units(const KV* row, int first, int num) {
  constexpr int width = kLanes * Unit::kWidth;
  KV part[Whole ? 1 : width];
  if (!Whole && first + width > num) {
    std::memset(part, 0, sizeof part);
    std::memcpy(part, row + first, size_t(std::max(num - first, 0)) * sizeof(KV));
    row = part;
    first = 0;
  }
  if constexpr (Unit::kWidth == 1) {
    return load(row + first);
  } else if constexpr (std::is_same_v<KV, int8_t> && Unit::kWidth == 2) {
    return load_words(row + first);
  } else {
    Floats units;
    std::memcpy(&units, row + first, sizeof units);
    return Unit::kWidth == 4 ? (Floats)((Ints)units ^ splat(kSigns)) : units;
  }
}

/// Keys `[position][head_dim]` to `[unit][kTile]`. The first half of the next tile's keys is fetched meanwhile.
template <class Unit, bool Whole, class KV>
void pack_keys(const Shape<Unit>& shape, const Rows<KV>& rows, int count, const Rows<KV>& next, float* packed) {
  for (int position = 0; position < count; position += kLanes)
    for (int unit = 0; unit < shape.num_units; unit += kLanes) {
      if (unit == 0)
        for (int row = 0; row < kLanes / 2; ++row) next.fetch(position / 2 + row);
      Floats square[kLanes];
#pragma GCC unroll 16
      for (int lane = 0; lane < kLanes; ++lane)
        square[lane] = load_units<Unit, Whole>(rows.keys[position + lane], unit * Unit::kWidth, shape.head_dim);
      transpose(square);
#pragma GCC unroll 16
      for (int lane = 0; lane < kLanes; ++lane) store(packed + (unit + lane) * kTile + position, square[lane]);
    }
}

/// Values as they lie in the cache, on the right of a product: units of positions by columns.
template <class Unit, bool Whole, class KV>
struct Unpacked {
  using Weights = typename Unit::Weights;
  const Shape<Unit>& shape;
  const Rows<KV>& rows;

  template <int kVectors>
  inline KVRELAY_INLINE void load_columns(int unit, int column, Floats (&columns)[kVectors]) const {
    if constexpr (Weights::kWidth == 1) {
#pragma GCC unroll 4
      for (int vector = 0; vector < kVectors; ++vector)
        columns[vector] = load_units<Weights, Whole>(rows.values(unit), column + vector * kLanes, shape.head_dim);
    } else {
#if defined(__AVX512F__) && defined(__AVX512BW__)
#pragma GCC unroll 4
      for (int vector = 0; vector < kVectors; vector += 2) {
        const int first = column + vector * kLanes;
        const Floats even = load_units<Weights, Whole>(rows.values(2 * unit), first, shape.head_dim);
        const Floats odd = load_units<Weights, Whole>(rows.values(2 * unit + 1), first, shape.head_dim);
        columns[vector] = interleave_low(even, odd);
        if (vector + 1 < kVectors) columns[vector + 1] = interleave_high(even, odd);
      }
#endif
    }
  }
};

/// Values to `[unit][columns]`.
template <class Unit, bool Whole, class KV>
void pack_values(const Shape<Unit>& shape, const Unpacked<Unit, Whole, KV>& values, int num_units, float* packed) {
  for (int unit = 0; unit < num_units; ++unit, packed += shape.columns)
    for (int column = 0; column < shape.columns; column += 2 * kLanes) {
      Floats columns[2];
      values.load_columns(unit, column, columns);
      store(packed + column, columns[0]);
      if (column + kLanes < shape.columns) store(packed + column + kLanes, columns[1]);
    }
}

template <class From>
void load_query(const From* from, int num, bool rounded, float* to) {
  for (int i = 0; i < num; ++i) {
    BFloat16 narrowed;
    narrow(widen(from[i]), &narrowed);
    to[i] = rounded ? widen(narrowed) : widen(from[i]);
  }
}

/// As codes, by way of `floats`; gives what a unit of them is worth.
template <class From>
float load_query(const From* from, int num, float* floats, int8_t* to, int32_t* offset) {
  for (int i = 0; i < num; ++i) floats[i] = widen(from[i]);
  const float worth = encode(floats, num, to);
  *offset = 0;
  for (int i = 0; i < num; ++i) *offset -= 128 * to[i];
  std::memset(to + num, 0, size_t(rounded_up(num, 4) - num));
  return worth;
}

template <class From>
void load_query(const From* from, int num, bool, BFloat16* to) {
  if constexpr (std::is_same_v<From, BFloat16>)
    std::memcpy(to, from, size_t(num) * 2);
  else
    for (int i = 0; i < num; ++i) narrow(from[i], to + i);
  if (num % 2) to[num].bits = 0;
}

}  // namespace kvrelay::vectors
