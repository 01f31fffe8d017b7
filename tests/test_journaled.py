"""What a run's journal tells, held against a core that was told so."""

from tailrace.app.verification.journaled import Journaled
from tailrace.deployments.coordinator.journal import JournaledCore
from tailrace.policies.families.registry import Policies
from tailrace.policies.protocol import events as ev

POLICIES = Policies(placement="round_robin", chunking={"type": "fixed", "chunk_tokens": 20})
