"""The draft index's places in flat arrays (numba): append tokens, follow a sample along the places like it.

A place is a row of an arena: its token, then for each order the previous place whose last `ORDERS[o]` tokens hash
alike (chains as in LZ77). Rows come in blocks of 32 that belong to one run; a block knows its neighbours. A *track* is
a place that a sample's context aligns with, gaps allowed: an online local alignment, of which the best cells are kept.
Invariant: only places whose token is known are in chains or tracks. What is compiled together stays in one file."""

import numpy as np
from numba import njit

ORDERS = np.array([1, 2, 3, 5, 8], np.int32)
REACH, TRACKS, LOOKED_UP = 32, 64, 48
"""At most: tokens that a match is measured over, places followed by each sample, and places looked up anew."""

ROOM = TRACKS + LOOKED_UP
BLOCK_BITS = 5
BLOCK = 1 << BLOCK_BITS
COLUMNS = 1 + len(ORDERS)
BEFORE, AFTER, RUN, START = 0, 1, 2, 3
OWNER, WEIGHT = 0, 1
PROMPT, PAST, NOBODY = -1, -2, -3
"""Owners of runs: the prompt, an answer of an earlier epoch, what gives only context; else a sample index."""

WEIGHT_ONE = 1024
OWN, MATE, HISTORY = 0, 1, 2  # types.Source
LENGTH, SOURCE, FROM_RUN, AHEAD, WORTH = 0, 1, 2, 3, 4
"""Columns of what `follow` found: tokens matched, types.Source, run, position before or after the sample's, weight."""

FAST, SLOW, SKIP, SKIP_COST = np.float32(0.9), np.float32(0.96), np.float32(0.9), np.float32(0.3)
"""Of an alignment's two scores: the factors per token, and what a token without a counterpart costs."""

_RUNS = np.arange(REACH + 1)
_FASTS = ((1 - FAST**_RUNS) / (1 - FAST)).astype(np.float32)
_SLOWS = ((1 - SLOW**_RUNS) / (1 - SLOW)).astype(np.float32)
FAINT = np.float32(1.2)  # alignments below this are not followed

_DEEPEST = int(ORDERS[-1])
_PRIME = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(29)
_SLOTS = 1024


@njit(nogil=True, error_model="numpy")
def _before(blocks, place):
    """The place before this one, -1 at the start of what is known."""
    return place - 1 if place & (BLOCK - 1) else blocks[place >> BLOCK_BITS, BEFORE]


@njit(nogil=True, error_model="numpy")
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


@njit(nogil=True, error_model="numpy")
def _mix(value, token):
    value = (value ^ np.uint64(token + 1)) * _PRIME
    return value ^ (value >> _SHIFT)


@njit(nogil=True, cache=True, error_model="numpy")
def context(rows, blocks, last, window):
    """Fill window with the tokens up to and including `last`, newest first; returns how many."""
    count = 0
    while last >= 0 and count < window.size:
        window[count] = rows[last, 0]
        last = _before(blocks, last)
        count += 1
    return count


@njit(nogil=True, error_model="numpy")
def _hashes(window, known, heads, slots):
    """Fill slots with those of the window's orders, a table for each; returns how many orders there are."""
    size = heads.size // ORDERS.size
    value, depth = np.uint64(0), 0
    for o in range(ORDERS.size):
        if ORDERS[o] > known:
            return o
        while depth < ORDERS[o]:
            value = _mix(value, window[depth])
            depth += 1
        slots[o] = o * size + (np.int64(value) & (size - 1))
    return ORDERS.size


@njit(nogil=True, error_model="numpy")
def _link(rows, heads, place, window, known, slots):
    """Put a place into the chains of its context, then its token into the window."""
    orders = _hashes(window, known, heads, slots)
    for o in range(ORDERS.size):
        rows[place, 1 + o] = heads[slots[o]] if o < orders else -1
        if o < orders:
            heads[slots[o]] = place
    for i in range(_DEEPEST - 1, 0, -1):
        window[i] = window[i - 1]
    window[0] = rows[place, 0]
    return min(known + 1, _DEEPEST)


