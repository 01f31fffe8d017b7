"""Pauses a request of vLLM for the next steps, with its KV kept, and resumes it.

vLLM has no call for it. Its scheduler skips a running request until the step in `next_decode_eligible_step`
(vLLM 0.32, `Scheduler.schedule`). Only its async schedulers set that field, and Tailrace never uses them.
Called on the engine's thread, between two steps.
"""

NEVER = 1 << 62


def pause(request) -> None:
    """Excludes the request from steps until `resume`. It must have been computed up to its last token."""
    request.next_decode_eligible_step = NEVER


def resume(request) -> None:
    """Includes the request in the next step."""
    request.next_decode_eligible_step = 0


def is_paused(request) -> bool:
    return request.next_decode_eligible_step == NEVER
