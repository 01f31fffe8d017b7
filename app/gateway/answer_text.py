"""Texts of answers, whole or in pieces, with or without the names of special tokens and the stop that ended them."""

from functools import partial

from tailrace.app.gateway.requests import Answered
from tailrace.app.gateway.stream_text import StreamText
from tailrace.deployments.batches.prompts import Prompts
from tailrace.deployments.constraints.stop_texts import cut
from tailrace.deployments.messages.rollout import SampleResult, SamplingParams
from tailrace.policies.protocol.actions import SampleEnd


def text_for(request: Answered, sample: SampleResult, prompts: Prompts) -> str:
    """Returns an ended sample's text in the form that the request wants."""
    return text_of(sample, prompts, not request.skip_special_tokens, request.include_stop_str_in_output)


def text_of(sample: SampleResult, prompts: Prompts, special: bool, with_stop: bool = False) -> str:
    """Returns an ended sample's text. `special`: with the names of special tokens; `with_stop`: with the stop that
    ended it, text or token.
    """
    if not (special or with_stop):
        return sample.text
    decode = partial(prompts.decode, special=special)
    if isinstance(sample.stop_reason, str):
        text = cut(sample.token_ids, (sample.stop_reason,), decode)[0] if special else sample.text
        return text + sample.stop_reason if with_stop else text
    if with_stop and sample.finish_reason is SampleEnd.STOP:
        return decode(sample.token_ids)
    if not special:
        return sample.text
    return decode(sample.token_ids[:-1] if sample.finish_reason is SampleEnd.STOP else sample.token_ids)


def stream_text(prompts: Prompts, sampling: SamplingParams, special: bool) -> StreamText:
    """Returns the same text, piece by piece."""
    return StreamText(partial(prompts.decode, special=special), sampling.stop)
