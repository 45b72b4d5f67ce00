// Sampling is Gumbel-max: the token with the largest logit plus noise is a draw from the softmax. Nothing is sorted:
// filters become the smallest logit that stays, and how many of those that are equal to it; and the noise of a token is
// computed in full only if a bound says that it may win.
#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "entry.h"
#include "philox.h"
#include "vector.h"

namespace kvrelay {
namespace {

using namespace vectors;

constexpr int kSpan = 16 * kLanes;  // logits of which every lane's largest is remembered
constexpr int kChunk = kSpan;       // tokens whose noise is screened together
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr double kMargin = 1.001;  // far more than the rounding of what is compared to a bound

/// A row and the largest of its logits.
struct Row {
  const float* logits;
  int64_t vocab;
  std::vector<float> largest;  // of each 16 logits of a span, lane by lane
  float best;
  int64_t best_token;  // the first of equals; the first that is not a number if there is one

  Row(const float* logits, int64_t vocab) : logits(logits), vocab(vocab), best(-kInfinity), best_token(0) {
    largest.resize(size_t((vocab + kSpan - 1) / kSpan * kLanes));
    bool numbers = true;
    for (int64_t first = 0; first < vocab; first += kSpan) {
      Floats most = splat(-kInfinity);
      Ints strange = {};
      for (int64_t token = first; token < std::min(first + kSpan, vocab); token += kLanes) {
        const Floats value = at(token);
        most = maximum(value, most);
        strange |= value != value;
      }
      for (int lane = 0; lane < kLanes; ++lane) numbers &= !strange[lane];
      store(&largest[size_t(first / kSpan * kLanes)], most);
      best = std::max(best, vectors::largest(most));
    }
    if (!numbers) best = std::numeric_limits<float>::quiet_NaN();
    for (int64_t first = 0; first < vocab; first += kSpan) {
      if (numbers && largest_of_span(first) < best) continue;
      for (int64_t token = first; token < std::min(first + kSpan, vocab); ++token)
        if (numbers ? logits[token] == best : logits[token] != logits[token]) {
          best_token = token;
          return;
        }
    }
  }

  float largest_of_span(int64_t first) const {
    return vectors::largest(load(&largest[size_t(first / kSpan * kLanes)]));
  }

