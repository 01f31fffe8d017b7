"""Leaves a request of vLLM out of the coming steps, with its KV kept, and lets it back in.

vLLM has no call for it, but its scheduler passes over running requests until the step that they name (vLLM 0.32,
`Scheduler.schedule`, `next_decode_eligible_step`; its async schedulers set it, which Tailrace never uses). Called on
the engine's thread, between two steps.
"""

NEVER = 1 << 62


def pause(request) -> None:
    """No step computes anything of it until it is let go; it must have been computed up to its last token."""
    request.next_decode_eligible_step = NEVER


def resume(request) -> None:
    """The next step continues with it."""
    request.next_decode_eligible_step = 0


def is_paused(request) -> bool:
    return request.next_decode_eligible_step == NEVER
