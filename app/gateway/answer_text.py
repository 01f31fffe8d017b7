"""Texts of answers, whole or in pieces, with or without the names of special tokens."""

from functools import partial

from tailrace.app.gateway.stream_text import StreamText
from tailrace.deployments.batches.prompts import Prompts
from tailrace.deployments.constraints.stop_texts import cut
from tailrace.deployments.messages.rollout import SampleResult, SamplingParams
from tailrace.policies.protocol.actions import SampleEnd


def text_of(sample: SampleResult, prompts: Prompts, special: bool) -> str:
    """An ended sample's text, without the stop that ended it. `special`: with the names of special tokens."""
    if not special:
        return sample.text
    decode = partial(prompts.decode, special=True)
    if isinstance(sample.stop_reason, str):
        return cut(sample.token_ids, (sample.stop_reason,), decode)[0]
    return decode(sample.token_ids[:-1] if sample.finish_reason is SampleEnd.STOP else sample.token_ids)


def stream_text(prompts: Prompts, sampling: SamplingParams, special: bool) -> StreamText:
    """The same text, piece by piece."""
    return StreamText(partial(prompts.decode, special=special), sampling.stop)
