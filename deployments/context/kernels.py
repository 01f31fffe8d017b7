"""The draft index's loops over flat arrays (numba): append tokens, find places that match, walk on from them.

A place is a row of an arena: its token, then for each order the previous place whose last `ORDERS[o]` tokens hash
alike (chains as in LZ77). Rows come in blocks of 32 that belong to one run; a block knows what lies before and after it.
Invariant: only places whose token is known are in chains, so every candidate says what comes next. Called by index.py.
"""

import numpy as np
from numba import njit

ORDERS = np.array([1, 2, 3, 5, 8], np.int32)
REACH = 32
"""Tokens that a match is measured over at most."""

BLOCK_BITS = 5
BLOCK = 1 << BLOCK_BITS
COLUMNS = 1 + len(ORDERS)
BEFORE, AFTER, RUN = 0, 1, 2
PLACE, LENGTH, SOURCE, ARENA = 0, 1, 2, 3
LIMIT = 64
OWN, MATE, HISTORY = 0, 1, 2
PROMPT = -1
ESCAPE = 0.05
_DEEPEST = int(ORDERS[-1])
_PRIME = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(29)


@njit(nogil=True, inline="always")
def _before(blocks, place):
    """The place before this one, -1 at the start of what is known."""
    return place - 1 if place & (BLOCK - 1) else blocks[place >> BLOCK_BITS, BEFORE]


@njit(nogil=True, inline="always")
def _after(rows, blocks, place):
    """The place after this one in its run, -1 where it is not known yet."""
    if (place & (BLOCK - 1)) != BLOCK - 1:
        place += 1
    else:
        block = blocks[place >> BLOCK_BITS, AFTER]
        if block < 0:
            return -1
        place = block << BLOCK_BITS
    return place if rows[place, 0] >= 0 else -1


@njit(nogil=True, inline="always")
def _mix(value, token):
    value = (value ^ np.uint64(token + 1)) * _PRIME
    return value ^ (value >> _SHIFT)


@njit(nogil=True, cache=True)
def context(rows, blocks, last, window):
    """Fill window with the tokens up to and including `last`, newest first; returns how many."""
    count = 0
    while last >= 0 and count < window.size:
        window[count] = rows[last, 0]
        last = _before(blocks, last)
        count += 1
    return count


@njit(nogil=True)
def _link(rows, heads, place, window, known):
    """Put a place into the chains of its context."""
    mask = heads.size - 1
    value, depth = np.uint64(0), 0
    for o in range(ORDERS.size):
        if ORDERS[o] > known:
            rows[place, 1 + o] = -1
            continue
        while depth < ORDERS[o]:
            value = _mix(value, window[depth])
            depth += 1
        slot = np.int64(_mix(value, o)) & mask
        rows[place, 1 + o] = heads[slot]
        heads[slot] = place


@njit(nogil=True, cache=True)
def append(rows, heads, blocks, used, last, fresh, run, tokens):
    """Append tokens after the place `last` (-1: nothing before); `fresh` starts a new run there.

    Returns the last place. `used[0]` counts blocks; the caller has seen to room for all.
    """
    window = np.empty(_DEEPEST, np.int32)
    known = context(rows, blocks, last, window)
    for token in tokens:
        if fresh or (last & (BLOCK - 1)) == BLOCK - 1:
            block = used[0]
            used[0] += 1
            blocks[block, BEFORE], blocks[block, AFTER], blocks[block, RUN] = last, -1, run
            if not fresh:
                blocks[last >> BLOCK_BITS, AFTER] = block
            fresh = False
            last = block << BLOCK_BITS
        else:
            last += 1
        rows[last, 0] = token
        _link(rows, heads, last, window, known)
        for i in range(_DEEPEST - 1, 0, -1):
            window[i] = window[i - 1]
        window[0] = token
        known = min(known + 1, _DEEPEST)
    return last


@njit(nogil=True, cache=True)
def relink(rows, heads, blocks, used):
    """Rebuild all chains, for a table of heads that has grown."""
    window = np.empty(_DEEPEST, np.int32)
    heads[:] = -1
    for block in range(used[0]):
        place = block << BLOCK_BITS
        known = context(rows, blocks, blocks[block, BEFORE], window)
        for place in range(place, place + BLOCK):
            if rows[place, 0] < 0:
                break
            _link(rows, heads, place, window, known)
            for i in range(_DEEPEST - 1, 0, -1):
                window[i] = window[i - 1]
            window[0] = rows[place, 0]
            known = min(known + 1, _DEEPEST)


@njit(nogil=True)
def _match(rows, blocks, place, window, known):
    """How many tokens before `place` equal the window."""
    count = 0
    place = _before(blocks, place)
    while count < known and place >= 0 and rows[place, 0] == window[count]:
        count += 1
        place = _before(blocks, place)
    return count


