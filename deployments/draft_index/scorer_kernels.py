"""The next tokens and their probabilities, from the places at which a sample may continue (numba).

A network of one hidden layer, shared by all groups, scores each candidate token by its evidence (`FEATURES`).
The scores and that of "none of these" give probabilities (softmax).
Drafting continues greedily, and the places move along. Other paths branch off an earlier one at the point where
that is likeliest to be right. Functions compiled together stay in this file.
Called by group_index.py; scorer.py owns the network.
"""

from math import exp, sqrt

import numpy as np
from numba import njit

LENGTH, SOURCE, FROM_RUN, AHEAD, WORTH = 0, 1, 2, 3, 4  # as in match_kernels.py
OWN, HISTORY = 0, 2
WEIGHT_ONE = 1024
FAST, SLOW = np.float32(0.9), np.float32(0.96)

FEATURES, HIDDEN = 22, 16
CANDIDATES, TOKENS = 12, 96
"""Maximum scored candidates, and maximum distinct tokens examined."""

LEAVE = np.float32(4.0)
"""Minimum alignment before a drafted token at which a place that disagrees with it is still followed."""

FAINT, ALTERNATIVES = np.float32(1.2), 2
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
def _gather(n, found, scores, token, tokens, sums, runs, total):
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
def _features(j, s, runs, total, mean, scale, c, x):
    """Fills x[c] with one candidate's evidence, as numbers of mean 0 and deviation 1, roughly."""
    few, some, one = np.float32(0.02), np.float32(0.05), np.float32(1)
    for m in range(4):
        x[c, m] = _ln(s[j, m] + some) - _ln(total[m] + np.float32(0.3))
        x[c, 14 + m] = _ln(s[j, 14 + m] + few) - _ln(total[4 + m] + one)
    x[c, 4], x[c, 5] = sqrt(s[j, 4]), sqrt(s[j, 5])
    x[c, 6], x[c, 7], x[c, 8], x[c, 9] = s[j, 6], s[j, 7], s[j, 8], s[j, 9]
    for r in range(3):
        x[c, 10 + r] = _ln(one + np.float32(_bits(runs[j, r])))
    x[c, 13] = s[j, 13]
    x[c, 18] = _ln(s[j, 14] + few)
    x[c, 19] = _ln(s[j, 19] + few) - _ln(total[4] + one)
    x[c, 20], x[c, 21] = _ln(s[j, 20]), s[j, 21] / s[j, 17]
    for f in range(FEATURES):
        x[c, f] = (x[c, f] - mean[f]) * scale[f]


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
def _candidates(many, tokens, sums, runs, total, norm, net, xs, out, shares, h):
    """Scores the candidates with the strongest evidence; fills xs, out (tokens), shares (chances); returns a count."""
    count = min(many, CANDIDATES)
    inner, offset, outer, none = net
    mean, scale = norm
    most = none[0, 0]
    for c in range(count):
        best = -1
        for j in range(many):
            if sums[j, 20] > 0 and (best < 0 or sums[j, 17] > sums[best, 17]):
                best = j
        _features(best, sums, runs, total, mean, scale, c, xs)
        out[c] = tokens[best]
        sums[best, 20] = 0  # taken
        shares[c] = _score(c, xs, inner, offset, outer, h)
        most = max(most, shares[c])
    whole = exp(none[0, 0] - most)
    for c in range(count):
        shares[c] = exp(shares[c] - most)
        whole += shares[c]
    shares[:count] /= whole
    return count


@_njit
def _move(n, k, most, found, scores, ahead, at, token, chosen):
    """Moves the places over the chosen token, the k-th drafted; returns the number that can continue."""
    kept = 0
    for i in range(n):
        hit = token[i] == chosen
        fast = FAST * scores[i, 0]
        follows = ahead[at[i], k + 1] if k + 1 < most else -1
        if follows < 0 or (not hit and fast < LEAVE):
            continue
        slow = SLOW * scores[i, 1]
        found[kept, LENGTH] = found[i, LENGTH] + 1 if hit else 0
        for column in range(SOURCE, WORTH + 1):
            found[kept, column] = found[i, column]
        scores[kept, 0], scores[kept, 1] = fast + hit, slow + hit
        at[kept], token[kept] = at[i], follows
        kept += 1
    return kept


@_njit
def _branch(path, lengths, chances):
    """Returns the likeliest point at which a path may branch off an earlier one: (path, position, alternative)."""
    parent, stem, which, chance = -1, -1, 0, np.float32(0)
    for p in range(path):
        for k in range(lengths[p]):
            for a in range(ALTERNATIVES):
                if chances[p, k, a] > chance:
                    parent, stem, which, chance = p, k, a, chances[p, k, a]
    if parent >= 0:
        chances[parent, stem, which] = 0
    return parent, stem, which


