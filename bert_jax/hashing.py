"""Random numbers and permutations as pure functions of integers, in numpy.

The functions have no state: the same integers give the same bits at any time, on any host and in
any thread. Therefore training example i is a function of (corpus, seed, i).
"""

import numpy as np

_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, the increment of splitmix64
_MASK64 = 2**64 - 1
_DOUBLE_ROUNDS = 3  # of the Feistel network in `permute`: six half rounds


def _mix_u64(x: np.ndarray) -> np.ndarray:
    """Mix bits in place: splitmix64's finaliser (Steele, Lea, Flood 2014; Stafford's constants)."""
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def hash_key(*words: int) -> int:
    """Hash Python integers, in their order, into one 64-bit key."""
    state = np.zeros(1, np.uint64)
    for word in words:
        state += np.uint64(_GOLDEN)
        state ^= np.uint64(word & _MASK64)
        _mix_u64(state)
    return int(state[0])


def hash_u64(key: int, counters: np.ndarray) -> np.ndarray:
    """Return 64 random bits for each counter, as uint64 in the shape of `counters`.

    `counters` needs at least one axis. Make a key for each purpose by `hash_key`.
    """
    x = counters.astype(np.uint64)  # a copy, mixed in place below
    x *= np.uint64(_GOLDEN)  # an odd factor keeps different counters different
    x += np.uint64(key & _MASK64)
    _mix_u64(x)
    x ^= np.uint64(key & _MASK64)  # without this, two keys would give shifts of one sequence
    return _mix_u64(x)


def below(bits: np.ndarray, bound: np.ndarray | int) -> np.ndarray:
    """Turn 64-bit random integers into integers in [0, bound); `bound` is at most 2^32.

    Only the high 32 bits are used. The method is from Lemire 2019, "Fast random integer
    generation in an interval", without its rejection step. Therefore the probability of a value has
    a relative error of at most bound / 2^32.
    """
    scaled = bits >> np.uint64(32)
    scaled *= np.asarray(bound).astype(np.uint64)
    scaled >>= np.uint64(32)
    return scaled.astype(np.int64)


def permute(positions: np.ndarray, n: int, key: int) -> np.ndarray:
    """Map positions (k,) by a random permutation of [0, n); return int64 (k,).

    The key selects the permutation; n is at most 2^62. A Feistel network permutes [0, m), where m
    is the smallest power of two >= n, and is applied again until the result is below n (Black and
    Rogaway 2002, "Ciphers with arbitrary finite domains"). On average, this takes fewer than two
    applications per position. The memory in use is proportional to the size of `positions`.
    """
    if not 1 <= n <= 2**62:
        raise ValueError(f"n is {n}; a permutation needs 1 <= n <= 2^62")
    x = np.array(positions, np.uint64)
    if n == 1:
        return np.zeros(x.shape, np.int64)
    bits = (n - 1).bit_length()
    low_bits = (bits + 1) // 2
    shift = np.uint64(low_bits)
    low_mask = np.uint64((1 << low_bits) - 1)
    high_mask = np.uint64((1 << (bits - low_bits)) - 1)
    keys = [hash_key(key, n, half_round) for half_round in range(2 * _DOUBLE_ROUNDS)]

    def encipher(values: np.ndarray) -> np.ndarray:
        high, low = values >> shift, values & low_mask
        for i in range(_DOUBLE_ROUNDS):
            high ^= hash_u64(keys[2 * i], low) & high_mask
            low ^= hash_u64(keys[2 * i + 1], high) & low_mask
        return (high << shift) | low

    x = encipher(x)
    outside = np.flatnonzero(x >= np.uint64(n))
    while outside.size:
        walked = encipher(x[outside])
        x[outside] = walked
        outside = outside[walked >= np.uint64(n)]
    return x.astype(np.int64)
