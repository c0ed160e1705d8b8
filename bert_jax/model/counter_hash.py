"""Random bits by hashing integers: equal integers give equal bits, on any device and any mesh.

A dropout mask must be a pure function of (seed, row, position). A hash of these integers is such a
function. Unlike `jax.random`, a hash needs no keys and no splitting of keys. XLA fuses the hash
into the elementwise operations around it, and partitions the hash like these operations.

Each round of the hash applies `lowbias32` by Chris Wellons, "Prospecting for Hash Functions"
(2018). `lowbias32` is a bijection of 32-bit words. If one input bit is flipped, each output bit
flips with probability close to 1/2. The hash is not cryptographic.
"""

import jax
import numpy as np
from jax.typing import ArrayLike

_START = 0x9E3779B9  # 2^32 / golden ratio: keeps the all-zero input away from lowbias32(0) = 0
_STEP = 0x6A09E667  # 2^32 (sqrt(2) - 1): hashing a zero word then differs from a plain round


def _lowbias32(x):
    x = x ^ (x >> 16)
    x = x * np.uint32(0x7FEB352D)
    x = x ^ (x >> 15)
    x = x * np.uint32(0x846CA68B)
    return x ^ (x >> 16)


def hash_u32(*words: ArrayLike) -> jax.Array | np.ndarray:
    """Hash integer words into 32 random bits; the order of the words matters.

    The words broadcast against each other. Put small shapes first: each word costs one round over
    the broadcast shape of all words so far. Signed integers wrap modulo 2^32. The result is uint32:
    numpy if every word is numpy or a Python integer, otherwise a jax array with the same bits.
    """
    with np.errstate(over="ignore"):  # numpy warns when scalars wrap, not when arrays do
        state = np.array(_START, np.uint32)
        for word in words:
            if isinstance(word, int):
                word &= 0xFFFFFFFF  # a Python integer may have any size
            word = word if isinstance(word, jax.Array) else np.asarray(word)
            state = _lowbias32((state + np.uint32(_STEP)) ^ word.astype(np.uint32))
    return state if isinstance(state, jax.Array) else np.asarray(state)


def threshold_u32(probability: float) -> int:
    """Return the integer t, below 2^32, for which `hash < t` holds with `probability`."""
    return min(round(probability * 2**32), 2**32 - 1)
