"""A draft model's vLLM engine, and the samples that it drafts for; a plain object for a single thread (the server's).

A sample is one request of vLLM's for as long as its drafts prove right: when its window is full the request is held
back, with its KV. After a wrong token, or when the verifier has overtaken it, another one begins from the confirmed
context, most of which the prefix cache knows; but a context that is being computed is computed to its end, whatever is
confirmed meanwhile, so that a late drafter catches up. Invariant: no draft leaves its window, each sample is drawn with
the noise it was opened with (`deployments.vllm_exact.sampler`), and all requests together fit into the KV cache:
samples that were opened first have theirs, the others wait.
"""

import time
from collections import Counter
from collections.abc import Hashable

import numpy as np

from tailrace.deployments.drafter.session import Session
from tailrace.deployments.drafter.wire import Confirm, Guess, Open
from tailrace.deployments.vllm_exact.engine_config import EngineConfig
from tailrace.deployments.vllm_exact.launch import launch
from tailrace.deployments.vllm_exact.pause import is_paused, pause, resume
from tailrace.deployments.vllm_exact.requests import Requests
from tailrace.policies.models.step_cost_estimator import StepCostEstimator
from tailrace.policies.protocol.actions import DraftMode

Key = tuple[Hashable, str]
"""Who asks, and what they call the sample."""

REHEARSED = (1, 4, 16)
"""Samples drafted for at once before the first one comes: kernels are compiled, and a step's cost is known."""

REHEARSED_TOKENS = 8


