"""Drafts of samples, token by token, from the places at which they may continue (numba).

Drafting continues greedily, and the places move along. Other paths branch off an earlier one at the point where
that is likeliest to be right. Called by group_index.py.
Numba's cache sees changes of this file alone, so the text of the files compiled into `draft` is a part of its key.
"""

from pathlib import Path
from zlib import crc32

import numpy as np
from numba import njit

from tailrace.deployments.draft_index import phrase_kernels, scorer_kernels
from tailrace.deployments.draft_index.phrase_kernels import ORDERS, note_one, recall
from tailrace.deployments.draft_index.scorer_kernels import (
    CANDIDATES,
    FEATURES,
    HIDDEN,
    LENGTH,
    LOGS,
    SOURCE,
    TOKENS,
    WORTH,
    candidates,
    gather,
)

OTHER = 4  # messages.context.Source
FAST, SLOW = np.float32(0.9), np.float32(0.96)  # as in match_kernels.py
LEAVE = np.float32(4.0)
"""Minimum alignment before a drafted token at which a place that disagrees with it is still followed."""

ALTERNATIVES = 2
_njit = njit(nogil=True, error_model="numpy", fastmath=True)


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
    source, most = OTHER, np.float32(-1)
    for i in range(n):
        if token[i] == chosen and marks[i, 0] > most:
            most, source = marks[i, 0], places[i, SOURCE]
    return np.uint8(source)


@_njit
def _draft(
    n, found, scores, ahead, table, end, lesson, limit, norm, net, least, tokens, right, origin, lengths, xs, seen, work
):
    """Runs `draft` for one sample; returns the number of paths."""
    paths, most = tokens.shape
    others, chances, distinct, runs, sums, total, spare, spare_seen, places, marks, at, token, shares, h = work[:14]
    text, heard, base, keys = work[14:]
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
                many = gather(here, places, marks, token, distinct, sums, runs, total)
                many = recall(table, text, end + k, many, distinct, sums, runs, heard, keys)
                if not many:
                    break
                noted = path == 0 and k < seen.shape[0]
                x, out = xs[k] if noted and lesson else spare, seen[k] if noted else spare_seen
                count = candidates(
                    min(many, limit), many, distinct, sums, runs, total, heard, base, norm, net, x, out, shares, h
                )
                out[CANDIDATES] = count
                best = _best(count, shares, out, others[parent, k, which] if k == stem else -1)
                if k > stem and paths > 1:
                    _rank(count, shares, out, best, prefix, others[path, k], chances[path, k])
                chosen, share = out[best], shares[best]
                if k > stem and prefix * share < least:
                    break
                source = _source(here, places, marks, token, chosen)
            tokens[path, k], right[path, k], origin[path, k] = chosen, share, source
            text[end + k] = chosen
            prefix *= share
            lengths[path] = k + 1
            here = _move(here, k, most, places, marks, ahead, at, token, chosen)
    return paths if lengths[0] else 0


def _compiled(parts: int):
    """Returns `draft`. Numba's key has the values that a function takes from its surroundings: `parts`."""

    @njit(nogil=True, cache=True, error_model="numpy", fastmath=True)
    def draft(
        samples, limit, told, recent, found, scores, ahead, table, none, norm, net, least, tokens, right, origin,
        lengths, done, xs, seen,
    ):  # fmt: skip
        """Drafts for each sample from the places found by `follow`, after its new tokens are in the phrase `table`.
        A path ends where the probability that all of it is right falls below the bound. `none`: an empty table.
        `limit`: maximum scored candidates of a token.
        Fills tokens, right, origin with paths, lengths with their lengths, done with counts. `seen` gets the first
        path's candidates, seen[k, -1] their number, and `xs` the features of drafts that `learn` will learn from.
        """
        most, room, reach = tokens.shape[1:], found.shape[1], recent.shape[1]
        others, chances = np.empty((*most, ALTERNATIVES), np.int32), np.empty((*most, ALTERNATIVES), np.float32)
        distinct, runs = np.empty(TOKENS, np.int32), np.empty((TOKENS, 3), np.uint64)
        sums, total = np.empty((TOKENS, FEATURES), np.float32), np.empty(8, np.float32)
        spare, spare_seen = np.empty((CANDIDATES, FEATURES), np.float32), np.empty(CANDIDATES + 1, np.int32)
        places, marks = np.empty((room, found.shape[2]), np.int32), np.empty((room, 2), np.float32)
        at, token = np.empty(room, np.int64), np.empty(room, np.int32)
        shares, h = np.empty(TOKENS, np.float32), np.empty(HIDDEN, np.float32)
        text, heard = np.empty(reach + most[1], np.int32), np.empty((TOKENS + 1, ORDERS), np.float32)
        base, keys = np.empty(LOGS, np.float32), np.empty(ORDERS, np.uint64)
        paths_work = (
            others,
            chances,
            distinct,
            runs,
            sums,
            total,
            spare,
            spare_seen,
            places,
            marks,
            at,
            token,
            shares,
            h,
        )
        work = paths_work + (text, heard, base, keys)  # noqa: RUF005 -- numba cannot unpack into a tuple
        for s in range(samples.shape[0]):
            what, row, known = (found[s], scores[s], ahead[s]), samples[s, 0], told[s, 2]
            for i in range(known):
                text[i] = recent[s, known - 1 - i]
            for i in range(known - min(known, samples[s, 5]), known):
                note_one(table, text, i, keys)
            into = tokens[s], right[s], origin[s], lengths[s], xs[row], seen[row]
            mine = table if samples[s, 4] >> OTHER & 1 else none
            done[s] = _draft(told[s, 0], *what, mine, known, samples[s, 6], limit, norm, net, least, *into, work)
        return parts

    return draft


draft = _compiled(crc32(b"".join(Path(part.__file__).read_bytes() for part in (phrase_kernels, scorer_kernels))))
