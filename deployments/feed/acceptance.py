"""Draft tokens of all ended chunks: drafted and accepted by source, and how often each position was accepted.

Written by the coordinator as chunks end, some microseconds each; read by `Looks`.
"""

from typing import Any

from tailrace.deployments.messages.drafts import DraftReport, by_source


class Acceptance:
    """Counts since the coordinator's start."""

    def __init__(self):
        self._total = DraftReport.none(0)

    def add(self, report: DraftReport | None) -> None:
        if report is not None:
            self._total.add(report)

    def row(self) -> dict[str, Any]:
        """Returns the counts as a row. `positions`: number of verifications that accepted more than j tokens, from j =
        0 on. Empty without drafts.
        """
        total = self._total
        if not total.verifications:
            return {}
        return {
            "verifications": total.verifications,
            "drafted": by_source(total.drafted),
            "accepted": by_source(total.accepted),
            "positions": total.accepted_at.tolist(),
            "model_tested": total.model_tested,
            "model_accepted": total.model_accepted,
        }
