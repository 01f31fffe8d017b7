"""The adapters of one engine: those that are loaded, and the chunks that wait for theirs.

vLLM computes at most `max_loras` adapters in a step. Invariant: the running chunks use at most that many, and others
wait in order of arrival, so none waits for ever. An adapter stays loaded while a chunk runs with it. A chunk runs with
the content that its digest names, or is refused. Owned by the stepper.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator

from tailrace.deployments.messages.adapters import Adapter, digest_of
from tailrace.deployments.messages.chunk import ChunkRequest
from tailrace.deployments.messages.errors import AdapterRefused
from tailrace.deployments.staging.adapter_folder import adapter_digest

OFF = "the service takes no adapters; give its engine vllm_args: {enable_lora: true, max_lora_rank: RANK}"


class Adapters:
    """`engine`: vLLM's LLMEngine with our workers. The `max_cpu_loras` adapters used last stay loaded. `asleep`:
    returns whether the memory of the weights is given back, and on a GPU with it that of the adapters that run.
    """

    def __init__(self, engine, asleep: Callable[[], bool] = lambda: False):
        self._engine, self._asleep, config = engine, asleep, engine.vllm_config.lora_config
        self.slots, self._capacity = (config.max_loras, config.max_cpu_loras) if config else (0, 0)
        self._numbers: dict[str, int] = {}  # numbers of loaded adapters, by digest, least recently used first
        self._made = 0
        self._used: Counter[str] = Counter()  # running chunks by digest
        self._known: dict[str, Adapter] = {}
        self._waiting: deque[tuple[ChunkRequest, float]] = deque()

    def request(self, adapter: Adapter | None):
        """Returns vLLM's LoRARequest of a loaded adapter. Its name and path enter the names of KV, so both are the
        digest; vLLM never reads the path, since the adapter is loaded.
        """
        if adapter is None:
            return None
        from vllm.lora.request import LoRARequest

        return LoRARequest(adapter.digest, self._numbers[adapter.digest], adapter.digest)

    def load(self, path: str, digest: str | None = None) -> str:
        """Loads a folder's adapter, unless its content is loaded, or the engine sleeps: then the first chunk that has
        it does. Returns its digest.

        `digest`: the intended content's digest. Raises AdapterRefused, one line; nothing has been loaded then, but an
        unused adapter may have been dropped to make room.
        """
        if not self.slots:
            raise AdapterRefused(OFF)
        if digest not in self._numbers:
            found = adapter_digest(path)
            if digest not in (None, found):
                raise AdapterRefused(f"{path} holds another content by now ({found}) than the adapter's ({digest})")
            digest = found
        if self._asleep():
            return digest
        number = self._numbers.pop(digest, None)
        self._numbers[digest] = self._read(path, digest) if number is None else number
        return digest

    def _read(self, path: str, digest: str) -> int:
        while len(self._numbers) >= self._capacity:
            self._drop(next(one for one in self._numbers if not self._used[one]))
        self._made += 1
        reasons = self._engine.collective_rpc("hold_adapter", args=(self._made, path))
        reason = next((one for one in reasons if one is not None), None)
        if reason is None and adapter_digest(path) != digest:
            reason = f"{path}: it was written to while it was loaded"
        if reason is not None:
            self._engine.collective_rpc("drop_adapter", args=(self._made,))
            raise AdapterRefused(reason)
        return self._made

    def _drop(self, digest: str) -> None:
        self._engine.collective_rpc("drop_adapter", args=(self._numbers.pop(digest),))

    # ---- names -------------------------------------------------------------------------------------

    def name(self, adapter: Adapter) -> None:
        """Records the content of a name, unless a newer one is known: the next coordinator reads it."""
        if adapter.version >= self._known.get(adapter.name, adapter).version:
            self._known[adapter.name] = adapter

    def forget(self, name: str) -> None:
        """Forgets a name, and unloads contents that have no name and no chunk."""
        self._known.pop(name, None)
        named = {adapter.digest for adapter in self._known.values()}
        for digest in [one for one in self._numbers if one not in named and not self._used[one]]:
            self._drop(digest)

    def known(self) -> tuple[Adapter, ...]:
        return tuple(self._known.values())

    # ---- chunks ------------------------------------------------------------------------------------

    def admits(self, chunk: ChunkRequest) -> bool:
        """Returns whether a new chunk may run at once: it has no adapter, or no chunk waits and its adapter has a
        slot.
        """
        return chunk.adapter is None or not self.slots or (not self._waiting and self._has_slot(chunk.adapter))

    def _has_slot(self, adapter: Adapter) -> bool:
        return adapter.digest in +self._used or len(+self._used) < self.slots

    def wait(self, chunk: ChunkRequest, submitted_s: float) -> None:
        """Keeps a chunk until `admitted` yields it."""
        self._waiting.append((chunk, submitted_s))

    def admitted(self) -> Iterator[tuple[ChunkRequest, float]]:
        """Yields the chunks that may run now, with their times; take each before the next."""
        while self._waiting and self._has_slot(self._waiting[0][0].adapter):
            yield self._waiting.popleft()

    def withdraw(self, chunk_id: str) -> tuple[ChunkRequest, float] | None:
        """Removes a waiting chunk and returns it, or None if it does not wait."""
        found = next((one for one in self._waiting if one[0].chunk_id == chunk_id), None)
        if found is not None:
            self._waiting.remove(found)
        return found

    def waiting(self) -> list[str]:
        return [chunk.chunk_id for chunk, _ in self._waiting]

    def take(self, chunk: ChunkRequest) -> None:
        """Loads a chunk's adapter and keeps it until `free`. Raises AdapterRefused, one line."""
        adapter = chunk.adapter
        if adapter is None:
            return
        try:
            self.load(adapter.path, adapter.digest)
        except AdapterRefused as error:
            raise AdapterRefused(f"adapter {adapter.name!r}, version {adapter.version}: {error}") from error
        self.name(adapter)
        self._used[adapter.digest] += 1

    def free(self, chunk: ChunkRequest) -> None:
        """Records that a chunk that was taken has ended."""
        if chunk.adapter is not None:
            self._used[digest_of(chunk.adapter)] -= 1
