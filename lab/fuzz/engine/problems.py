"""Kinds of problems that a round may show, by the words of the report."""

LOST, LATE, MATE, RULE, WORDS, RAISED, RETRIED, TRACE, GROWTH = (
    "engine lost",
    "no answer in time",
    "a mate differs",
    "a rule is broken",
    "a refusal's words",
    "the entry raises",
    "an error that is tried again elsewhere",
    "a traceback or a flood of lines",
    "memory grows",
)
FATAL = LOST, LATE
"""Kinds after which the next round needs a new engine."""