  /// kLanes logits, nothing behind the last.
  Floats at(int64_t token) const {
    if (token + kLanes <= vocab) return load(logits + token);
    const int num = int(vocab - token);
    return lanes_below(0, num) ? load_part(logits + token, num) : splat(-kInfinity);
  }
};

/// Which tokens are left: those above `edge`, and the first `num_at_edge` that are equal to it.
struct Kept {
  float edge = -kInfinity;
  int64_t num_at_edge = std::numeric_limits<int64_t>::max();
};

/// The logarithm of a token's probability relative to the largest.
double score_of(const Row& row, const Draw& draw, float logit) {
  return (double(logit) - double(row.best)) / draw.temperature;
}

/// The floats in their order as integers, and back.
int32_t in_order(float value) {
  int32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits < 0 ? std::numeric_limits<int32_t>::min() - bits : bits;
}

float out_of_order(int32_t place) {
  const int32_t bits = place < 0 ? std::numeric_limits<int32_t>::min() - place : place;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

/// The smallest logit with at least this score, which is not above 0: many logits may have the same.
float lowest_with(const Row& row, const Draw& draw, double score) {
  int64_t low = in_order(-kInfinity), high = in_order(row.best);
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (score_of(row, draw, out_of_order(int32_t(middle))) >= score)
      high = middle;
    else
      low = middle + 1;
  }
  return out_of_order(int32_t(low));
}

/// All logits of at least `lowest`, in their order.
void gather(const Row& row, float lowest, std::vector<float>& found) {
  found.clear();
  for (int64_t first = 0; first < row.vocab; first += kSpan) {
    if (row.largest_of_span(first) < lowest) continue;
    const int64_t num = std::min<int64_t>(kSpan, row.vocab - first);
    found.resize(found.size() + size_t(num));
    float* to = found.data() + found.size() - num;
    for (int64_t i = 0; i < num; ++i) {  // without branches, since nobody can foretell them
      *to = row.logits[first + i];
      to += row.logits[first + i] >= lowest;
    }
    found.resize(size_t(to - found.data()));
  }
}

float nth_largest(std::vector<float>& values, int64_t n) {
  std::nth_element(values.begin(), values.begin() + (n - 1), values.end(), std::greater<float>());
  return values[size_t(n - 1)];
}

/// The top_k-th largest logit. That many of the spans' largest ones are not below theirs, so it is not either.
float top_k_edge(const Row& row, int64_t top_k, std::vector<float>& found) {
  float lowest = -kInfinity;
  if (top_k <= int64_t(row.largest.size())) {
    found = row.largest;
    lowest = nth_largest(found, top_k);
  }
  gather(row, lowest, found);
  return nth_largest(found, top_k);
}

typedef float HalfFloats __attribute__((vector_size(kLanes * 2)));

/// 1 / 12!, 1 / 11!, ..., 1 / 0!
constexpr double kTaylor[] = {
    1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040, 1.0 / 720,
    1.0 / 120,       1.0 / 24,       1.0 / 6,       1.0 / 2,      1.0,         1.0};

/// e to the power of x <= 0, to some units in the last place: the Taylor series of the rest after powers of 2.
inline Doubles exp(Doubles x) {
  constexpr double shift = 6755399441055744.0;  // 1.5 * 2**52: adding it rounds to an integer, in the lowest bits
  const Doubles shifted = x * 1.4426950408889634 + shift, whole = shifted - shift;
  const Doubles rest = (x - whole * 0.693147180369123816490) - whole * 1.90821492927058770002e-10;
  Doubles power = {};
#pragma GCC unroll 13
  for (double coefficient : kTaylor) power = fma(power, rest, Doubles{} + coefficient);
  const Doubles scale = (Doubles)(((Longs)shifted << 52) + (uint64_t(1023) << 52));
  return x < -708.0 ? Doubles{} : power * scale;
}

/// The probability mass of a row's kept logits by bins of their distance from the largest.
class Histogram {
 public:
  Histogram(const Row& row, const Draw& draw, float lowest)
      : row(row), lowest(lowest), scale(float(std::min(kBinsOfOne / draw.temperature, 1e30))), masses(kBins) {
    const double exponent = 1.0 / draw.temperature;
    over([&](int64_t, Floats logits, Ints bins) {
      const Floats kept = logits >= splat(lowest) ? logits : splat(-kInfinity);
      HalfFloats halves[2];
      std::memcpy(halves, &kept, sizeof halves);
      Doubles mass[2];
      for (int half = 0; half < 2; ++half)
        mass[half] = exp((__builtin_convertvector(halves[half], Doubles) - double(row.best)) * exponent);
      double each[kLanes];
      int32_t bin[kLanes];
      std::memcpy(each, mass, sizeof each);
      std::memcpy(bin, &bins, sizeof bin);
      for (int lane = 0; lane < kLanes; ++lane) masses[size_t(bin[lane])] += each[lane];
    });
  }

  double mass(int bin) const { return masses[size_t(bin)]; }
  double total() const { return std::accumulate(masses.begin(), masses.end(), 0.0); }

  /// The kept logits of a bin.
  std::vector<float> logits_of(int bin) const {
    std::vector<float> found;
    over([&](int64_t token, Floats logits, Ints bins) {
      const Ints inside = (bins == splat(bin)) & (logits >= splat(lowest));
      if (!any((Longs)inside)) return;
      for (int lane = 0; lane < kLanes && token + lane < row.vocab; ++lane)
        if (inside[lane]) found.push_back(logits[lane]);
    });
    return found;
  }

  static constexpr int kBins = 4096;  // the last one holds all that is further away

 private:
  static constexpr double kBinsOfOne = 64.0;
  const Row& row;
  const float lowest, scale;
  std::vector<double> masses;

