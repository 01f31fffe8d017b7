"""The phrase table: which tokens follow the last few in any group of an engine (numba).

A row has the hash of a context (`TAG`), its count (`TOTAL`), and its most frequent followers with their counts.
A context has a place in one of two neighbouring rows; of rows in the same places the rarer context is forgotten.
The table never grows, and a look-up costs the same however many groups an engine runs.
Invariant: it holds only tokens that were given to it. Owned by scorer.py; `draft_kernels.py` fills it and looks it up.
"""

import numpy as np
from numba import njit

PHRASES = np.array([1, 2, 4], np.int32)
"""Orders: tokens of context by which the table is looked up. More of them (3, 6, 10) predict hardly better."""

ORDERS, FOLLOWERS = len(PHRASES), 7
SLOTS = 1 << 17
"""Rows: 8 MiB. Half as many cost 0.3 % of the tokens a verification; twice as many bring 0.1 %."""

TAG, TOTAL, COUNT = 0, 1, 2 + FOLLOWERS
COLUMNS = COUNT + FOLLOWERS
"""Columns of a row: followers are between TOTAL and COUNT, their counts from COUNT."""

FADED = 1 << 12
"""A row's counts are halved when its context was seen as often, so that they follow the model as it learns."""

_PRIME, _SHIFT = np.uint64(0x9E3779B97F4A7C15), np.uint64(29)
_njit = njit(nogil=True, error_model="numpy")
_entry = njit(nogil=True, cache=True, error_model="numpy")


@_njit
def _keys(text, end, keys):
    """Fills keys with hashes of the last tokens before `end`, one for each order; returns the number of orders."""
    value, depth = np.uint64(0), 0
    for o in range(ORDERS):
        if PHRASES[o] > end:
            return o
        while depth < PHRASES[o]:
            value = (value ^ np.uint64(text[end - 1 - depth] + 1)) * _PRIME
            value ^= value >> _SHIFT
            depth += 1
        keys[o] = (value + np.uint64(o)) * _PRIME
    return ORDERS


@_njit
def _row(table, key):
    """Returns the row of a context and its tag there; the row is -1 if the table lacks the context."""
    row, tag = np.int64(key >> np.uint64(32)) & (table.shape[0] - 1), np.int32(key & np.uint64(0x7FFFFFFF))
    if table[row, TAG] != tag:
        row ^= 1
    return (row if table[row, TAG] == tag else -1), tag


@_njit
def _make(table, key, tag):
    """Gives a context a row, the emptier of its two; returns it."""
    row = np.int64(key >> np.uint64(32)) & (table.shape[0] - 1)
    if table[row ^ 1, TOTAL] < table[row, TOTAL]:
        row ^= 1
    for i in range(table.shape[1]):
        table[row, i] = 0
    table[row, TAG] = tag
    return row


@_njit
def _count(table, row, token):
    """Counts a follower in a row. A new one takes the place of one seen once; else it wears the rarest down."""
    rarest = COUNT
    for i in range(COUNT, COUNT + FOLLOWERS):
        if table[row, i] and table[row, i - FOLLOWERS] == token:
            table[row, i] += 1
            return
        if table[row, i] < table[row, rarest]:
            rarest = i
    if table[row, rarest] > 1:
        table[row, rarest] -= 1
    else:
        table[row, rarest - FOLLOWERS], table[row, rarest] = token, 1


@_njit
def note_one(table, text, end, keys):
    """Counts text[end] as a follower of the tokens before it. keys u64[ORDERS]: scratch space."""
    for o in range(_keys(text, end, keys)):
        row, tag = _row(table, keys[o])
        if row < 0:
            row = _make(table, keys[o], tag)
        table[row, TOTAL] += 1
        _count(table, row, text[end])
        if table[row, TOTAL] == FADED:
            for i in range(COUNT, COUNT + FOLLOWERS):
                table[row, i] >>= 1
            table[row, TOTAL] >>= 1


@_entry
def note(table, text):
    """Counts all tokens of a text, i32[n], as followers of those before them."""
    keys = np.empty(ORDERS, np.uint64)
    for end in range(1, text.size):
        note_one(table, text, end, keys)


@_njit
def recall(table, text, end, many, tokens, sums, runs, heard, keys):
    """Adds the followers of the last tokens in any group; returns the number of distinct next tokens.

    heard f32[tokens + 1, ORDERS] gets their counts, and those of the contexts in its last row."""
    heard[:many] = 0
    heard[-1] = 0
    for o in range(_keys(text, end, keys)):
        row, _ = _row(table, keys[o])
        if row < 0:
            continue
        heard[-1, o] = table[row, TOTAL]
        for i in range(COUNT, COUNT + FOLLOWERS):
            if not table[row, i]:
                continue
            j = 0
            while j < many and tokens[j] != table[row, i - FOLLOWERS]:
                j += 1
            if j == tokens.size:
                continue
            if j == many:
                tokens[j], sums[j], runs[j], heard[j] = table[row, i - FOLLOWERS], 0, 0, 0
                many += 1
            heard[j, o] = table[row, i]
    return many
