"""The draft index's places in flat arrays (numba): append tokens, follow a sample along similar places.
A place is a row of a token index (arena): its token (text) and its chains (as in LZ77). For each order, a chain has the
previous place whose last `ORDERS[o]` tokens have the same hash. Places come in blocks of 32 of one run; a block has the
numbers of its neighbours. A *track* is a place that a sample's context aligns with, gaps allowed. Tracks are an online
local alignment, of which the best cells are kept. Invariant: only places with a known token are in chains or tracks.
Functions compiled together stay in one file."""

import numpy as np
from numba import njit

ORDERS = np.array([1, 2, 3, 5, 8], np.int32)
REACH, TRACKS, LOOKED_UP = 32, 64, 48
"""Maxima: tokens that a match is measured over, places followed by each sample, and places looked up again."""

ROOM = TRACKS + LOOKED_UP
BLOCK_BITS, BLOCK = 5, 32
(BEFORE, AFTER, RUN, START), (OWNER, WEIGHT) = range(4), range(2)  # columns of a block, of a run
PROMPT, PAST, NOBODY = -1, -2, -3
"""Owners of runs: the prompt, an answer of an earlier epoch, tokens only for context; else a sample index."""

WEIGHT_ONE, OWN, MATE, HISTORY = 1024, 0, 1, 2  # the last three: messages.context.Source
LENGTH, SOURCE, FROM_RUN, AHEAD, WORTH = 0, 1, 2, 3, 4
"""Columns of the places found by `follow`: tokens matched, Source, run, position relative to the sample's, weight."""

FAST, SLOW, SKIP, SKIP_COST = np.float32(0.9), np.float32(0.96), np.float32(0.9), np.float32(0.3)
"""Parameters of an alignment's two scores: the factors per token, and the cost of a token without a counterpart."""

_FASTS, _SLOWS = (((1 - f ** np.arange(REACH + 1)) / (1 - f)).astype(np.float32) for f in (FAST, SLOW))
FAINT = np.float32(1.2)  # alignments below this are not followed

_njit = njit(nogil=True, error_model="numpy")
_entry = njit(nogil=True, cache=True, error_model="numpy")
_DEEPEST, _SLOTS = int(ORDERS[-1]), 1024
_PRIME, _SHIFT = np.uint64(0x9E3779B97F4A7C15), np.uint64(29)


@_njit
def _before(blocks, place):
    """Returns the place before this one, or -1 at the start of the known tokens."""
    return place - 1 if place & (BLOCK - 1) else blocks[place >> BLOCK_BITS, BEFORE]


@_njit
def _after(text, blocks, place):
    """Returns the place after this one in its run, or -1 where it is not known yet."""
    if (place & (BLOCK - 1)) != BLOCK - 1:
        return place + 1 if text[place + 1] >= 0 else -1
    block = blocks[place >> BLOCK_BITS, AFTER]
    return block << BLOCK_BITS if block >= 0 and text[block << BLOCK_BITS] >= 0 else -1


@_entry
def context(text, blocks, last, window):
    """Fills window with the tokens up to and including `last`, newest first; returns their count."""
    count = 0
    while last >= 0 and count < window.size:
        window[count] = text[last]
        last = _before(blocks, last)
        count += 1
    return count


@_njit
def _hashes(window, known, heads, slots):
    """Fills slots with the hash slots of the window's orders, a table for each; returns the number of orders."""
    size = heads.size // ORDERS.size
    value, depth = np.uint64(0), 0
    for o in range(ORDERS.size):
        if ORDERS[o] > known:
            return o
        while depth < ORDERS[o]:
            value = (value ^ np.uint64(window[depth] + 1)) * _PRIME
            value ^= value >> _SHIFT
            depth += 1
        slots[o] = o * size + (np.int64(value) & (size - 1))
    return ORDERS.size


@_njit
def _link(text, chains, heads, place, window, known, slots):
    """Puts a place into the chains of its context, then its token into the window; returns the window's length."""
    orders = _hashes(window, known, heads, slots)
    for o in range(ORDERS.size):
        chains[place, o] = -1
        if o < orders:
            chains[place, o], heads[slots[o]] = heads[slots[o]], place
    for i in range(_DEEPEST - 1, 0, -1):
        window[i] = window[i - 1]
    window[0] = text[place]
    return min(known + 1, _DEEPEST)