class Sessions:
    """`engine`: vLLM's LLMEngine in this process, and `requests` its requests."""

    def __init__(self, engine, requests: Requests, max_model_len: int):
        self._engine, self._requests, self._max_model_len = engine, requests, max_model_len
        self._sessions: dict[Key, Session] = {}
        self._by_request: dict[str, Key] = {}  # by the name of their outputs
        self._counts: Counter[str] = Counter()
        self._times = StepCostEstimator()

    @classmethod
    def launched(cls, config: EngineConfig, rank: int) -> "Sessions":
        """Builds the engine (5 to 10 s); raises what vLLM raises on a bad model folder."""
        engine = launch(config, rank)
        sessions = cls(engine, Requests(engine), engine.vllm_config.model_config.max_model_len)
        sessions._rehearse()
        return sessions

    # ---- what verifiers tell it --------------------------------------------------------------------

    def open(self, peer: Hashable, wish: Open) -> None:
        """Draft for this sample from now on, or, where that is done already, in this way; ValueError, one line, when it
        cannot be."""
        if (known := self._sessions.get((peer, wish.name))) is not None and known.extends_to(wish) and wish.window:
            self._turn(known, wish)
            self.confirm(peer, Confirm(wish.name, len(known.tokens), wish.tokens[len(known.tokens) :].tolist()))
            return
        self.stop(peer, wish.name)
        session = Session(wish, self._max_model_len)
        reason = self._requests.refusal(session.chunk) or (wish.window < 1 and f"a window of {wish.window}")
        if reason:
            raise ValueError(f"sample {wish.name}: {reason}")
        self._sessions[peer, wish.name] = session
        self._counts["samples"] += 1

    def confirm(self, peer: Hashable, told: Confirm) -> None:
        """Its verifier has gone on. KeyError for a sample that was not opened, ValueError where tokens lack."""
        session = self._sessions[peer, told.name]
        known = session.window.confirmed
        judged = session.window.confirm(told.start, told.tokens)
        session.tokens += told.tokens[known - told.start :]
        session.used_s = time.monotonic()
        if session.window.confirmed > known:
            session.late = session.told != known
        session.accepted += judged.accepted
        session.tested += judged.accepted + (judged.wasted is not None)
        self._counts["accepted"] += judged.accepted
        if judged.wasted is not None:
            self._counts["rejections"] += 1
            self._counts["wasted"] += judged.wasted
            self._counts[f"wasted.{judged.wasted}"] += 1
        if not judged.resumes and not (session.computing and judged.wasted is None):
            self._counts["resumed"] += 1
            self._drop(session)

    def stop(self, peer: Hashable, name: str) -> None:
        """Nothing more for this sample; unknown ones are ignored."""
        session = self._sessions.pop((peer, name), None)
        if session is not None:
            self._counts["stopped_before_a_guess"] += session.told < 0
            self._drop(session)
            self._share_kv()

    def forget(self, idle_s: float) -> None:
        """Stop whatever nobody has asked for in so many seconds: its engine is gone."""
        until_s = time.monotonic() - idle_s
        for peer, name in [key for key, session in self._sessions.items() if session.used_s < until_s]:
            self.stop(peer, name)

    # ---- what it does ------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether a step would draft something."""
        return any(session.window.room and session.fits for session in self._sessions.values())

    def step(self) -> list[tuple[Hashable, Guess]]:
        """One token more for each sample that has room; what there is to tell, and whom."""
        self._share_kv()
        for key, session in self._sessions.items():
            if session.fits:
                self._ready(key, session)
        decoding = self._decoding()
        began_s = time.monotonic()
        outputs = self._engine.step()
        took_s = time.monotonic() - began_s
        self._counts["steps"] += 1
        self._counts["step_us"] += int(took_s * 1e6)
        for output in outputs:
            self._take(output)
        if decoding and len(outputs) == decoding:
            self._times.record(decoding, took_s)
        return self._told()

    def _turn(self, session: Session, wish: Open) -> None:
        """It is drafted for in another way. A request that would end too soon is dropped."""
        end, session.coupled = min(wish.end, self._max_model_len), wish.coupled
        if end != session.window.end:
            self._drop(session)
        session.window.turn(end, DraftMode(wish.window, wish.coupled))

    def _share_kv(self) -> None:
        """Those opened first have what they may need; the others have no request."""
        free_blocks = self._requests.kv_blocks
        for session in self._sessions.values():
            most_tokens = min(len(session.tokens) + session.window.ahead, session.window.end) + 1
            need_blocks = -(-most_tokens // self._requests.block_tokens)
            session.fits = need_blocks <= free_blocks
            if session.fits:
                free_blocks -= need_blocks
            else:
                self._drop(session)

    def _ready(self, key: Key, session: Session) -> None:
        """Its request is there and runs, if there is room to draft, and is held back if not."""
        window = session.window
        if session.request is not None:
            (resume if window.room else pause)(session.request)
        elif window.room:
            self._counts["requests"] += 1
            session.name = f"{self._counts['requests']} {session.chunk.chunk_id}"
            context = np.array(session.tokens + window.guess, np.int32)
            most = window.end - len(context)
            try:
                session.request = self._requests.add(session.name, session.chunk, context, most, None)
            except ValueError:  # a token that this model does not know: the sample continues without drafts
                window.stopped = True
                self._counts["refused"] += 1
            else:
                self._by_request[session.name], session.at = key, len(context)
        if session.computing:
            session.used_s = time.monotonic()

    def _decoding(self) -> int:
        """Samples of which the coming step computes one token each, if it prefills nothing; else 0."""
        running = [s.request for s in self._sessions.values() if s.request is not None and not is_paused(s.request)]
        return len(running) if all(request.num_output_tokens for request in running) else 0

    def _take(self, output) -> None:
        """The next token of a sample. There is no room for it where vLLM has preempted one that was held back; one that
        was overtaken while its context was computed begins again, and a verifier that takes turns hears that it is
        near.
        """
        key = self._by_request.get(output.request_id)
        if key is None:
            return
        session, tokens = self._sessions[key], list(output.outputs[0].token_ids)
        behind = session.at != session.window.reached
        if behind:
            self._counts["behind"] += 1
            session.fresh = session.coupled
        elif fits := len(tokens) <= session.window.room:
            session.window.draft(tokens, output.finished)
            session.at += len(tokens)
            session.fresh = True
            self._counts["drafted"] += len(tokens)
        if output.finished or behind or not fits:
            self._drop(session)

    def _told(self) -> list[tuple[Hashable, Guess]]:
        """A verifier that does not wait hears of every token; one that waits, of whole windows."""
        told = []
        for (peer, name), session in self._sessions.items():
            window = session.window
            if session.fresh and not (session.coupled and window.room and not session.late):
                told.append((peer, Guess(name, window.confirmed, list(window.guess), session.tested, session.accepted)))
                session.fresh = False
                session.told = window.confirmed if window.guess else session.told
        return told

    def _drop(self, session: Session) -> None:
        """Its request, if it has one, computes nothing more, and nobody takes what is kept for it."""
        if session.request is None:
            return
        request, session.request = session.request, None
        del self._by_request[session.name]
        if not request.is_finished():
            self._requests.abort(request.request_id)
        self._engine.collective_rpc("take_record", args=(request.request_id, 0, 0))

    def _rehearse(self) -> None:
        """Draft for samples that nobody has."""
        context = np.zeros(2 * REHEARSED_TOKENS, np.int32)
        for count in REHEARSED:
            for number in range(count):
                end = len(context) + REHEARSED_TOKENS
                self.open(
                    "",
                    Open(
                        name=str(number),
                        key=number,
                        temperature=1.0,
                        top_p=1.0,
                        top_k=0,
                        min_p=0.0,
                        stop_token_ids=[],
                        prompt_tokens=len(context),
                        end=end,
                        window=64,
                        coupled=False,
                        tokens=context,
                    ),
                )
            while self.busy:
                self.step()
            for number in range(count):
                self.stop("", str(number))
        self._engine.reset_prefix_cache()
        self._counts.clear()

    @property
    def step_cost(self) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
        """What a step costs by the samples drafted for, as measured: (samples, seconds)."""
        cost = self._times.cost()
        return None if cost is None else (cost.tokens, cost.seconds)

    def counts(self) -> dict[str, int]:
        """Since the start: samples, tokens drafted, accepted and wasted, rejections in all and by how many tokens each
        wasted (`wasted.N`), samples stopped before any guess was told, contexts that were computed too late (`behind`),
        steps and their microseconds. Now: samples open, of which told a guess already, of which without KV."""
        sessions = self._sessions.values()
        now = {"joined": sum(s.told >= 0 for s in sessions), "without_kv": sum(not s.fits for s in sessions)}
        return dict(self._counts) | now | {"open": len(sessions)}

    def close(self) -> None:
        self._engine.engine_core.shutdown()
