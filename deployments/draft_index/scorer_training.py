"""The gradient step of the network that scores candidates (numba): the log loss against the tokens really emitted.

Called by scorer.py; scorer_kernels.py has the same network's forward pass.
"""

from math import exp

import numpy as np
from numba import njit


@njit(nogil=True)
def _score(x, net, h):
    inner, offset, outer, _ = net
    h[:] = offset[0]
    for f in range(x.size):
        for i in range(h.size):
            h[i] += x[f] * inner[f, i]
    score = np.float32(0)
    for i in range(h.size):
        h[i] = max(h[i], np.float32(0))
        score += h[i] * outer[0, i]
    return score


@njit(nogil=True)
def _back(x, h, slope, net):
    """Adds slope times the score's gradient."""
    inner, offset, outer, _ = net
    for i in range(h.size):
        if h[i] > 0:
            back = slope * outer[0, i]
            outer[0, i] += slope * h[i]
            offset[0, i] += back
            for f in range(x.size):
                inner[f, i] += back * x[f]


@njit(nogil=True, cache=True)
def learn(xs, seen, truth, net, rate):
    """Makes one step for each token of a draft up to the first wrong one. Returns the number of steps, or
    `truth.size` if none was wrong.

    xs f32[positions, candidates, features], seen i32[positions, candidates + 1]: see `draft`; truth i32[n].
    """
    none = net[3]
    most = xs.shape[1]
    hs, shares = np.empty((most, net[1].shape[1]), np.float32), np.empty(most, np.float32)
    for k in range(min(truth.size, seen.shape[0])):
        count = seen[k, most]
        if count == 0:
            return k
        for c in range(count):
            shares[c] = _score(xs[k, c], net, hs[c])
        best = np.argmax(shares[:count])
        top = max(shares[best], none[0, 0])
        miss = exp(none[0, 0] - top)
        whole = miss
        for c in range(count):
            shares[c] = exp(shares[c] - top)
            whole += shares[c]
        hit = False
        for c in range(count):
            correct = seen[k, c] == truth[k]
            hit |= correct
            _back(xs[k, c], hs[c], rate * np.float32(correct - shares[c] / whole), net)
        none[0, 0] += rate * np.float32((not hit) - miss / whole)
        if seen[k, best] != truth[k]:
            return k + 1
    return truth.size


@njit(nogil=True, cache=True)
def learn_all(features, seen, rows, tokens, begins, ends, net, rate):
    """Runs `learn` for the drafts in these rows, i64[n]; the truth of each is tokens[begins[i]:ends[i]]."""
    for i in range(rows.size):
        learn(features[rows[i]], seen[rows[i]], tokens[begins[i] : ends[i]], net, rate)
