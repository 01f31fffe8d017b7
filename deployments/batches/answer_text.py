"""The text of an ended sample, and the stop that ended it. Coordinator and drivers share this rule."""

from collections.abc import Callable, Sequence

from tailrace.deployments.constraints.stop_texts import cut
from tailrace.deployments.results.later_text import TextRule


def text_of(
    token_ids: Sequence[int], rule: TextRule, decode: Callable[[list[int]], str]
) -> tuple[str, int | str | None]:
    """Returns the text before the stop text or stop token that ended the sample, and that stop; None for an end of
    sequence.
    """
    token_ids = list(token_ids)
    if not rule.stopped:
        return decode(token_ids), None
    text, stop = cut(token_ids, rule.stop, decode) if rule.stop else ("", None)
    if stop is not None:
        return text, stop
    last = token_ids[-1] if token_ids else None
    return decode(token_ids[:-1]), last if last in rule.stop_token_ids else None
