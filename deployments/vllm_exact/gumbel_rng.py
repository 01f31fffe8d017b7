"""Counter-based noise: the random numbers of the token at one position of one sample.

The numbers of position `t` of the sample with 64-bit key `k` are a SplitMix64 stream (Steele, Lea, Flood 2014,
"Fast splittable pseudorandom number generators") seeded by output `t` of the SplitMix64 stream seeded by `k`.
Invariant: they depend on (key, position, vocabulary index) only, and all kernels make the same integers.
This file is the reference in plain Python; kernel_cpu.py and fused/noise.py repeat it in numba and Triton.
It also holds the two other numbers that the kernels share.
"""

from math import log

GAMMA = 0x9E3779B97F4A7C15  # odd, from the golden ratio: the counter's stride
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
MASK_64 = (1 << 64) - 1

# 52 bits and not 53: (2**53 - 1) + 0.5 is no float64 and would round up, giving u = 1 and noise that always wins.
UNIFORM_SHIFT = 12
UNIFORM_STEP = 2.0**-52

GREEDY_BELOW = 1e-5  # temperatures below this are greedy, as in vLLM
MASS_UNITS = 2.0**44  # filters sum weights as integers, so any order of summation agrees; good for 2**18 tokens


def finalise(z: int) -> int:
    """Applies SplitMix64's output function (Stafford's variant 13): a bijection of 64-bit integers."""
    z = ((z ^ (z >> 30)) * MIX_1) & MASK_64
    z = ((z ^ (z >> 27)) * MIX_2) & MASK_64
    return z ^ (z >> 31)


def output(seed: int, index: int) -> int:
    """Returns output `index` (from 0) of the SplitMix64 stream with this seed."""
    return finalise((seed + (index + 1) * GAMMA) & MASK_64)


def row_key(key: int, position: int) -> int:
    """Returns the noise seed for the token at absolute `position` of the sample with `key`."""
    return output(key, position)


def uniform(hashed: int) -> float:
    """Returns a number strictly between 0 and 1, exact in float64, from 64 hashed bits."""
    return ((hashed >> UNIFORM_SHIFT) + 0.5) * UNIFORM_STEP


def exponential(key: int, position: int, index: int) -> float:
    """Returns the unit exponential variate of vocabulary `index` at `position`: -log(u)."""
    return -log(uniform(output(row_key(key, position), index)))