@_entry
def append(text, chains, heads, blocks, used, last, fresh, runs, positions, ends, tokens):
    """Appends tokens[ends[i - 1] : ends[i]] after each place last[i] (-1: nothing before), which becomes the last one.
    `fresh` starts the run there, at positions[i] of its text. `used[0]` counts blocks. The caller provides room."""
    window, slots, begin = np.empty(_DEEPEST, np.int32), np.empty(ORDERS.size, np.int64), 0
    for i in range(ends.size):
        place, position, starts, known = last[i], positions[i], fresh, context(text, blocks, last[i], window)
        for token in tokens[begin : ends[i]]:
            if starts or (place & (BLOCK - 1)) == BLOCK - 1:
                block = used[0]
                used[0] += 1
                blocks[block, BEFORE], blocks[block, AFTER] = place, -1
                blocks[block, RUN], blocks[block, START] = runs[i], position
                if not starts:
                    blocks[place >> BLOCK_BITS, AFTER] = block
                starts, place = False, block << BLOCK_BITS
            else:
                place += 1
            text[place] = token
            known = _link(text, chains, heads, place, window, known, slots)
            position += 1
        last[i], begin = place, ends[i]


@_entry
def relink(text, chains, heads, blocks, used):
    """Rebuilds all chains, for a table of heads that has grown."""
    window, slots = np.empty(_DEEPEST, np.int32), np.empty(ORDERS.size, np.int64)
    for block in range(used[0]):
        first = block << BLOCK_BITS
        known = context(text, blocks, blocks[block, BEFORE], window)
        for place in range(first, first + BLOCK):
            if text[place] < 0:
                break
            known = _link(text, chains, heads, place, window, known, slots)


@_njit
def _match(text, blocks, place, window, known):
    """Returns the number of tokens before `place` that equal the window."""
    count = 0
    place = _before(blocks, place)
    while count < known and place >= 0 and text[place] == window[count]:
        count += 1
        place = _before(blocks, place)
    return count


@_njit
def _put(slots, places, lengths, scores, count, place, length, fast, slow):
    """Adds a track, once for each place with the best of its scores; returns the number of tracks."""
    slot = (place * 40503 >> 4) & (slots.size - 1)
    while slots[slot] >= 0:
        i = slots[slot]
        if places[i] == place:
            lengths[i] = max(lengths[i], length)
            scores[i, 0], scores[i, 1] = max(scores[i, 0], fast), max(scores[i, 1], slow)
            return count
        slot = (slot + 1) & (slots.size - 1)
    if count == places.size:
        return count
    slots[slot] = count
    places[count], lengths[count] = place, length
    scores[count, 0], scores[count, 1] = fast, slow
    return count + 1


@_njit
def _advance(arena, me, position, token, slots, old, new):
    """Moves all tracks over one token of the sample, that at `position`; returns the number that continue.

    A track may continue with its place's token (equal or not), stay (the sample has a token more), or skip one.
    """
    text, _, _, blocks, runs = arena
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
        after = _after(text, blocks, place)
        if after < 0:
            continue
        if text[place] == token:
            kept = _put(slots, to, to_lengths, to_scores, kept, after, lengths[i] + 1, fast + 1, slow + 1)
        elif fast >= FAINT:
            kept = _put(slots, to, to_lengths, to_scores, kept, after, 0, fast, slow)
        if text[after] == token:
            over = _after(text, blocks, after)
            if over >= 0:
                kept = _put(slots, to, to_lengths, to_scores, kept, over, 1, gap_fast + 1, gap_slow + 1)
    return kept


@_njit
def _prune(places, lengths, scores, count, most):
    """Keeps the best tracks, up to the limit; returns their number."""
    least = FAINT
    while True:
        kept = 0
        for i in range(count):
            if scores[i, 0] >= least:
                places[kept], lengths[kept] = places[i], lengths[i]
                scores[kept, 0], scores[kept, 1] = scores[i, 0], scores[i, 1]
                kept += 1
        count = kept
        if count <= most:
            return count
        least *= np.float32(1.25)


@_njit
def _seed(arena, window, known, slots, tracks, limit):
    """Adds the places in the chains, those of long contexts first; returns the number of tracks."""
    text, chains, heads, blocks, _ = arena
    places, lengths, scores, count = tracks
    starts = np.empty(ORDERS.size, np.int64)
    orders = _hashes(window, known, heads, starts)
    above = 1 << 30
    for o in range(orders - 1, -1, -1):
        place, tries = heads[starts[o]], 0
        while place >= 0 and tries < limit:
            tries += 1
            length = _match(text, blocks, place, window, known)
            if ORDERS[o] <= length < above:
                count = _put(slots, places, lengths, scores, count, place, length, _FASTS[length], _SLOWS[length])
            place = chains[place, o]
        limit -= tries
        above = ORDERS[o]
    return count


