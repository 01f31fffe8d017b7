"""Contexts whose KV is kept for later, least recently used first out, and of one context its end first.

Called by modelled replicas for their HBM, and by hosts for DRAM and SSD. All counts are tokens.
"""

from collections import OrderedDict


class ContextCache:
    """At most `capacity` tokens of contexts, by line. `spill`: gets whole contexts that are put out; None: dropped."""

    def __init__(self, capacity: int, spill: "ContextCache | None" = None):
        self.capacity, self._spill = capacity, spill
        self.tokens = 0
        self._of: OrderedDict[object, int] = OrderedDict()  # least recently used first

    def of(self, line: object) -> int:
        """Returns the tokens of a context that are here."""
        return self._of.get(line, 0)

    def put(self, line: object, tokens: int) -> None:
        """Adds or renews a context as the one used last; others give way."""
        tokens = min(tokens, self.capacity)
        self.take(line)
        self.shrink(self.capacity - tokens)
        if tokens > 0:
            self._of[line] = tokens
            self.tokens += tokens

    def use(self, line: object) -> None:
        """Marks a context as the one used last."""
        if line in self._of:
            self._of.move_to_end(line)

    def take(self, line: object, but: int = 0) -> int:
        """Removes a context, but for its first `but` tokens. Returns the tokens removed."""
        here = self._of.pop(line, 0)
        self.tokens -= here
        if but and here:
            self._of[line] = min(but, here)
            self.tokens += min(but, here)
            return max(0, here - but)
        return here

    def shrink(self, most: int) -> None:
        """Puts contexts out until at most `most` tokens are here."""
        while self.tokens > most and self._of:
            line, here = next(iter(self._of.items()))
            over = self.tokens - max(0, most)
            if self._spill is not None or over >= here:
                del self._of[line]
                self.tokens -= here
                if self._spill is not None:
                    self._spill.put(line, here)
            else:
                self._of[line] = here - over
                self.tokens -= over


class Tiers:
    """DRAM before SSD, as one store: what DRAM puts out goes to SSD, if there is any."""

    def __init__(self, dram_tokens: int, ssd_tokens: int):
        self._ssd = ContextCache(ssd_tokens) if ssd_tokens else None
        self._dram = ContextCache(dram_tokens, self._ssd)

    @property
    def capacity(self) -> int:
        return self._dram.capacity + (self._ssd.capacity if self._ssd else 0)

    def find(self, line: object) -> tuple[int, bool]:
        """Returns the tokens of a context that are here, and whether they lie on SSD."""
        here, below = self._dram.of(line), self._ssd.of(line) if self._ssd else 0
        return (here, False) if here >= below else (below, True)

    def put(self, line: object, tokens: int) -> None:
        if self._ssd is not None:
            self._ssd.take(line)
        self._dram.put(line, tokens)

    def use(self, line: object) -> None:
        self._dram.use(line)

    def drop(self, line: object) -> None:
        self._dram.take(line)
        if self._ssd is not None:
            self._ssd.take(line)