@njit(nogil=True)
def _collect(rows, heads, blocks, owners, me, arena, window, known, found, count, limit):
    """Add matching places to `found`, those of long contexts first, each place once; returns their number."""
    hashes = np.empty(ORDERS.size, np.int64)
    value, depth, orders = np.uint64(0), 0, 0
    for o in range(ORDERS.size):
        if ORDERS[o] > known:
            break
        while depth < ORDERS[o]:
            value = _mix(value, window[depth])
            depth += 1
        hashes[o] = np.int64(_mix(value, o)) & (heads.size - 1)
        orders += 1
    above = 1 << 30
    for o in range(orders - 1, -1, -1):
        place, tries = heads[hashes[o]], 0
        while place >= 0 and count < limit and tries < limit:
            tries += 1
            length = _match(rows, blocks, place, window, known)
            if ORDERS[o] <= length < above:
                owner = owners[blocks[place >> BLOCK_BITS, RUN]]
                source = HISTORY if arena else OWN if owner == PROMPT or owner == me else MATE
                found[count, PLACE], found[count, LENGTH] = place, length
                found[count, SOURCE], found[count, ARENA] = source, arena
                count += 1
            place = rows[place, 1 + o]
        above = ORDERS[o]
    return count


@njit(nogil=True)
def _vote(token, found, weight, count):
    """(token, its share of the weight, second token, its share, source): the next token by summed evidence."""
    total, best, second, first, other, top = 0.0, 0.0, 0.0, -1, -1, -1
    for i in range(count):
        total += weight[i]
        mine = 0.0
        for j in range(count):
            if token[j] == token[i]:
                if j < i:
                    mine = -1.0
                    break
                mine += weight[j]
        if mine > best:
            second, other = best, first
            best, first, top = mine, token[i], i
        elif mine > second:
            second, other = mine, token[i]
    return first, best / (total + ESCAPE), other, second / (total + ESCAPE), top


@njit(nogil=True)
def _walk(rows, blocks, past_rows, past_blocks, token, found, count, chosen):
    """Keep the places that agree with the chosen token, each one further; returns how many."""
    kept = 0
    for i in range(count):
        if token[i] != chosen:
            continue
        place = found[i, PLACE]
        place = _after(past_rows, past_blocks, place) if found[i, ARENA] else _after(rows, blocks, place)
        if place < 0:
            continue
        found[kept, PLACE], found[kept, LENGTH] = place, found[i, LENGTH] + 1
        found[kept, SOURCE], found[kept, ARENA] = found[i, SOURCE], found[i, ARENA]
        kept += 1
    return kept


@njit(nogil=True, cache=True)
def propose(
    rows, heads, blocks, owners, past_rows, past_heads, past_blocks, last, me, table, most, tokens, right, origin
):
    """Fill tokens, right, origin (rows: paths) with drafts; returns (paths, their lengths, longest match)."""
    window = np.empty(REACH, np.int32)
    known = context(rows, blocks, last, window)
    start = np.empty((LIMIT, 4), np.int32)
    count = _collect(rows, heads, blocks, owners, me, 0, window, known, start, 0, LIMIT)
    count = _collect(past_rows, past_heads, past_blocks, owners, me, 1, window, known, start, count, LIMIT)
    paths = tokens.shape[0]
    lengths = np.zeros(paths, np.int64)
    match = 0
    for i in range(count):
        match = max(match, start[i, LENGTH])
    found, weight, token = np.empty((LIMIT, 4), np.int32), np.empty(LIMIT, np.float64), np.empty(LIMIT, np.int32)
    other = np.empty((paths, most), np.int32)
    worth = np.zeros((paths, most), np.float64)
    done = 0
    for path in range(paths):
        stem, parent, stem_worth = 0, -1, 0.0
        for p in range(path):
            for k in range(lengths[p]):
                if worth[p, k] > stem_worth:
                    stem, parent, stem_worth = k, p, worth[p, k]
        if path and parent < 0:
            break
        found[:count] = start[:count]
        here, prefix, share = count, 1.0, 0.0
        for k in range(most):
            for i in range(here):
                place = found[i, PLACE]
                token[i] = past_rows[place, 0] if found[i, ARENA] else rows[place, 0]
                weight[i] = table[found[i, SOURCE], min(found[i, LENGTH], REACH)]
            chosen, share, next_best, next_share, top = _vote(token, found, weight, here)
            if parent >= 0 and k < stem:
                chosen, share = tokens[parent, k], right[parent, k]
                worth[path, k] = 0.0
            elif parent >= 0 and k == stem:
                chosen, share = other[parent, k], worth[parent, k] / max(prefix, 1e-9)
                worth[parent, k] = 0.0
                for i in range(here):
                    if token[i] == chosen:
                        top = i
            else:
                other[path, k], worth[path, k] = next_best, prefix * next_share
            if chosen < 0:
                break
            tokens[path, k], right[path, k], origin[path, k] = chosen, share, found[top, SOURCE]
            prefix *= share
            lengths[path] = k + 1
            here = _walk(rows, blocks, past_rows, past_blocks, token, found, here, chosen)
            if here == 0:
                break
        if lengths[path] == 0:
            break
        done += 1
    return done, lengths, match