@_njit
def _tell(arena, me, end, sources, tracks, found, ahead, scores, n):
    """Writes the tracks' places from these `sources` (bits), from row n; returns the number of rows."""
    text, _, _, blocks, runs = arena
    places, lengths, marks, count = tracks
    for i in range(count):
        place = places[i]
        block = place >> BLOCK_BITS
        run = blocks[block, RUN]
        owner = runs[run, OWNER]
        source = HISTORY if owner == PAST else OWN if owner in (PROMPT, me) else MATE
        if owner == NOBODY or not sources >> source & 1:
            continue
        found[n, LENGTH], found[n, SOURCE], found[n, FROM_RUN] = lengths[i], source, run + 32 * (source == HISTORY)
        found[n, AHEAD], found[n, WORTH] = blocks[block, START] + (place & (BLOCK - 1)) - end, runs[run, WEIGHT]
        scores[n, 0], scores[n, 1] = marks[i, 0], marks[i, 1]
        for k in range(ahead.shape[1]):
            ahead[n, k] = text[place] if place >= 0 else -1
            place = _after(text, blocks, place) if place >= 0 else -1
        n += 1
    return n


@_njit
def _follow(arena, live, sample, most, kept, work, window, found, ahead, scores, n):
    """Runs `follow` for one sample in one arena; returns (rows, tracks kept, longest match, tokens of context)."""
    last, me, fresh, sources = sample
    blocks, (keep, marks_kept, kept_count) = live[3], kept
    places, lengths, marks, to, to_lengths, to_marks, table = work
    known = context(live[0], blocks, last, window)
    end = blocks[last >> BLOCK_BITS, START] + (last & (BLOCK - 1)) + 1 if last >= 0 else 0
    count, size = kept_count if fresh <= known else 0, 32
    while size < min(_SLOTS, 2 * (3 * max(count, most[0]) + most[1])):  # a token makes three tracks of one
        size *= 2
    slots = table[:size]
    places[:count], lengths[:count], marks[:count] = keep[:count, 0], keep[:count, 1], marks_kept[:count]
    for i in range(min(fresh, known) - 1, -1, -1):
        tracks = places, lengths, marks, count
        count = _advance(arena, me, end - i, window[i], slots, tracks, (to, to_lengths, to_marks))
        places, lengths, marks, to, to_lengths, to_marks = to, to_lengths, to_marks, places, lengths, marks
        count = _prune(places, lengths, marks, count, most[0])
    slots[:] = -1
    for i in range(count):
        _put(slots, places, lengths, marks, i, places[i], lengths[i], marks[i, 0], marks[i, 1])
    count = _seed(arena, window, known, slots, (places, lengths, marks, count), most[1])
    n = _tell(arena, me, end, sources, (places, lengths, marks, count), found, ahead, scores, n)
    match = lengths[:count].max() if count else 0
    count = _prune(places, lengths, marks, count, most[0])
    keep[:count, 0], keep[:count, 1], marks_kept[:count] = places[:count], lengths[:count], marks[:count]
    return n, count, match, known


@_entry
def follow(live, past, has_past, samples, most, kept, marks, counts, recent, found, ahead, scores, told):
    """Follows samples of the arena `live` over their newest tokens, through it and `past`, and looks their contexts up.
    samples i64[S, 5]: row of the kept tracks, last place, sample index, new tokens, sources. Limits: (tracks, places
    looked up). Writes the places from which they may continue: found (columns from LENGTH), scores (of its context's
    alignment, fast and slow), ahead (next tokens; -1: the end). Last: rows, longest match, context tokens.
    """
    place, score = np.empty((4, ROOM), np.int32), np.empty((2, ROOM, 2), np.float32)
    work = place[0], place[1], score[0], place[2], place[3], score[1], np.empty(_SLOTS, np.int16)
    for s in range(len(samples)):
        row, n, match, sample = samples[s, 0], 0, 0, (samples[s, 1], samples[s, 2], samples[s, 3], samples[s, 4])
        for a in range(2 if has_past else 1):
            kept_now, arena = (kept[row, a], marks[row, a], counts[row, a]), past if a else live
            found_now = recent[s], found[s], ahead[s], scores[s]
            n, counts[row, a], longest, told[s, 2] = _follow(arena, live, sample, most, kept_now, work, *found_now, n)
            match = max(match, longest)
        told[s, 0], told[s, 1] = n, match
