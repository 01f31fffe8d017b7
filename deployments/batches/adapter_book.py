"""The adapters that requests may name, and the content that each name refers to.

Invariant: a sample keeps, for all its chunks, the content that its adapter's name had when the sample arrived, so its
moves and copies agree. A name's version grows with each new content. Kept by `AdapterLoads`, read by `LiveBatches` and
`OpenSessions`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from tailrace.deployments.batches.prompts import Prepared
from tailrace.deployments.messages.adapters import Adapter
from tailrace.deployments.messages.message import quoted
from tailrace.deployments.messages.rollout import Rejected, RejectedBy


class AdapterBook:
    """Adapters by name. `bound` resolves the adapter of a prompt."""

    def __init__(self) -> None:
        self._named: dict[str, Adapter] = {}
        self._versions: dict[str, int] = {}  # the last version of each name, dropped names included

    def all(self) -> tuple[Adapter, ...]:
        return tuple(self._named[name] for name in sorted(self._named))

    def get(self, name: str) -> Adapter | None:
        return self._named.get(name)

    def take(self, name: str, digest: str, path: str) -> Adapter:
        """Binds `name` to this content. Returns the adapter with its version."""
        known = self._named.get(name)
        version = known.version if known and known.digest == digest else self._versions.get(name, 0) + 1
        self._versions[name] = version
        self._named[name] = Adapter(name, version, digest, path)
        return self._named[name]

    def drop(self, name: str) -> None:
        self._named.pop(name, None)

    def adopt(self, found: Iterable[Adapter]) -> list[Adapter]:
        """Takes adapters that replicas know from an earlier coordinator, the highest version of each name.

        A name that this coordinator has bound already keeps its content, which is newer. Returns the adapters that get
        a higher version for that reason.
        """
        own, raised = dict(self._named), {}
        for adapter in found:
            if adapter.version >= self._versions.get(adapter.name, 0) and adapter != own.get(adapter.name):
                name, self._versions[adapter.name] = adapter.name, adapter.version
                self._named[name] = adapter
                if name in own:
                    self._versions[name] += 1
                    self._named[name] = raised[name] = own[name]._replace(version=self._versions[name])
        return list(raised.values())

    def bound(self, prepared: Prepared, min_versions: Mapping[str, int]) -> Prepared | Rejected:
        """Returns the prompt with the present content of its adapter, or Rejected if there is none. `min_versions`:
        minimum version by name; a new coordinator may not know the newest.
        """
        name = prepared.group.adapter
        if name is None:
            return prepared
        if name not in self._named:
            names = ", ".join(sorted(self._named)) or "none"
            reason = f"adapter {quoted(name)} is not loaded (loaded: {names}); call load_adapter first"
            return Rejected(reason=f"prompt {quoted(prepared.group.prompt_id)}: {reason}", by=RejectedBy.ADAPTER)
        present, wanted = self._named[name], min_versions.get(name, 0)
        if present.version < wanted:
            reason = f"adapter {quoted(name)} is version {present.version} here, not {wanted}; call load_adapter again"
            return Rejected(reason=f"prompt {quoted(prepared.group.prompt_id)}: {reason}", by=RejectedBy.ADAPTER)
        return replace(prepared, adapter=present)
