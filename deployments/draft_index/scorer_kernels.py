"""The candidates for a sample's next token and their probabilities, from places and the phrase table (numba).

A network of one hidden layer, shared by all groups, scores each candidate by its evidence (`FEATURES`).
The scores and that of "none of these" give probabilities (softmax).
Called by draft_kernels.py, which is compiled with this file; scorer.py owns the network.
"""

from math import exp, sqrt

import numpy as np
from numba import njit

from tailrace.deployments.draft_index.phrase_kernels import ORDERS

LENGTH, SOURCE, FROM_RUN, AHEAD, WORTH = 0, 1, 2, 3, 4  # as in match_kernels.py
OWN, HISTORY = 0, 2
WEIGHT_ONE = 1024
LOGS, HIDDEN = 14 + ORDERS, 16
FEATURES = LOGS + 8 + ORDERS
CANDIDATES, TOKENS = 12, 96
"""Maximum scored candidates, and maximum distinct tokens examined."""

CUT = np.float32(0.03)
"""A candidate with less of the first one's evidence is not scored. That saves a third of the time, and no token."""

FAINT = np.float32(1.2)
_MATCHES, _STEPS, _LAST = (2, 3, 5, 8), 16, 63
_BY_SCORE = np.exp(np.arange(256) / (2 * _STEPS)).astype(np.float32)
_BY_LENGTH = np.exp(0.5 * np.minimum(np.arange(64), 10)).astype(np.float32)
_njit = njit(nogil=True, error_model="numpy", fastmath=True)


@_njit
def _bits(x):
    count = 0
    while x:
        x &= x - np.uint64(1)
        count += 1
    return count


@njit(nogil=True, inline="always")
def _ln(x):
    """Returns the logarithm of a normal float32, right within 2e-5: the library's costs more than all else here."""
    bits = np.float32(x).view(np.int32)
    m = np.int32((bits & np.int32(0x7FFFFF)) | np.int32(0x3F800000)).view(np.float32)
    p = np.float32(0.03010639)
    for c in (-0.28066616, 1.10492445, -2.42100773, 3.49838763, -1.93172262):
        p = p * m + np.float32(c)
    return p + np.float32((bits >> np.int32(23)) - np.int32(127)) * np.float32(0.6931472)


@_njit
def gather(n, found, scores, token, tokens, sums, runs, total):
    """Sums up the evidence for each distinct next token; returns the number of tokens."""
    many = 0
    total[:] = 0
    for i in range(n):
        if found[i, LENGTH] == 0 and scores[i, 0] < FAINT:
            continue
        j = 0
        while j < many and tokens[j] != token[i]:
            j += 1
        if j == TOKENS:
            continue
        if j == many:
            tokens[j], sums[j], runs[j] = token[i], 0, 0
            many += 1
        _credit(i, found, scores, j, sums, runs, total)
    return many


@_njit
def _credit(i, found, scores, j, s, runs, total):
    """Adds the i-th place's evidence to the sums s[j] of its token. Rows are not passed, because views cost more."""
    length, fast = found[i, LENGTH], scores[i, 0]
    own, history = found[i, SOURCE] == OWN, found[i, SOURCE] == HISTORY
    run = np.uint64(1) << np.uint64(found[i, FROM_RUN] & _LAST)
    for m in range(4):
        s[j, m] += length >= _MATCHES[m]
        total[m] += length >= _MATCHES[m]
    if length >= 2:
        runs[j, 0] |= run
    if length >= 5:
        runs[j, 1] |= run
    if fast >= 3:
        runs[j, 2] |= run
    if own:
        s[j, 4], s[j, 9] = max(s[j, 4], np.float32(length)), max(s[j, 9], fast)
    else:
        s[j, 5] = max(s[j, 5], np.float32(length))
    s[j, 7] = max(s[j, 7], min(s[j, 6], fast))
    s[j, 6] = max(s[j, 6], fast)
    s[j, 8] = max(s[j, 8], scores[i, 1])
    s[j, 13] = max(s[j, 13], np.float32(20) / np.float32(20 + abs(found[i, AHEAD])))
    worth = np.float32(found[i, WORTH]) * np.float32(1 / WEIGHT_ONE)
    aligned, exact = _BY_SCORE[min(int(fast * _STEPS), 255)], _BY_LENGTH[min(length, _LAST)]
    strong, prior = aligned * aligned * worth, aligned * exact * worth
    s[j, 14] += strong
    s[j, 15] += aligned * worth
    s[j, 16] += exact * exact * worth
    s[j, 17] += prior
    s[j, 19] += strong if own else np.float32(0)
    s[j, 20] += 1
    s[j, 21] += prior if history else np.float32(0)
    total[4] += strong
    total[5] += aligned * worth
    total[6] += exact * exact * worth
    total[7] += prior


