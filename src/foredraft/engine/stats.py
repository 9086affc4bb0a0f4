"""What a request and the engine count: steps, drafts, acceptance, and where a step's time went."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter


@dataclass
class AcceptanceStats:
    """Counts over target forwards of decoding requests; every ratio is derived.

    `num_steps` counts target forwards that emitted tokens, `num_emitted_tokens` what they emitted, recovered or bonus
    token included. `verified_per_position[k]` counts the times that draft position k was verified (all positions
    before it were accepted). `steps_per_draft_length[n]` counts the steps in which n draft tokens were verified.
    """

    num_steps: int = 0
    num_emitted_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    verified_per_position: list[int] = field(default_factory=list)
    steps_per_draft_length: list[int] = field(default_factory=list)

    def record(self, num_draft: int, num_accepted: int, num_emitted: int) -> None:
        """Adds one step of one request: `num_draft` proposed, `num_accepted` of them right, `num_emitted` kept."""
        self.num_steps += 1
        self.num_emitted_tokens += num_emitted
        self.num_draft_tokens += num_draft
        self.num_accepted_tokens += num_accepted
        self.steps_per_draft_length += [0] * (num_draft + 1 - len(self.steps_per_draft_length))
        self.steps_per_draft_length[num_draft] += 1
        missing = num_draft - len(self.verified_per_position)
        if missing > 0:
            self.verified_per_position += [0] * missing
            self.accepted_per_position += [0] * missing
        for position in range(min(num_accepted + 1, num_draft)):
            self.verified_per_position[position] += 1
        for position in range(num_accepted):
            self.accepted_per_position[position] += 1

    def add(self, other: AcceptanceStats) -> None:
        """Adds the counts of `other`."""
        self.num_steps += other.num_steps
        self.num_emitted_tokens += other.num_emitted_tokens
        self.num_draft_tokens += other.num_draft_tokens
        self.num_accepted_tokens += other.num_accepted_tokens
        self.verified_per_position = _summed(self.verified_per_position, other.verified_per_position)
        self.accepted_per_position = _summed(self.accepted_per_position, other.accepted_per_position)
        self.steps_per_draft_length = _summed(self.steps_per_draft_length, other.steps_per_draft_length)

    @property
    def mean_acceptance_length(self) -> float:
        """τ: tokens emitted per target forward, bonus or correction included; 0 before the first step."""
        return self.num_emitted_tokens / self.num_steps if self.num_steps else 0.0

    @property
    def mean_draft_length(self) -> float:
        """Draft tokens verified per target forward of a request; 0 before the first step."""
        return self.num_draft_tokens / self.num_steps if self.num_steps else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted draft tokens / draft tokens proposed to verification; 0 when nothing was drafted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def acceptance_rate_per_position(self) -> list[float]:
        """Accepted at k / verified at k, k = 0 first."""
        pairs = zip(self.accepted_per_position, self.verified_per_position, strict=True)
        return [accepted / verified if verified else 0.0 for accepted, verified in pairs]


def _summed(left: list[int], right: list[int]) -> list[int]:
    width = max(len(left), len(right))
    return [sum(pair) for pair in zip(_padded(left, width), _padded(right, width), strict=True)]


def _padded(counts: list[int], width: int) -> list[int]:
    return counts + [0] * (width - len(counts))


PHASES = ("schedule", "draft", "forward", "sample", "commit")


@dataclass
class StepTimes:
    """Seconds by phase of the step, summed over steps.

    `forward` is the target model alone; `sample` turns logits into tokens and verifies; `schedule` and `commit` are
    the engine's own Python.
    """

    num_steps: int = 0
    schedule: float = 0.0
    draft: float = 0.0
    forward: float = 0.0
    sample: float = 0.0
    commit: float = 0.0

    @property
    def total(self) -> float:
        return sum(getattr(self, phase) for phase in PHASES)

    @property
    def outside_models(self) -> float:
        """Seconds spent neither in the target's forward nor in drafting."""
        return self.schedule + self.sample + self.commit

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        """Adds the time of the `with` body to `phase`."""
        start = perf_counter()
        try:
            yield
        finally:
            setattr(self, phase, getattr(self, phase) + perf_counter() - start)
