"""A draft model's vLLM engine and its samples; a plain object for a single thread (the server's).

A sample keeps one vLLM request while its drafts are right. When its window is full the request is paused, with its KV.
After a wrong token, or once the verifier has overtaken it, a new request starts from the confirmed context, mostly
found in the prefix cache. A context in computation is finished even if tokens are confirmed meanwhile, so a late
drafter catches up. Invariant: no draft leaves its window. Each sample is drawn with the noise given at its opening
(`deployments.vllm_exact.sampler`). All requests together fit into the KV cache, in the order of opening; the other
samples wait.
"""

import time
from collections import Counter
from collections.abc import Hashable

import numpy as np

from tailrace.deployments.drafter.session import Session
from tailrace.deployments.drafter.wire import Confirm, Guess, Open, Stepped
from tailrace.deployments.vllm_exact.engine_config import EngineConfig
from tailrace.deployments.vllm_exact.launch import launch
from tailrace.deployments.vllm_exact.pause import is_paused, pause, resume
from tailrace.deployments.vllm_exact.requests import Requests
from tailrace.policies.models.step_cost_estimator import StepCostEstimator
from tailrace.policies.protocol.actions import DraftMode

Key = tuple[Hashable, str]
"""Peer (an engine), and its name for the sample."""

REHEARSED = (1, 4, 16)
"""Batch sizes rehearsed before the first sample, to compile kernels and to measure the cost of a step."""

REHEARSED_TOKENS = 8