  /// Calls `each(token, logits, bins)` for all vectors of logits of which some may be kept.
  template <class Each>
  void over(const Each& each) const {
    for (int64_t first = 0; first < row.vocab; first += kSpan) {
      if (row.largest_of_span(first) < lowest) continue;
      for (int64_t token = first; token < std::min(first + kSpan, row.vocab); token += kLanes) {
        const Floats logits = row.at(token), distance = (splat(row.best) - logits) * splat(scale);
        const Floats last = splat(kBins - 1.0f);
        each(token, logits, __builtin_convertvector(distance < last ? distance : last, Ints));
      }
    }
  }
};

/// Goes on from `reached` through `candidates`, the likeliest first, to `wanted`, and tells whether it came there: a
/// quickselect that weighs instead of counting. What was passed through is kept.
bool pass_through(const Row& row, const Draw& draw, std::vector<float>& candidates, double wanted, double& reached,
                  Kept& kept) {
  const auto weight = [&](float logit) { return std::exp(score_of(row, draw, logit)); };
  auto first = candidates.begin(), end = candidates.end();
  while (first != end) {
    const float pivot = *(first + (end - first) / 2);
    const auto equal = std::partition(first, end, [&](float logit) { return logit > pivot; });
    double more = reached;
    for (auto each = first; each != equal; ++each) more += weight(*each);
    if (more >= wanted && first != equal) {
      end = equal;
      continue;
    }
    const auto below = std::partition(equal, end, [&](float logit) { return logit == pivot; });
    const double each = weight(pivot);
    kept = {pivot, 0};
    while (kept.num_at_edge < below - equal) {
      more += each;
      ++kept.num_at_edge;
      if (more >= wanted) return true;
    }
    reached = more;
    first = below;
  }
  return false;
}

/// The likeliest of what is kept so far that reach top_p of its mass; all of it if rounding says that they never do.
Kept find_nucleus(const Row& row, const Draw& draw, Kept kept) {
  const Histogram histogram(row, draw, kept.edge);
  const double wanted = draw.top_p * histogram.total();
  double reached = 0.0;
  for (int bin = 0; bin < Histogram::kBins; ++bin) {
    if (reached + histogram.mass(bin) * kMargin < wanted) {
      reached += histogram.mass(bin);
      continue;
    }
    std::vector<float> candidates = histogram.logits_of(bin);
    if (pass_through(row, draw, candidates, wanted, reached, kept)) break;
  }
  return kept;
}

Kept filter(const Row& row, const Draw& draw) {
  Kept kept;
  std::vector<float> found;
  if (draw.min_p > 0.0) kept.edge = lowest_with(row, draw, std::log(draw.min_p));
  if (draw.top_k > 0 && draw.top_k < row.vocab) {
    const double score = score_of(row, draw, top_k_edge(row, draw.top_k, found));
    kept.edge = std::max(kept.edge, lowest_with(row, draw, score));  // as in vLLM, equal ones stay too
  }
  return draw.top_p < 1.0 ? find_nucleus(row, draw, kept) : kept;
}

/// The largest logit plus noise so far.
class Winner {
 public:
  Winner(const Row& row, const Draw& draw, const Kept& kept) : row(row), draw(draw), kept(kept) {}

  /// `word` is the token's.
  void consider(int64_t token, uint64_t word) {
    if (token >= row.vocab || !is_kept(token)) return;
    const double uniform = (double(word >> 12) + 0.5) * 0x1p-52;
    const double value = score_of(row, draw, row.logits[token]) - std::log(-std::log(uniform));
    if (value > best || (value == best && token < winner)) best = value, winner = token;
  }

  /// A token may win only if its relative probability is not below this times 1 - its uniform number. For -log(u) >=
  /// 1 - u, so that the noise -log(-log(u)) is not above -log(1 - u).
  float bound() const { return float(std::exp(best) / kMargin); }
  int64_t token() const { return winner; }

 private:
  const Row& row;
  const Draw& draw;
  const Kept& kept;
  double best = -HUGE_VAL;
  int64_t winner = 0;

