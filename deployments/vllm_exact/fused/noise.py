"""Parts that both launches share, in Triton: the noise of gumbel_rng.py, float32 as ordered integers, weights.

Invariant: the integers are those of gumbel_rng.py; a float32 result decides nothing but which tokens float64 looks at.
Called by scan.py, settle.py and their parts.
"""

import triton
import triton.language as tl

from tailrace.deployments.vllm_exact import gumbel_rng

GAMMA, MIX_1, MIX_2 = (tl.constexpr(n) for n in (gumbel_rng.GAMMA, gumbel_rng.MIX_1, gumbel_rng.MIX_2))
SHIFT, STEP = tl.constexpr(gumbel_rng.UNIFORM_SHIFT), tl.constexpr(gumbel_rng.UNIFORM_STEP)
MASS_UNITS = tl.constexpr(gumbel_rng.MASS_UNITS)
ALMOST_ONE = tl.constexpr(1.0 - 2.0**-24)
ULP = tl.constexpr(2.0**-24)
NONE = tl.constexpr(-0x80000000)  # the order of nothing: below that of every number
LOWEST = tl.constexpr(-0x7F800000)  # the order of the smallest finite float32; -inf is below it


@triton.jit
def finalise(z):
    z = (z ^ (z >> 30)) * MIX_1
    z = (z ^ (z >> 27)) * MIX_2
    return z ^ (z >> 31)


@triton.jit
def output(seed, index):
    """Returns output `index` (u64) of the SplitMix64 stream of `seed` u64."""
    return finalise(seed + (index.to(tl.uint64) + 1) * GAMMA)


@triton.jit
def log_exponential(hashed):
    """Returns f64: the logarithm of the unit exponential variate of the hashed bits."""
    return tl.log(-tl.log(((hashed >> SHIFT).to(tl.float64) + 0.5) * STEP))


@triton.jit
def exponential(hashed):
    return -tl.log(((hashed >> SHIFT).to(tl.float64) + 0.5) * STEP)


@triton.jit
def room(hashed):
    """Returns f32: at most E, for the exponential variate E of the hashed bits; exact arithmetic."""
    return ALMOST_ONE - (hashed >> 40).to(tl.int32).to(tl.float32) * ULP


@triton.jit
def order(x):
    """Returns float32 as int32 of the same order; 0.0 for -0.0. NaN is above or below all numbers, by its sign."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value(key):
    """Returns the float32 of an order."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def is_nan(x):
    return (x.to(tl.int32, bitcast=True) & 0x7FFFFFFF) > 0x7F800000


@triton.jit
def weight(x, peak, inv_t):
    """Returns exp((x - peak) / T) in float32, good to 3e-5 of it, and e**-80 below that; 0 for -inf. NaN stays."""
    scaled = (x - peak) * inv_t
    scaled = tl.where(scaled < -80.0, -80.0, scaled)
    return tl.where(x == -float("inf"), 0.0, tl.exp(scaled))


@triton.jit
def exp64(x):
    """Returns exp(x), x <= 0: the operations of filters_cpu.py in their order, for the same integer units."""
    x = tl.where(x > -700.0, x, -700.0)
    n = tl.floor(x * 1.4426950408889634074 + 0.5)
    r = x - n * 6.93145751953125e-1
    r = r - n * 1.42860682030941723212e-6
    p = tl.full(x.shape, 1.0 / 479001600.0, tl.float64)
    p = p * r + 1.0 / 39916800.0
    p = p * r + 1.0 / 3628800.0
    p = p * r + 1.0 / 362880.0
    p = p * r + 1.0 / 40320.0
    p = p * r + 1.0 / 5040.0
    p = p * r + 1.0 / 720.0
    p = p * r + 1.0 / 120.0
    p = p * r + 1.0 / 24.0
    p = p * r + 1.0 / 6.0
    p = p * r + 0.5
    p = p * r * r + r + 1.0
    return p * ((n.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)


@triton.jit
def units(x, peak, floor, inv_t):
    """Returns i64: the weights of the logits x f32 from the floor on, in units of 2**-44 of the peak's; else 0."""
    scaled = (x.to(tl.float64) - peak.to(tl.float64)) * inv_t
    return tl.where(x >= floor, (exp64(scaled) * MASS_UNITS).to(tl.int64), 0)