@_njit
def _rank(count, shares, out, best, prefix, others, chances):
    """Stores the next best candidates, and the probability that the draft and then they are right."""
    for a in range(ALTERNATIVES):
        second = -1
        for c in range(count):
            taken = c == best
            for b in range(a):
                taken |= out[c] == others[b]
            if not taken and (second < 0 or shares[c] > shares[second]):
                second = c
        others[a] = out[second] if second >= 0 else -1
        chances[a] = prefix * shares[second] if second >= 0 else np.float32(0)


@_njit
def _best(count, shares, out, wanted):
    """Returns the likeliest candidate, or that of the wanted token (>= 0)."""
    best = 0
    for c in range(count):
        if out[c] == wanted:
            return c
        if shares[c] > shares[best]:
            best = c
    return best


@_njit
def _source(n, places, marks, token, chosen):
    """Returns the source of the place with the strongest evidence for the chosen token."""
    source, most = 0, np.float32(-1)
    for i in range(n):
        if token[i] == chosen and marks[i, 0] > most:
            most, source = marks[i, 0], places[i, SOURCE]
    return np.uint8(source)


@_njit
def _draft(n, found, scores, ahead, norm, net, least, tokens, right, origin, lengths, xs, seen, work):
    """Runs `draft` for one sample; returns the number of paths."""
    paths, most = tokens.shape
    others, chances, distinct, runs, sums, total, spare, spare_seen, places, marks, at, token, shares, h = work
    chances[:], lengths[:], seen[:, CANDIDATES] = 0, 0, 0
    for path in range(paths):
        parent, stem, which = _branch(path, lengths, chances)
        if path and parent < 0:
            return path
        places[:n], marks[:n], token[:n] = found[:n], scores[:n], ahead[:n, 0]
        for i in range(n):
            at[i] = i
        here, prefix = n, np.float32(1)
        for k in range(most):
            if k < stem:
                chosen, share, source = tokens[parent, k], right[parent, k], origin[parent, k]
            else:
                many = _gather(here, places, marks, token, distinct, sums, runs, total)
                if not many:
                    break
                noted = path == 0 and k < seen.shape[0]
                x, out = (xs[k], seen[k]) if noted else (spare, spare_seen)
                count = _candidates(many, distinct, sums, runs, total, norm, net, x, out, shares, h)
                out[CANDIDATES] = count
                best = _best(count, shares, out, others[parent, k, which] if k == stem else -1)
                if k > stem and paths > 1:
                    _rank(count, shares, out, best, prefix, others[path, k], chances[path, k])
                chosen, share = out[best], shares[best]
                if k > stem and prefix * share < least:
                    break
                source = _source(here, places, marks, token, chosen)
            tokens[path, k], right[path, k], origin[path, k] = chosen, share, source
            prefix *= share
            lengths[path] = k + 1
            here = _move(here, k, most, places, marks, ahead, at, token, chosen)
    return paths if lengths[0] else 0


@njit(nogil=True, cache=True, error_model="numpy", fastmath=True)
def draft(samples, told, found, scores, ahead, norm, net, least, tokens, right, origin, lengths, done, xs, seen):
    """Drafts for each sample from the places found by `follow`. A path ends where the probability that all of it is
    right falls below the bound. Fills tokens, right, origin with paths, lengths with their lengths, done with counts.
    `xs` and `seen` get the first path's features and candidates, for `learn`; seen[k, -1] = number of candidates.
    """
    most, room = tokens.shape[1:], found.shape[1]
    others, chances = np.empty((*most, ALTERNATIVES), np.int32), np.empty((*most, ALTERNATIVES), np.float32)
    distinct, runs = np.empty(TOKENS, np.int32), np.empty((TOKENS, 3), np.uint64)
    sums, total = np.empty((TOKENS, FEATURES), np.float32), np.empty(8, np.float32)
    spare, spare_seen = np.empty((CANDIDATES, FEATURES), np.float32), np.empty(CANDIDATES + 1, np.int32)
    places, marks = np.empty((room, found.shape[2]), np.int32), np.empty((room, 2), np.float32)
    at, token = np.empty(room, np.int64), np.empty(room, np.int32)
    shares, h = np.empty(CANDIDATES, np.float32), np.empty(HIDDEN, np.float32)
    work = others, chances, distinct, runs, sums, total, spare, spare_seen, places, marks, at, token, shares, h
    for s in range(samples.shape[0]):
        what, row = (found[s], scores[s], ahead[s]), samples[s, 0]
        into = tokens[s], right[s], origin[s], lengths[s], xs[row], seen[row]
        done[s] = _draft(told[s, 0], *what, norm, net, least, *into, work)