  bool is_kept(int64_t token) const {
    const float logit = row.logits[token];
    if (logit != kept.edge || kept.num_at_edge == std::numeric_limits<int64_t>::max()) return logit >= kept.edge;
    return std::count(row.logits, row.logits + token, logit) < kept.num_at_edge;
  }
};

/// Relative probabilities of a chunk's tokens, 0 of what is not kept: `[4][kChunk / 4]`, since token t has word t % 4
/// of a counter.
void weigh_chunk(const Row& row, float scale, float edge, int64_t first, float* weights) {
  float each[kChunk];
  for (int i = 0; i < kChunk; i += kLanes) {
    const Floats logits = first + i < row.vocab ? row.at(first + i) : splat(-kInfinity);
    const Floats power = exp2((logits - splat(row.best)) * splat(scale));
    store(each + i, logits >= splat(edge) ? power : Floats{});
  }
  for (int word = 0; word < 4; ++word)
    for (int i = 0; i < kChunk / 4; ++i) weights[word * kChunk / 4 + i] = each[4 * i + word];
}

/// A word of each counter as 1 - u in units of 2**-24, rounded down.
Floats rest_of(const Longs (&words)[kWays]) {
  static_assert(kWays == 2, "the upper halves of two vectors fill one");
  Ints order;
  for (int lane = 0; lane < kLanes; ++lane) order[lane] = 2 * lane + 1;
  const Ints upper = __builtin_shuffle((Ints)words[0], (Ints)words[1], order);
  return __builtin_convertvector((~upper >> 8) & 0xffffff, Floats);
}

/// Lets the winner consider all tokens of a chunk that may win. Where none of some counters' can, no words are drawn.
void screen_chunk(const Stream& stream, int64_t first, const float* weights, Winner& winner) {
  const float bound = winner.bound();
  for (int i = 0; i < kChunk / 4; i += kCounters) {
    Floats weight[4], largest = {};
    for (int word = 0; word < 4; ++word) {
      weight[word] = load(weights + word * kChunk / 4 + i);
      largest = maximum(largest, weight[word]);
    }
    if (!any((Longs)(largest >= splat(bound * 0x1p-54f)))) continue;  // 1 - u is larger
    Longs words[4][kWays];
    Ints hits[4], hit = {};
    philox(stream, uint64_t(1 + first / 4 + i), words);
    for (int word = 0; word < 4; ++word) {
      hits[word] = rest_of(words[word]) * splat(bound * 0x1p-24f) <= weight[word];
      hit |= hits[word];
    }
    if (!any((Longs)hit)) continue;
    for (int counter = 0; counter < kCounters; ++counter)
      for (int word = 0; word < 4; ++word)
        if (hits[word][counter])
          winner.consider(first + 4 * (i + counter) + word, words[word][counter / kLongLanes][counter % kLongLanes]);
  }
}

int64_t sample_row(const Row& row, const Draw& draw) {
  const Kept kept = filter(row, draw);
  const Stream stream(draw.seed, draw.sample, draw.index);
  Winner winner(row, draw, kept);
  Longs words[4][kWays];
  philox(stream, uint64_t(1 + row.best_token / 4), words);
  winner.consider(row.best_token, words[row.best_token % 4][0][0]);
  const float scale = float(std::min(1.4426950408889634 / draw.temperature, 1e30));
  for (int64_t first = 0; first < row.vocab; first += kChunk) {
    float weights[kChunk];
    if (row.largest_of_span(first) < kept.edge) continue;
    weigh_chunk(row, scale, kept.edge, first, weights);
    screen_chunk(stream, first, weights, winner);
  }
  return winner.token();
}

}  // namespace

void sample_rows(const float* logits, int64_t num_rows, int64_t vocab, const Draw* draws, int64_t* tokens, float* best,
                 int num_threads) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(num_threads) if (num_threads > 1 && num_rows > 1)
  for (int64_t index = 0; index < num_rows; ++index) {
    const Row row(logits + index * vocab, vocab);
    best[index] = row.best;
    const bool greedy = draws[index].temperature == 0.0 || !std::isfinite(row.best);
    tokens[index] = greedy ? row.best_token : sample_row(row, draws[index]);
  }
}

}  // namespace kvrelay

KVRELAY_ENTRY void kvrelay_sample(const float* logits, int64_t num_rows, int64_t vocab, const double* reals,
                                  const int64_t* integers, int64_t* tokens, float* best, int64_t num_threads) {
  std::vector<kvrelay::Draw> draws;
  for (int64_t row = 0; row < num_rows; ++row, reals += 3, integers += 4)
    draws.push_back({reals[0], reals[1], reals[2], integers[0], uint64_t(integers[1]), uint64_t(integers[2]),
                     uint64_t(integers[3])});
  kvrelay::sample_rows(logits, num_rows, vocab, draws.data(), tokens, best, int(num_threads));
}
