"""The random numbers of sampling: a pure function of (seed, sample, token index, token id), never of a batch."""

import numpy as np

_U64 = 2**64


def gumbel_noise(seed: int, sample: int, index: int, vocab_size: int) -> np.ndarray:
    """Standard Gumbel noise for every token id, float64 `[vocab_size]`.

    Word t of Philox4x64-10 (Salmon et al., 2011) under the key (seed, sample) belongs to token id t: word t mod 4 of
    the counter (1 + t // 4, index, 0, 0). Its upper 52 bits give a uniform number strictly inside (0, 1).
    """
    generator = np.random.Philox(
        key=np.array([seed % _U64, sample % _U64], np.uint64), counter=np.array([0, index, 0, 0], np.uint64)
    )
    words = generator.random_raw(vocab_size)
    words >>= np.uint64(12)
    noise: np.ndarray = words.astype(np.float64)
    # Halfway between multiples of 2**-52: neither 0 nor, after rounding, 1; both would make the noise infinite.
    noise += 0.5
    noise *= 2.0**-52
    for step in (np.log, np.negative, np.log, np.negative):
        step(noise, out=noise)
    return noise
