// The next token of each sequence from its row of logits.
#pragma once

#include <cstdint>

namespace kvrelay {

/// What a row is sampled with. `temperature` 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 filter nothing. The other
/// three name the random numbers.
struct Draw {
  double temperature, min_p, top_p;
  int64_t top_k;
  uint64_t seed, sample, index;
};

/// For each row of `logits` `[num_rows, vocab]` the next token and the largest logit. Where that is no finite number,
/// the token is the first that has it.
void sample_rows(const float* logits, int64_t num_rows, int64_t vocab, const Draw* draws, int64_t* tokens, float* best,
                 int num_threads);

}  // namespace kvrelay
