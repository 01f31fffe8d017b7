"""Draft windows that grow while drafts are right and fall back when they are not (HistoSpec of RhymeRL 5.4).

Invariant: each sample's window is `start_tokens` when its chunk begins, and stays between that and `max_draft_tokens`.
A member of the drafting family; called by the engine once per step.
"""

from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from tailrace.policies.models.spec_cost_model import verified
from tailrace.policies.protocol.views import DraftView


class Aimd(BaseModel):
    """HistoSpec (RhymeRL 5.4): a window of 2 tokens, 2 more when all were right, up to 32, and 2 again when not.

    Drafts rest on contexts of at least 3 tokens. They are off at batch sizes where a window of 2 would not pay at the
    acceptance seen lately: b tokens in t(b) seconds against (1 + a + a^2) b in t(3b), by measured step costs.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    type: Literal["aimd"] = "aimd"
    file_keys: ClassVar[tuple[str, ...]] = ()
    reads_classes: ClassVar[bool] = False
    by_worth: ClassVar[bool] = False
    max_draft_tokens: int = Field(32, ge=1, le=64, description="max draft tokens of a sample in a step")
    start_tokens: int = Field(2, ge=1, le=64, description="first window, and the one after a wrong token")
    grow_tokens: int = Field(2, ge=1, le=64, description="growth of the window when the whole draft was right")
    min_match_tokens: int = Field(3, ge=0, le=64, description="shortest context a draft may rest on")

    def decide(self, view: DraftView, memory: Any) -> tuple[np.ndarray, Any]:
        """Returns the windows. `memory`: int32 windows by slot."""
        if not len(view.slot):
            return np.zeros(0, np.int32), memory
        before = np.zeros(0, np.int32) if memory is None else memory
        windows = np.zeros(max(len(before), int(view.slot.max()) + 1), np.int32)
        windows[: len(before)] = before
        now = windows[view.slot]
        right = view.accepted_last >= view.drafted_last
        now = np.where(view.drafted_last > 0, np.where(right, now + self.grow_tokens, self.start_tokens), now)
        now = np.minimum(np.where(view.verifications == 0, self.start_tokens, now), self.max_draft_tokens)
        windows[view.slot] = now
        drafts = (view.match_tokens >= self.min_match_tokens) & self._pays(view)
        return np.where(drafts, np.minimum(now, view.proposed), 0).astype(np.int32), windows

    def _pays(self, view: DraftView) -> bool:
        count = len(view.slot)
        plain_s, drafting_s = view.cost.at([count, count * (1 + self.start_tokens)])
        return verified(view.acceptance, self.start_tokens + 1) * plain_s > drafting_s