@_njit
def _features(j, s, runs, heard, base, mean, scale, c, x):
    """Fills x[c] with one candidate's evidence, as numbers of mean 0 and deviation 1, roughly. The logarithms come
    first, and are taken together: vectors do that."""
    few, some, one = np.float32(0.02), np.float32(0.05), np.float32(1)
    for m in range(4):
        x[c, m], x[c, 4 + m] = s[j, m] + some, s[j, 14 + m] + few
    for r in range(3):
        x[c, 8 + r] = one + np.float32(_bits(runs[j, r]))
    x[c, 11], x[c, 12], x[c, 13] = s[j, 19] + few, s[j, 14] + few, s[j, 20] + np.float32(0.3)
    for o in range(ORDERS):
        x[c, 14 + o] = heard[j, o] + np.float32(0.1)
    for f in range(LOGS):
        x[c, f] = _ln(x[c, f]) - base[f]
    f = LOGS
    x[c, f], x[c, f + 1] = sqrt(s[j, 4]), sqrt(s[j, 5])
    x[c, f + 2], x[c, f + 3], x[c, f + 4], x[c, f + 5] = s[j, 6], s[j, 7], s[j, 8], s[j, 9]
    x[c, f + 6], x[c, f + 7] = s[j, 13], s[j, 21] / (s[j, 17] + few)
    for o in range(ORDERS):
        x[c, f + 8 + o] = base[14 + o]
    for f in range(FEATURES):
        x[c, f] = (x[c, f] - mean[f]) * scale[f]


@_njit
def _base(total, heard, base):
    """Fills base with the parts of the logarithms that all candidates share: those of totals."""
    base[:] = 0
    for m in range(4):
        base[m], base[4 + m] = _ln(total[m] + np.float32(0.3)), _ln(total[4 + m] + np.float32(1))
    base[11] = base[4]
    for o in range(ORDERS):
        base[14 + o] = _ln(heard[TOKENS, o] + np.float32(0.4))


@_njit
def _score(c, x, inner, offset, outer, h):
    """Returns the network's output for the features x[c]; h: room for its hidden layer. The compiler uses vectors
    because it does not know the sizes."""
    for i in range(h.size):
        h[i] = offset[0, i]
    for f in range(FEATURES):
        for i in range(h.size):
            h[i] += x[c, f] * inner[f, i]
    score = np.float32(0)
    for i in range(h.size):
        score += max(h[i], np.float32(0)) * outer[0, i]
    return score


@_njit
def candidates(count, many, tokens, sums, runs, total, heard, base, norm, net, xs, out, shares, h):
    """Scores the candidates with the strongest evidence; fills xs, out (tokens), shares (chances); returns a count."""
    inner, offset, outer, none = net
    mean, scale = norm
    most = none[0, 0]
    for j in range(many):
        shares[j] = sums[j, 17]
        for o in range(ORDERS):
            shares[j] += (1 + o) * heard[j, o] / (1 + heard[TOKENS, o])
    _base(total, heard, base)
    worth = np.float32(0)
    for c in range(count):
        best = 0
        for j in range(1, many):
            if shares[j] > shares[best]:
                best = j
        if c == 0:
            worth = CUT * shares[best]
        elif shares[best] < worth:
            count = c
            break
        _features(best, sums, runs, heard, base, mean, scale, c, xs)
        out[c] = tokens[best]
        shares[best] = -1  # taken
    for c in range(count):
        shares[c] = _score(c, xs, inner, offset, outer, h)
        most = max(most, shares[c])
    whole = exp(none[0, 0] - most)
    for c in range(count):
        shares[c] = exp(shares[c] - most)
        whole += shares[c]
    shares[:count] /= whole
    return count
