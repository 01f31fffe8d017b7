"""Rules that an answer keeps, read from its request and its tokens alone, without the code that enforces them.

`broken` is called for each answered odd request.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from tailrace.deployments.messages.sampling import SamplingParams
from tailrace.lab.fuzz.engine.entry import OddSample
from tailrace.lab.fuzz.engine.values import EOS, VOCABULARY
from tailrace.policies.protocol.events import ChunkEnd

Decode = Callable[[Sequence[int]], str]
Encode = Callable[[str], list[int]]


def broken(sample: OddSample, decode: Decode, encode: Encode, context_tokens: int) -> str | None:
    """Returns the first rule that an answer breaks, in one line, or None. `context_tokens`: max_model_len."""
    return next(_broken(sample, decode, encode, context_tokens), None)


def _broken(sample: OddSample, decode: Decode, encode: Encode, context_tokens: int) -> Iterator[str]:
    yield from _numbers(sample)
    if any(not 0 <= token < VOCABULARY for token in sample.tokens):
        return
    end = sample.results[-1].end
    whole = sample.chunk.max_tokens, context_tokens - len(sample.chunk.token_ids)
    if end is ChunkEnd.LENGTH and len(sample.tokens) != min(whole):
        yield f"max_tokens: {len(sample.tokens)} tokens and end LENGTH, of {min(whole)}"
    if end is ChunkEnd.ABORTED and not sample.given_up:
        yield "it was aborted, and its driver had not left"
    if sample.chunk.answer_start != len(sample.chunk.token_ids):
        return  # the answer has begun before: its rules look at tokens that are not here
    if sample.chunk.forced is None:
        yield from _drawn_by_the_rules(sample, encode)
        yield from _ends(sample, end, decode)
        yield from _form(sample, end, decode)
    else:
        forced = [*np.asarray(sample.chunk.forced).tolist(), EOS][: len(sample.tokens)]
        if sample.tokens != forced:
            yield f"forced: {sample.tokens}, not {forced}"


def _numbers(sample: OddSample) -> Iterator[str]:
    """Yields faults in the numbers of every piece: each token has a logprob, which is not above 0 except by rounding.

    Logprobs of drawn tokens are finite; a replayed token may be one that its rules exclude.
    """
    sampling, is_drawn = sample.chunk.sampling, sample.chunk.forced is None
    for result in sample.results:
        tokens = result.token_ids
        for name in ("logprobs", "raw_logprobs"):
            values = getattr(result, name)
            if len(values) != len(tokens):
                yield f"{name}: {len(values)} for {len(tokens)} tokens"
            elif np.isnan(values).any() or (values > 1e-4).any() or (is_drawn and np.isinf(values).any()):
                yield f"{name}: {values.tolist()} of tokens {tokens.tolist()}"
        if (outside := [token for token in tokens.tolist() if not 0 <= token < VOCABULARY]) != []:
            yield f"token {outside[0]} is not in the vocabulary"
        yield from _extras(result, sampling)


def _extras(result, sampling: SamplingParams) -> Iterator[str]:
    count = len(result.token_ids)
    if sampling.top_logprobs and len(result.top_logprobs) != count:
        yield f"top_logprobs: {len(result.top_logprobs)} for {count} tokens"
    for top in result.top_logprobs:
        if any(math.isnan(value) or value > 1e-4 for _, value in top):
            yield f"top_logprobs: {top}"
    if sampling.sampling_mask and len(result.sampling_mask) != count:
        yield f"sampling_mask: {len(result.sampling_mask)} for {count} tokens"
    for token, mask in zip(result.token_ids.tolist(), result.sampling_mask, strict=False):
        if token not in mask:
            yield f"sampling_mask: token {token} is not in its mask {mask}"
    if result.prompt_logprobs is not None:
        values = result.prompt_logprobs.logprobs
        if any(math.isnan(value) or value > 1e-4 for value in values):
            yield f"prompt_logprobs: {values}"


def _drawn_by_the_rules(sample: OddSample, encode: Encode) -> Iterator[str]:
    """Yields tokens that are not allowed, and bad words. A token of bias -100 is not banned: it is unlikely."""
    sampling, tokens = sample.chunk.sampling, sample.tokens
    if sampling.allowed_token_ids is not None and (strange := set(tokens) - set(sampling.allowed_token_ids)):
        yield f"allowed_token_ids: it has {sorted(strange)}"
    for word in sampling.bad_words or ():
        banned = encode(word.lstrip())  # as vLLM reads it
        if any(tokens[at : at + len(banned)] == banned for at in range(len(tokens) if banned else 0)):
            yield f"bad_words: it has {word!r}, tokens {banned}"


def _ends(sample: OddSample, end: ChunkEnd, decode: Decode) -> Iterator[str]:
    """Yields ends that come too early or too late: the first token or text that ends an answer is its last one."""
    sampling, tokens = sample.chunk.sampling, sample.tokens
    stops = set(sampling.stop_token_ids or ()) | (set() if sampling.ignore_eos else {EOS})
    early = [at for at, token in enumerate(tokens) if token in stops and at >= sampling.min_tokens]
    if early and early[0] != len(tokens) - 1:
        yield f"stop_token_ids: token {tokens[early[0]]} at {early[0]} of {len(tokens)} did not end it"
    for stop in sampling.stop or ():
        if stop and "\ufffd" not in stop and stop in decode(tokens[sampling.min_tokens : -1]):
            yield f"stop: {stop!r} is in the text before its last token"
    is_stop = bool(early) or any(stop in decode(tokens) for stop in sampling.stop or ())
    if end is ChunkEnd.STOP and not is_stop:
        cause = "min_tokens" if tokens and tokens[-1] in stops else "no rule"
        yield f"{cause}: it ended with STOP; its tokens are {tokens}"


def _form(sample: OddSample, end: ChunkEnd, decode: Decode) -> Iterator[str]:
    """Yields breaches of forms that need no compiler: choices, and JSON that parses."""
    form = sample.chunk.sampling.structured_outputs
    if form is None:
        return
    text, sampling = decode(sample.tokens), sample.chunk.sampling
    is_whole = end is ChunkEnd.STOP and not (sampling.stop or sampling.stop_token_ids)
    if form.choice is not None and not sampling.stop_token_ids:
        known = text if is_whole else text.rstrip("\ufffd")
        if not any(choice == known if is_whole else choice.startswith(known) for choice in form.choice):
            yield f"structured_outputs.choice: it is {text!r}"
    if is_whole and (form.json_schema is not None or form.json_object):
        try:
            json.loads(text)
        except ValueError:
            yield f"structured_outputs.json: {text!r} is no JSON"