class Sessions:
    """All samples of one draft model. `engine`: vLLM's LLMEngine in this process; `requests`: its requests."""

    def __init__(self, engine, requests: Requests, max_model_len: int):
        self._engine, self._requests, self._max_model_len = engine, requests, max_model_len
        self._sessions: dict[Key, Session] = {}
        self._by_request: dict[str, Key] = {}  # by the name of its outputs
        self._counts: Counter[str] = Counter()
        self._times = StepCostEstimator()
        self.stepped: Stepped | None = None  # the last step, if each sample got one token in it

    @classmethod
    def launched(cls, config: EngineConfig, rank: int) -> "Sessions":
        """Builds the engine (5 to 10 s). Raises vLLM's own error on a bad model folder."""
        engine = launch(config, rank)
        sessions = cls(engine, Requests(engine), engine.vllm_config.model_config.max_model_len)
        sessions._rehearse()
        return sessions

    # ---- messages from verifiers -------------------------------------------------------------------

    def open(self, peer: Hashable, wish: Open) -> None:
        """Starts drafting for this sample, or changes its mode and end if it is open already.

        Raises ValueError, one line, if it cannot be drafted for.
        """
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

    def confirm(self, peer: Hashable, message: Confirm) -> None:
        """Takes the verifier's tokens. Raises KeyError if the sample is not open, ValueError if tokens are missing."""
        session = self._sessions[peer, message.name]
        known = session.window.confirmed
        judged = session.window.confirm(message.start, message.tokens)
        session.tokens += message.tokens[known - message.start :]
        session.used_s = time.monotonic()
        if session.window.confirmed > known:
            session.late = session.sent != known
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
        """Ends this sample; unknown names are ignored."""
        session = self._sessions.pop((peer, name), None)
        if session is not None:
            self._counts["stopped_before_a_guess"] += session.sent < 0
            self._drop(session)
            self._share_kv()

    def forget(self, idle_s: float) -> None:
        """Ends the samples without a message for `idle_s` seconds: their engine is gone."""
        until_s = time.monotonic() - idle_s
        for peer, name in [key for key, session in self._sessions.items() if session.used_s < until_s]:
            self.stop(peer, name)

    # ---- drafting ----------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """True if a step would draft something."""
        return any(session.window.room and session.fits for session in self._sessions.values())

    def step(self) -> list[tuple[Hashable, Guess]]:
        """Drafts one more token for each sample with room. Returns the guesses to send, each with its peer."""
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
        self.stepped = None
        if decoding and len(outputs) == decoding:
            self._times.record(decoding, took_s)
            self.stepped = Stepped(decoding, int(took_s * 1e6))
        return self._guesses()

    def _turn(self, session: Session, wish: Open) -> None:
        """Changes the mode and the end. A request with another end is dropped."""
        end, session.coupled = min(wish.end, self._max_model_len), wish.coupled
        if end != session.window.end:
            self._drop(session)
        session.window.turn(end, DraftMode(wish.window, wish.coupled))

    def _share_kv(self) -> None:
        """Reserves KV for the maximum need of each sample, in the order of opening; the others have no request."""
        free_blocks = self._requests.kv_blocks
        for session in self._sessions.values():
            max_tokens = min(len(session.tokens) + session.window.ahead, session.window.end) + 1
            need_blocks = -(-max_tokens // self._requests.block_tokens)
            session.fits = need_blocks <= free_blocks
            if session.fits:
                free_blocks -= need_blocks
            else:
                self._drop(session)

    def _ready(self, key: Key, session: Session) -> None:
        """Starts or resumes its request if there is room to draft, else pauses it."""
        window = session.window
        if session.request is not None:
            (resume if window.room else pause)(session.request)
        elif window.room:
            self._counts["requests"] += 1
            session.name = f"{self._counts['requests']} {session.chunk.chunk_id}"
            context = np.array(session.tokens + window.guess, np.int32)
            max_tokens = window.end - len(context)
            try:
                session.request = self._requests.add(session.name, session.chunk, context, max_tokens, None)
            except ValueError:  # a token unknown to this model: the sample continues without drafts
                window.stopped = True
                self._counts["refused"] += 1
            else:
                self._by_request[session.name], session.at = key, len(context)
        if session.computing:
            session.used_s = time.monotonic()

    def _decoding(self) -> int:
        """Returns the number of samples in the next step, one token each, or 0 if the step prefills."""
        running = [s.request for s in self._sessions.values() if s.request is not None and not is_paused(s.request)]
        return len(running) if all(request.num_output_tokens for request in running) else 0

    def _take(self, output) -> None:
        """Takes the next token of a sample.

        There is no room for it if vLLM preempted a paused request. A request overtaken during its prefill starts again,
        and a coupled verifier receives a guess without tokens: the drafter will soon have some.
        """
        key = self._by_request.get(output.request_id)
        if key is None:
            return
        session, tokens = self._sessions[key], list(output.outputs[0].token_ids)
        overtaken = session.at != session.window.reached
        if overtaken:
            self._counts["behind"] += 1
            session.fresh = session.coupled
        elif fits := len(tokens) <= session.window.room:
            session.window.draft(tokens, output.finished)
            session.at += len(tokens)
            session.fresh = True
            self._counts["drafted"] += len(tokens)
        if output.finished or overtaken or not fits:
            self._drop(session)

    def _guesses(self) -> list[tuple[Hashable, Guess]]:
        """Returns the guesses to send: after every token to a verifier that does not wait, else in whole windows."""
        guesses = []
        for (peer, name), session in self._sessions.items():
            window = session.window
            if session.fresh and not (session.coupled and window.room and not session.late):
                guess = Guess(name, window.confirmed, list(window.guess), session.tested, session.accepted)
                guesses.append((peer, guess))
                session.fresh = False
                session.sent = window.confirmed if window.guess else session.sent
        return guesses

    def _drop(self, session: Session) -> None:
        """Aborts its request, if any, and discards the record kept for it."""
        if session.request is None:
            return
        request, session.request = session.request, None
        del self._by_request[session.name]
        if not request.is_finished():
            self._requests.abort(request.request_id)
        self._engine.collective_rpc("take_record", args=(request.request_id, 0, 0))

    def _rehearse(self) -> None:
        """Drafts for made-up samples."""
        context = np.zeros(2 * REHEARSED_TOKENS, np.int32)
        for count in REHEARSED:
            for number in range(count):
                end = len(context) + REHEARSED_TOKENS
                wish = Open(
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
                )
                self.open("", wish)
            while self.busy:
                self.step()
            for number in range(count):
                self.stop("", str(number))
        self._engine.reset_prefix_cache()
        self._counts.clear()

    @property
    def step_cost(self) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
        """Returns the measured cost of a step as (samples, seconds), or None if nothing was measured."""
        cost = self._times.cost()
        return None if cost is None else (cost.tokens, cost.seconds)

    def counts(self) -> dict[str, int]:
        """Returns counters since the start, and current sizes.

        Since the start: samples; tokens drafted, accepted and wasted; rejections in all and by wasted tokens
        (`wasted.N`); samples stopped before any guess was sent (`stopped_before_a_guess`); contexts computed too late
        (counter `behind` of overtaken requests); steps and their microseconds. Now: open samples, those of them with a
        guess sent (`joined`), and those without KV.
        """
        sessions = self._sessions.values()
        now = {"joined": sum(s.sent >= 0 for s in sessions), "without_kv": sum(not s.fits for s in sessions)}
        return dict(self._counts) | now | {"open": len(sessions)}

    def close(self) -> None:
        self._engine.engine_core.shutdown()