@njit(nogil=True, cache=True, error_model="numpy")
def append(rows, heads, blocks, used, last, fresh, run, position, tokens):
    """Append tokens after the place `last` (-1: nothing before); `fresh` starts a run there, at `position` of its text.

    Returns the last place. `used[0]` counts blocks; the caller has seen to room for all.
    """
    window, slots = np.empty(_DEEPEST, np.int32), np.empty(ORDERS.size, np.int64)
    known = context(rows, blocks, last, window)
    for token in tokens:
        if fresh or (last & (BLOCK - 1)) == BLOCK - 1:
            block = used[0]
            used[0] += 1
            blocks[block, BEFORE], blocks[block, AFTER] = last, -1
            blocks[block, RUN], blocks[block, START] = run, position
            if not fresh:
                blocks[last >> BLOCK_BITS, AFTER] = block
            fresh = False
            last = block << BLOCK_BITS
        else:
            last += 1
        rows[last, 0] = token
        known = _link(rows, heads, last, window, known, slots)
        position += 1
    return last


@njit(nogil=True, cache=True, error_model="numpy")
def relink(rows, heads, blocks, used):
    """Rebuild all chains, for a table of heads that has grown."""
    window, slots = np.empty(_DEEPEST, np.int32), np.empty(ORDERS.size, np.int64)
    for block in range(used[0]):
        first = block << BLOCK_BITS
        known = context(rows, blocks, blocks[block, BEFORE], window)
        for place in range(first, first + BLOCK):
            if rows[place, 0] < 0:
                break
            known = _link(rows, heads, place, window, known, slots)


@njit(nogil=True, error_model="numpy")
def _match(rows, blocks, place, window, known):
    """How many tokens before `place` equal the window."""
    count = 0
    place = _before(blocks, place)
    while count < known and place >= 0 and rows[place, 0] == window[count]:
        count += 1
        place = _before(blocks, place)
    return count


@njit(nogil=True, error_model="numpy")
def _put(slots, places, lengths, scores, count, place, length, fast, slow):
    """Note a track, once for each place with the best of its scores; returns how many there are."""
    slot = (place * 40503 >> 4) & (_SLOTS - 1)
    while slots[slot] >= 0:
        i = slots[slot]
        if places[i] == place:
            lengths[i] = max(lengths[i], length)
            scores[i, 0], scores[i, 1] = max(scores[i, 0], fast), max(scores[i, 1], slow)
            return count
        slot = (slot + 1) & (_SLOTS - 1)
    if count == places.size:
        return count
    slots[slot] = count
    places[count], lengths[count] = place, length
    scores[count, 0], scores[count, 1] = fast, slow
    return count + 1


@njit(nogil=True, error_model="numpy")
def _advance(arena, me, position, token, slots, old, new):
    """Move all tracks over one token of the sample, that at `position`; returns how many go on.

    A track may go on with its place's token (equal or not), stay (the sample has a token more), or leave one out.
    """
    rows, _, blocks, runs = arena
    places, lengths, scores, count = old
    to, to_lengths, to_scores = new
    slots[:] = -1
    kept = 0
    for i in range(count):
        place = places[i]
        block = place >> BLOCK_BITS
        if runs[blocks[block, RUN], OWNER] == me and blocks[block, START] + (place & (BLOCK - 1)) >= position - 1:
            continue  # it would align with itself
        fast, slow = FAST * scores[i, 0], SLOW * scores[i, 1]
        gap_fast, gap_slow = SKIP * fast - FAST * SKIP_COST, SKIP * slow - SLOW * SKIP_COST
        if gap_fast >= FAINT:
            kept = _put(slots, to, to_lengths, to_scores, kept, place, 0, gap_fast, gap_slow)
        after = _after(rows, blocks, place)
        if after < 0:
            continue
        if rows[place, 0] == token:
            kept = _put(slots, to, to_lengths, to_scores, kept, after, lengths[i] + 1, fast + 1, slow + 1)
        elif fast >= FAINT:
            kept = _put(slots, to, to_lengths, to_scores, kept, after, 0, fast, slow)
        if rows[after, 0] == token:
            over = _after(rows, blocks, after)
            if over >= 0:
                kept = _put(slots, to, to_lengths, to_scores, kept, over, 1, gap_fast + 1, gap_slow + 1)
    return kept


@njit(nogil=True, error_model="numpy")
def _prune(places, lengths, scores, count):
    """Keep the best tracks, at most TRACKS; returns how many."""
    least = FAINT
    while True:
        kept = 0
        for i in range(count):
            if scores[i, 0] >= least:
                places[kept], lengths[kept] = places[i], lengths[i]
                scores[kept, 0], scores[kept, 1] = scores[i, 0], scores[i, 1]
                kept += 1
        count = kept
        if count <= TRACKS:
            return count
        least *= np.float32(1.25)


