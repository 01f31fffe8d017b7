"""Routes by which every rank of a trainer publishes its part of a version: `/weights/VERSION/...`, Tailrace's own.

Each rank joins with a list of its pieces, uploads those of the answer once, in bodies that the gateway takes, and waits
for the load. Invariant: a version is committed once all pieces are there; until then the service keeps its weights. See
docs/driver.md.
"""

from typing import Annotated

from fastapi import FastAPI, Path, Query, Request
from pydantic import Field, field_validator

from tailrace.app.calls.refused import accepted
from tailrace.app.gateway.edge.fields import Listed, RequestBody
from tailrace.app.gateway.service import GatewayService
from tailrace.app.gateway.uploaded_ranks import UploadedRanks, uploads_of
from tailrace.app.http.weights_answer import told
from tailrace.deployments.coordinator.weights import MAX_VERSION
from tailrace.deployments.messages.pieces import PublishPhase, RankPart, TensorForm, TensorPiece
from tailrace.deployments.messages.roles import Role, refusal
from tailrace.deployments.staging.safetensors_header import ITEM_BYTES

Version = Annotated[int, Path(ge=1, le=MAX_VERSION)]
Sizes = tuple[Annotated[int, Field(ge=0)], ...]


class RankJoin(RequestBody):
    """`pieces`: name, type (as safetensors names it), shape of the whole, place and extent of each."""

    rank: int = Field(ge=0)
    world_size: int = Field(ge=1)
    timeout_s: float = Field(120.0, gt=0, le=3600)
    score: tuple[float, ...] = ()
    pieces: Annotated[list[tuple[str, str, Sizes, Sizes, Sizes]], Listed]
    base: tuple[int, str] | None = Field(None, description="version and digest of weights to make deltas on")

    @field_validator("pieces")
    @classmethod
    def _boxes(cls, value: list) -> list:
        for name, kind, shape, start, extent in value:
            if kind not in ITEM_BYTES or not len(shape) == len(start) == len(extent):
                raise ValueError(
                    f"{name}: give a type of safetensors, and as many sides to its shape, start and extent"
                )
        return value

    def part(self) -> RankPart:
        pieces = (TensorPiece(TensorForm(*whole), start, extent) for *whole, start, extent in self.pieces)
        return RankPart(
            world_size=self.world_size,
            node="",
            leads=False,
            timeout_s=self.timeout_s,
            pieces=tuple(pieces),
            score=self.score,
        )


class RankNamed(RequestBody):
    rank: int = Field(ge=0)


class RankFailed(RankNamed):
    """`reason`: one line."""

    reason: str


def check_trainer(http: Request) -> None:
    """Raises PermissionError for a caller below a trainer: the routes change ranks before the coordinator is asked."""
    accepted(refusal(http.scope["role"], Role.TRAINER, "publish_weights"), "publish_weights")


def add_publishing(app: FastAPI, service: GatewayService, max_body_bytes: int) -> None:
    """Adds the routes. `max_body_bytes`: see GatewayConfig; ranks are told."""
    ranks = UploadedRanks()

    @app.get("/weights/next")
    async def next_version(http: Request):
        """Return the lowest version that can be published."""
        version = await service.client(http.scope["role"]).publishing.run(PublishPhase.NEXT, 0, 0)
        return {"weight_version": str(version)}

    @app.post("/weights/{version}/join")
    async def join(version: Version, rank: RankJoin, http: Request):
        """Return the numbers of the pieces that this rank uploads, once all ranks have joined, the maximum bytes of a
        body, and whether deltas on the given base are taken.
        """
        check_trainer(http)
        client = service.client(http.scope["role"])
        plan = await ranks.join(client, version, rank.rank, rank.part(), rank.base)
        return {"upload": plan.pieces, "max_body_bytes": max_body_bytes, "deltas": plan.deltas}

    @app.post("/weights/{version}/pieces")
    async def pieces(
        version: Version,
        http: Request,
        rank: Annotated[int, Query(ge=0)],
        number: Annotated[list[Annotated[int, Field(ge=0)]], Query(description="of each part's piece")],
        checksum: Annotated[list[Annotated[str, Field(max_length=64)]], Query(description="by the rank")],
        begin: Annotated[list[int] | None, Query(description="place in the piece of the part's first byte")] = None,
        delta: Annotated[list[bool] | None, Query(description="a zstd frame of the XOR with the base's bytes")] = None,
        size: Annotated[list[int] | None, Query(description="bytes of each part, if there are more than one")] = None,
    ):
        """Write the body's parts to their places in pieces, whose bytes come in order. A checksum is that of the whole
        piece. The parts before one that is refused are written.
        """
        check_trainer(http)
        body = await http.body()
        for one in uploads_of(memoryview(body), number, checksum, begin, delta, size):
            await ranks.upload(version, rank, one)
        return {"written": number}

    @app.post("/weights/{version}/loaded")
    async def loaded(version: Version, named: RankNamed, http: Request):
        """Return once the replicas hold the version."""
        check_trainer(http)
        return told(await ranks.loaded(version, named.rank))

    @app.post("/weights/{version}/failed")
    async def failed(version: Version, given: RankFailed, http: Request):
        """End the version for all ranks, by the name of this one."""
        client = service.client(http.scope["role"])
        await client.publishing.run(PublishPhase.FAILED, version, given.rank, " ".join(given.reason.split()))
        await ranks.drop(version, given.rank)
        return {"status": "ended"}
