"""The weights that the replicas should hold, and the loads that bring them there.

Weights are a version and a digest of their content. Invariant: versions only grow, and a version has one digest, so two
contents never pass for the same weights. A replica that reports other weights than the wanted ones is asked to load,
one request at a time and with a growing pause, until it holds them. A replica that starts late therefore gets the
current weights before the core routes to it. Used by `Rollouts`.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from math import isfinite
from typing import TYPE_CHECKING

from tailrace.deployments.batches.token_log import TokenLog
from tailrace.deployments.coordinator.weight_scores import WeightScores
from tailrace.deployments.messages.chunk import WEIGHTS, EngineStats
from tailrace.deployments.messages.command import CheckWeights, LoadWeights
from tailrace.deployments.messages.errors import ChunkError, is_own_cancel, one_line
from tailrace.deployments.messages.rollout import BatchSettings, Rejected, RejectedBy, WeightsLoaded
from tailrace.deployments.messages.scores import SCORED, Score
from tailrace.policies.protocol.exactness import Exactness

if TYPE_CHECKING:  # it loads Ray, and this class needs none of it
    from tailrace.deployments.coordinator.engine_client import EngineClient

LOAD_S = 600.0
"""Maximum seconds to wait for new weights: a large model's are read from a network folder, after a chunk's next
token.
"""

MAX_VERSION = 2**32 - 1
"""Maximum weights version: keys of KV hold it in four bytes."""

MAX_DIGESTS = 1024
"""Maximum number of versions whose digests are kept, the newest; a sample lasts for a few updates."""

OTHER_WEIGHTS = -1
"""Version under which a replica joins if nothing may start on it: it holds the wanted version with another content, or
the service is paused.
"""

MAX_UNREAD = 64
"""Updates that are remembered while no replica has read any; one follows the other once it cannot be loaded."""

PAUSE_S = (0.5, 30.0)
"""Minimum and maximum seconds before a replica whose load has failed is asked again."""

SPARED_S = 12.0
"""Seconds in which replicas of a new coordinator keep older weights for batches that come back: a client renews each 5
s, and repeats a broken call sooner.
"""

REPORTED_S = 120.0
"""Maximum seconds to wait for a first report of a replica: an engine may be cut off, and another takes minutes to
load.
"""


class Weights:
    """Version 0 names the weights that the engines were started with. `digests`: digests of known versions."""

    def __init__(
        self,
        engines: "EngineClient",
        before: Callable[[], Awaitable[None]],
        exactness: Callable[[], Exactness] = lambda: "bits",
        kept: Callable[[str, int | None], bool] = lambda replica_id, version: False,
    ):
        """`before`: awaited before the target weights change. `exactness`: returns the engines' level. `kept`: returns
        whether a replica is to keep its weights until its samples have ended; the version is None if it is not read.
        """
        self.version, self.source = 0, ""
        self.digests: dict[int, str] = {}
        self.held = False  # True while the service is paused: no replica is used
        self.asleep = False  # True while the memory of weights is given back: nothing is loaded
        self.problem: str | None = None  # the error of the last load that failed
        self.scores = WeightScores(exactness)
        self.was_withdrawn = False  # until `refuse_waiting` has ended what waits for withdrawn weights
        self._confirmed = 0, ""  # version and folder of the last weights that a replica has read
        self._unread: deque[tuple[int, str]] = deque(maxlen=MAX_UNREAD)  # accepted after those, before the wanted ones
        self._engines, self._before, self._kept = engines, before, kept
        self._reported = asyncio.Event()
        self._loading: set[str] = set()
        self._spared_until_s = float("-inf")  # of the event loop's clock, see `find`
        self._pauses: dict[str, tuple[float, float]] = {}  # replica -> time of the next request, and the pause after it
        self._held: dict[str, tuple[int, str]] = {}  # replica -> version and digest, as last reported
        self._asleep: set[str] = set()  # replicas, as last reported
        self._paused_s: dict[str, float] = {}  # replica -> seconds without a token for its last load
        self._changed = asyncio.Event()

    @property
    def digest(self) -> str:
        """Digest of the wanted weights; empty until a replica has read them."""
        return self.digests.get(self.version, "")

    @property
    def is_confirmed(self) -> bool:
        """True once a replica has read the wanted weights. Without replicas an update is accepted unread."""
        return bool(self.digest)

    async def want(self, version: int, source: str, digest: str = "", score: Score = ()) -> Rejected | None:
        """Sets the target weights. Returns Rejected, and changes nothing, if they are invalid.

        Repeating the present version with its present content is no change. `digest`: the intended content's digest, if
        the caller knows it from an earlier answer; empty for any. `score`: the trainer's, or empty.
        """
        if (reason := invalid(version, source) or unlike_score(score)) or (reason := self._too_old(version)):
            return Rejected(reason=reason)
        try:
            found = await self._engines.digests(CheckWeights(source))
        except TimeoutError:
            return Rejected(reason=f"weights {source}: a replica could not look at it in time")
        except Exception as error:  # noqa: BLE001 - a replica's refusal, or an error of Ray: nothing has changed
            return Rejected(reason=str(error) or one_line(error))
        await self._before()
        wanted = {digest} - {""}
        found = found or wanted
        read = next(iter(found), "")  # without a replica the digest is unknown until the first one loads
        reason = (
            self._too_old(version) or _not_one(version, source, found | wanted) or self._other(version, source, read)
        )
        if reason:
            return Rejected(reason=reason)
        self._set(version, source, read, tuple(score))
        return None

    def _too_old(self, version: int) -> str | None:
        if version < self.version:
            return f"weights version {version} is below {self.version}; versions only grow"
        return None

    def _other(self, version: int, source: str, digest: str) -> str | None:
        """Returns why `version` cannot have this content: it is the present version, with another content. Else
        None.
        """
        is_same = digest == self.digest if digest and self.digest else source == self.source != ""
        if version != self.version or is_same:
            return None
        return f"weights version {version} is taken by other weights ({self.digest or self.source}); versions only grow"

    def _set(self, version: int, source: str, digest: str, score: Score = ()) -> None:
        if version != self.version:
            self.scores.begin()
        if score:
            self.scores.believe(score)
        if version != self.version and not self.is_confirmed:
            self._unread.append((self.version, self.source))
        self.version, self.source, self.problem = version, source, None
        self.digests[version] = self.digests.get(version) or digest
        if len(self.digests) > MAX_DIGESTS:
            del self.digests[min(self.digests)]
        self._pauses.clear()
        self._confirm()

    def _confirm(self) -> None:
        if self.is_confirmed:
            self._confirmed = self.version, self.source
            self._unread.clear()

    def _withdraw(self) -> None:
        """Returns to the weights before the wanted ones, which no replica has ever held: they were accepted while no
        replica was up. What waits for them is refused before the core is given a replica, see `refuse_waiting`.
        """
        self.digests.pop(self.version, None)
        self.problem = f"weights {self.version} are withdrawn: {self.problem}"
        self.version, self.source = self._unread.pop() if self._unread else self._confirmed
        self.was_withdrawn = True
        self._changed.set()

    def observe(self, reports: list[EngineStats]) -> None:
        """Records the weights of replicas. Adopts versions above its own: a new coordinator finds replicas that an
        earlier one has given newer weights.
        """
        for report in reports:
            if report.weights_version > self.version:
                self._set(report.weights_version, report.weights_source, report.weights_digest)
            elif report.weights_version == self.version and not self.digest:
                self.digests[self.version] = report.weights_digest
                self._confirm()
            elif self._is_sparing():
                self.digests.setdefault(report.weights_version, report.weights_digest)
        self._held = {
            one.replica_id: (OTHER_WEIGHTS, "") if WEIGHTS in one.asleep else (one.weights_version, one.weights_digest)
            for one in reports
        }
        self._asleep = {one.replica_id for one in reports if WEIGHTS in one.asleep}
        self._paused_s = {report.replica_id: report.weights_pause_s for report in reports}
        wanted = self.version, self.digest
        self.scores.observe(one for one in reports if (one.weights_version, one.weights_digest) == wanted)
        self._changed.set()
        if reports:
            self._reported.set()
        for known in set(self._pauses) - self._held.keys():
            del self._pauses[known]

    async def find(self, reports: list[EngineStats], log: TokenLog) -> None:
        """Adopts the newest weights that an earlier coordinator has loaded. Replicas keep older ones for SPARED_S, if
        samples that began with them may come back.
        """
        if await log.has_batches():
            self._spared_until_s = asyncio.get_running_loop().time() + SPARED_S
        self.observe(reports)

    def _is_sparing(self) -> bool:
        return asyncio.get_running_loop().time() < self._spared_until_s

    def loads(self, now: float) -> list[Coroutine]:
        """Returns the loads to start at `now`, in seconds of the event loop's clock."""
        if self.asleep:
            return []
        late = (name for name in self._late() if name in self._asleep or not self._keeps(name))
        return [self._load(name) for name in (*late, *self.scores.unlike) if self._is_due(name, now)]

    def known(self, report: EngineStats) -> EngineStats:
        """Returns the report as the core should see it: a replica that must not be used has OTHER_WEIGHTS as its
        version. Replicas that are set aside by their score are lost to the core, see `WeightScores`.

        No replica is used until the wanted weights are confirmed, since the core still has the version before; nor
        while the service is paused, nor if its content is not the wanted one.
        """
        other = report.weights_version == self.version and report.weights_digest != self.digest
        if other or self.held or report.asleep or not self.is_confirmed:
            return replace(report, weights_version=OTHER_WEIGHTS)
        return report

    async def reported(self) -> None:
        """Returns once a replica has reported its weights, or after REPORTED_S."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REPORTED_S):
                await self._reported.wait()

    def may_have_been(self, version: int, digest: str) -> bool:
        """Returns whether these can be the present weights or earlier ones, as far as is known here."""
        return version <= self.version and self.digests.get(version) in (None, "", digest)

    def refusal(self, batch: BatchSettings, begun: bool = False) -> Rejected | None:
        """Returns Rejected if a batch must not run under the present version, else None. `begun`: some of it is in
        flight, and that goes on under later weights, too.
        """
        wanted = batch.weights_version
        is_below = self.version < batch.lowest_weights
        if not is_below and (begun or wanted in (None, self.version)):
            return None
        wanted = batch.lowest_weights if wanted is None else wanted
        why = f" ({self.problem})" if is_below and self.problem else ""
        reason = f"the service holds weights version {self.version}, the batch wants {wanted}; update the weights first"
        return Rejected(reason=reason + why, by=RejectedBy.WEIGHTS)

    async def loaded(self) -> WeightsLoaded | Rejected:
        """Waits up to LOAD_S until every replica that reports holds the weights wanted now; or until one does, if all
        others keep theirs for a while. Returns Rejected once the service sleeps.
        """
        version = self.version
        try:
            async with asyncio.timeout(LOAD_S):
                while self.version == version and not (self.asleep or self._have_come()):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            why = f"; {self.problem}" if self.problem else ""
            reason = f"weights {version} are accepted, but after {LOAD_S:.0f} s {self._late()} do not hold them{why}"
            return Rejected(reason=f"{reason}; call again to wait on")
        if self.version != version:
            return Rejected(reason=f"weights {version} were overtaken by {self.version}")
        if self.asleep:
            return Rejected(reason=f"weights {version} are accepted, but the service sleeps; call again to load them")
        replicas = tuple(sorted(self._held.keys() - self.scores.unlike.keys() - set(self._late())))
        if self.scores.unlike and not replicas:
            return Rejected(reason=f"weights {version} are loaded, but {self.scores.problem}")
        return WeightsLoaded(
            version=version,
            digest=self.digest,
            replicas=replicas,
            paused_s={name: self._paused_s[name] for name in replicas},
            scores=self.scores.scores,
            set_aside=self.scores.unlike,
            warnings=self.scores.found,
        )

    def _late(self) -> list[str]:
        wanted = self.version, self.digest
        return sorted(name for name, held in self._held.items() if held != wanted)

    def _have_come(self) -> bool:
        late = self._late()
        return not late or (len(late) < len(self._held) and all(map(self._keeps, late)))

    def _keeps(self, replica_id: str) -> bool:
        return self._is_sparing() or self._kept(replica_id, self.version if self.is_confirmed else None)

    def _is_due(self, replica_id: str, now: float) -> bool:
        return replica_id not in self._loading and self._pauses.get(replica_id, (now, 0.0))[0] <= now

    async def _load(self, replica_id: str) -> None:
        version = self.version
        self._loading.add(replica_id)
        try:
            unlike = replica_id in self.scores.unlike
            if not (self.source or unlike or replica_id in self._asleep):  # these two know their own folder
                raise ValueError(f"it was started on other weights than version {version} of the service")
            await self._engines.ask(replica_id, LoadWeights(version, self.source, "" if unlike else self.digest))
            if unlike:
                self._pause(replica_id)
            else:
                self._pauses.pop(replica_id, None)
        except (Exception, asyncio.CancelledError) as error:  # an error of one replica; the load is repeated
            if isinstance(error, asyncio.CancelledError) and is_own_cancel():
                raise
            self._pause(replica_id)
            if version == self.version:
                self.problem = f"{replica_id}: {error}"
                if isinstance(error, ChunkError) and not self.is_confirmed:
                    self._withdraw()
        finally:
            self._loading.discard(replica_id)

    def _pause(self, replica_id: str) -> None:
        pause_s = min(PAUSE_S[1], 2 * self._pauses.get(replica_id, (0.0, PAUSE_S[0] / 2))[1])
        self._pauses[replica_id] = asyncio.get_running_loop().time() + pause_s, pause_s


def _not_one(version: int, source: str, digests: set[str]) -> str | None:
    """Returns why the digests read by replicas are not one content, or None if they are."""
    if len(digests) > 1:
        return f"weights {source}: it is not one content of version {version} ({', '.join(sorted(digests))})"
    return None


def unlike_score(score: object) -> str | None:
    """Returns why this is no score of a trainer, in one line, or None if it is one, or empty."""
    with contextlib.suppress(TypeError, OverflowError):  # something in it is no number
        if isinstance(score, tuple | list) and len(score) in (0, len(SCORED) - 1) and all(map(isfinite, score)):
            return None
    return f"score is {str(score)[:40]}; give {len(SCORED) - 1} logprobs, finite numbers as of tailrace.weights_score"


def invalid(version: object, source: object) -> str | None:
    """Returns why these cannot name weights, in one line, or None if they can."""
    if not isinstance(version, int) or isinstance(version, bool) or not 1 <= version <= MAX_VERSION:
        return f"weights version is {version!r}; give an integer from 1 to {MAX_VERSION}"
    if not isinstance(source, str) or not source:
        return f"weights folder is {source!r}; give a path"
    return None