@njit(nogil=True, error_model="numpy")
def _seed(arena, window, known, slots, tracks, limit):
    """Add the places that chains lead to, those of long contexts first; returns the number of tracks."""
    rows, heads, blocks, _ = arena
    places, lengths, scores, count = tracks
    chains = np.empty(ORDERS.size, np.int64)
    orders = _hashes(window, known, heads, chains)
    above = 1 << 30
    for o in range(orders - 1, -1, -1):
        place, tries = heads[chains[o]], 0
        while place >= 0 and tries < limit:
            tries += 1
            length = _match(rows, blocks, place, window, known)
            if ORDERS[o] <= length < above:
                count = _put(slots, places, lengths, scores, count, place, length, _FASTS[length], _SLOWS[length])
            place = rows[place, 1 + o]
        limit -= tries
        above = ORDERS[o]
    return count


@njit(nogil=True, error_model="numpy")
def _tell(arena, me, end, mates, most, tracks, found, ahead, scores, n):
    """Write down, from row n on, what is known of each track's place; returns the number of rows."""
    rows, _, blocks, runs = arena
    places, lengths, marks, count = tracks
    for i in range(count):
        place = places[i]
        block = place >> BLOCK_BITS
        run = blocks[block, RUN]
        owner = runs[run, OWNER]
        source = HISTORY if owner == PAST else OWN if owner in (PROMPT, me) else MATE
        if owner == NOBODY or (source == MATE and not mates):
            continue
        found[n, LENGTH], found[n, SOURCE], found[n, FROM_RUN] = lengths[i], source, run + 32 * (source == HISTORY)
        found[n, AHEAD] = blocks[block, START] + (place & (BLOCK - 1)) - end
        found[n, WORTH] = runs[run, WEIGHT]
        scores[n, 0], scores[n, 1] = marks[i, 0], marks[i, 1]
        for k in range(most):
            ahead[n, k] = rows[place, 0] if place >= 0 else -1
            if place >= 0:
                place = _after(rows, blocks, place)
        n += 1
    return n


@njit(nogil=True, cache=True, error_model="numpy")
def follow(arena, live, last, me, fresh, mates, most, kept, kept_scores, kept_count, found, ahead, scores, n):
    """Follow a sample of the arena `live` through `arena` over its `fresh` newest tokens, look its context up, and
    tell, from row n on, the places it may go on from: found (see LENGTH ...), how well the context aligns (scores,
    fast and slow), and `most` tokens from there on (ahead, -1: the end). Returns (rows, tracks kept, longest match).
    """
    blocks = live[2]
    window, slots = np.empty(REACH, np.int32), np.empty(_SLOTS, np.int16)
    known = context(live[0], blocks, last, window)
    end = blocks[last >> BLOCK_BITS, START] + (last & (BLOCK - 1)) + 1 if last >= 0 else 0
    places, lengths, marks = np.empty(ROOM, np.int32), np.empty(ROOM, np.int32), np.empty((ROOM, 2), np.float32)
    to, to_lengths, to_marks = np.empty_like(places), np.empty_like(lengths), np.empty_like(marks)
    count = kept_count if fresh <= known else 0
    places[:count], lengths[:count], marks[:count] = kept[:count, 0], kept[:count, 1], kept_scores[:count]
    for i in range(min(fresh, known) - 1, -1, -1):
        tracks = places, lengths, marks, count
        count = _advance(arena, me, end - i, window[i], slots, tracks, (to, to_lengths, to_marks))
        places, lengths, marks, to, to_lengths, to_marks = to, to_lengths, to_marks, places, lengths, marks
        count = _prune(places, lengths, marks, count)
    slots[:] = -1
    for i in range(count):
        _put(slots, places, lengths, marks, i, places[i], lengths[i], marks[i, 0], marks[i, 1])
    count = _seed(arena, window, known, slots, (places, lengths, marks, count), LOOKED_UP)
    n = _tell(arena, me, end, mates, most, (places, lengths, marks, count), found, ahead, scores, n)
    match = lengths[:count].max() if count else 0
    count = _prune(places, lengths, marks, count)
    kept[:count, 0], kept[:count, 1], kept_scores[:count] = places[:count], lengths[:count], marks[:count]
    return n, count, match
