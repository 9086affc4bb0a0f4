"""Draft lengths that adapt: the most expected tokens per second of the whole batch, from measured costs.

Before drafting, running acceptance rates say how deep each request's draft is worth making; length 0 parks it. After
drafting, the proposal's confidences (or the same rates, where it has none) say how much of it is worth verifying.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from foredraft.draft.proposal import DraftProposal, SparseProbs
from foredraft.draft.rates import AcceptanceRates
from foredraft.engine.admission import best_lengths, cut_lengths
from foredraft.engine.costs import LONG_BACKLOG, CostCurve
from foredraft.engine.lengths import Draftable, StepOutcome, shortened
from foredraft.engine.parking import CAUTION, HORIZON, Parking

Floats = NDArray[np.float64]

NEGLIGIBLE = 0.02
"""Drafting that adds less than this share of a step is done for the sake of its confidences."""

CALIBRATION_RATE = 0.05
"""How fast confidences are corrected by what becomes of them."""

REST = 4
"""Steps for which nothing is weighed once no request drafts, unless the batch changes: then deciding is all that
speculation costs."""

SAVE_EVERY = 500
"""Steps between two times that the refreshed costs are kept for the next run."""


@dataclass(frozen=True)
class StepPlan:
    """What was decided for a step, and what was expected of it.

    Args:
        chosen, drafted, verified: draft tokens of each request that were asked for, made, and kept.
        trial: the parked request that is tried, if any.
        num_prefill_tokens: in the batch beside the requests that sample.
        levels: acceptance rates [B, levels] by the past.
        conditional: [B, γ], probability of each draft token given those before it, as used for the cut.
        confident: whether that came from the proposal.
        depths: of each request's draft: its length, or its tree's depth.
        step_seconds: [n+1], without drafting, by draft tokens in the batch.
        draft_seconds: what drafting took.
    """

    requests: Sequence[Draftable]
    num_prefill_tokens: int
    levels: Floats
    step_seconds: Floats
    chosen: Sequence[int]
    trial: str | None = None
    drafted: Sequence[int] = ()
    depths: Sequence[int] = ()
    verified: Sequence[int] = ()
    conditional: Floats = field(default_factory=lambda: np.zeros((0, 0)))
    confident: bool = False
    draft_seconds: float = 0.0

    @property
    def expected_tokens(self) -> float:
        """Tokens that the step is expected to emit."""
        reach = self.conditional.cumprod(-1)
        drafts = sum(float(reach[row, :length].sum()) for row, length in enumerate(self.verified))
        return len(self.requests) + drafts

    @property
    def expected_seconds(self) -> float:
        """Seconds that it is expected to take, with the drafting as it was."""
        return float(self.step_seconds[sum(self.verified)]) + self.draft_seconds


class AdaptiveLengths:
    """Lengths by expected tokens per second.

    Args:
        costs: of this engine's steps; refreshed by every step.
        tree_width: tokens drafted for each position; the nodes of a level share its acceptance rate.
        explain: called after each step with what was expected of it and what came.
        save: called now and then with the refreshed costs.
    """

    def __init__(
        self,
        costs: CostCurve,
        *,
        tree_width: int = 1,
        explain: Callable[[StepPlan, StepOutcome], None] | None = None,
        save: Callable[[CostCurve], None] | None = None,
    ) -> None:
        self.costs = costs
        self._width = tree_width
        self._explain = explain
        self._save = save
        self._rates = AcceptanceRates()
        self._parking = Parking()
        self._number = 0
        self._rest_until = 0
        self._resting: list[str] = []
        self._bias = np.zeros(0)  # by position, added to the logits of confidences
        self._has_confidence = False
        self._raw: Floats | None = None
        self._plan: StepPlan | None = None

    @property
    def num_parked(self) -> int:
        return self._parking.num_parked

    def choose(self, requests: Sequence[Draftable], num_prefill_tokens: int) -> list[int]:
        self._number += 1
        rooms = [request.room for request in requests]
        ids = [request.request_id for request in requests]
        if self._number < self._rest_until and ids == self._resting:
            nothing = np.zeros((len(ids), 0))
            seconds = self._step_seconds(len(ids), num_prefill_tokens, 0)
            self._plan = StepPlan(requests, num_prefill_tokens, nothing, seconds, [0] * len(ids))
            return [0] * len(ids)
        step_seconds = self._step_seconds(len(requests), num_prefill_tokens, sum(rooms))
        levels = self._rates.all_rates(ids, -(-max(rooms, default=0) // self._width))
        lengths, trial = [0] * len(requests), None
        if any(rooms):
            reach = self._node_reach(levels, rooms)
            lengths = self._worthwhile(requests, reach, step_seconds)
            for request, length in zip(requests, lengths, strict=True):
                if request.room:
                    self._parking.settle(request.request_id, length > 0, self._number)
            lengths = self._deepened(lengths, rooms, step_seconds)
            trial, length = self._trial(requests, lengths, reach, step_seconds)
            lengths = [
                length if request.request_id == trial else own for request, own in zip(requests, lengths, strict=True)
            ]
            if not any(lengths):
                self._rest_until, self._resting = self._number + REST, ids
        self._plan = StepPlan(requests, num_prefill_tokens, levels, step_seconds, lengths, trial)
        return lengths

    def cut(self, proposal: DraftProposal, seconds: float) -> DraftProposal:
        plan = self._plan
        assert plan is not None
        drafted: list[int] = proposal.lengths.tolist()
        self._note_drafting(plan, seconds)
        conditional, confident = self._conditional(plan, proposal, drafted)
        depths = drafted
        if proposal.tree is not None:
            tree_depths = proposal.tree.depths.tolist()
            depths = [max(row[:length], default=0) for row, length in zip(tree_depths, drafted, strict=True)]
        verified = drafted
        if proposal.tree is None or confident:
            # Without confidences a tree's nodes are known by their level only, which was weighed before drafting.
            nothing_drawn = isinstance(proposal.probs, SparseProbs) and proposal.probs.probs.shape[-1] == 1
            verified = cut_lengths(
                conditional,
                drafted,
                self._node_conditional(plan.levels, conditional.shape[1]),
                [nothing_drawn or request.immune for request in plan.requests],
                seconds,
                plan.step_seconds,
            )
            verified = [
                whole if request.request_id == plan.trial else part
                for request, whole, part in zip(plan.requests, drafted, verified, strict=True)
            ]
        self._plan = replace(
            plan,
            drafted=drafted,
            depths=depths,
            verified=verified,
            conditional=conditional,
            confident=confident,
            draft_seconds=seconds,
        )
        return proposal if verified == drafted else shortened(proposal, verified)

    def learn(self, outcome: StepOutcome) -> None:
        plan, self._plan = self._plan, None
        assert plan is not None
        for row, accepted in enumerate(outcome.accepted):
            if accepted is not None and row < len(plan.drafted) and plan.drafted[row]:
                self._learn_acceptance(plan, row, accepted)
        trial = next((row for row, each in enumerate(plan.requests) if each.request_id == plan.trial), None)
        if trial is not None and plan.drafted and plan.drafted[trial]:
            self._parking.tried(plan.requests[trial].request_id, bool(outcome.accepted[trial]), self._number)
        if plan.num_prefill_tokens == 0:
            self.costs.refresh(num_tokens=outcome.num_tokens, target=outcome.target_seconds, rest=outcome.rest_seconds)
        self._parking.earn(plan.expected_seconds)
        if self._explain is not None:
            self._explain(plan, outcome)
        if self._save is not None and self._number % SAVE_EVERY == 0:
            self._save(self.costs)

    def release(self, request_id: str) -> None:
        self._rates.release(request_id)
        self._parking.release(request_id)

    # ---- before drafting

    def _step_seconds(self, batch: int, num_prefill_tokens: int, most: int) -> Floats:
        """Seconds of a step by draft tokens [most+1].

        The height is that of decoding alone, the growth that of the batch as it is: a prompt chunk makes a step long,
        and next to it every token would seem cheap, but its seconds are spent either way.
        """
        table = self.costs.step_table(batch + num_prefill_tokens + most)
        beside = table[batch + num_prefill_tokens :]
        return beside - (beside[0] - table[batch])

    def _worthwhile(self, requests: Sequence[Draftable], reach: Floats, step_seconds: Floats) -> list[int]:
        """Lengths that pay: with something to spare for parked requests, and with their catch-up."""
        parked = [self._parking.is_parked(request.request_id) for request in requests]
        weighed = reach * np.where(parked, CAUTION, 1.0)[:, None]
        width = reach.shape[1]
        draft_seconds = [self.costs.draft_table(depth, len(requests)) for depth in range(width + 1)]
        lengths = best_lengths(weighed, draft_seconds, step_seconds)
        late = [
            row
            for row, length in enumerate(lengths)
            if length and not self._pays_catch_up(requests[row], row, lengths, reach, step_seconds)
        ]
        if late:
            weighed[late] = 0.0
            lengths = best_lengths(weighed, draft_seconds, step_seconds)
        # Half a level of a tree has no use.
        return [length // self._width * self._width for length in lengths]

    def _pays_catch_up(
        self, request: Draftable, row: int, lengths: Sequence[int], reach: Floats, step_seconds: Floats
    ) -> bool:
        """Whether what a request gains by drafting, over the steps to come, pays for what its drafter has missed."""
        backlog = self._parking.backlog(request.request_id, request.num_tokens)
        if backlog <= LONG_BACKLOG or self.costs.catch_up == 0:
            return True
        own, total = lengths[row], sum(lengths)
        drafting = sum(length > 0 for length in lengths)
        gained = float(reach[row, :own].sum())
        tokens = len(lengths) + sum(float(reach[each, :length].sum()) for each, length in enumerate(lengths))
        drafts = self.costs.draft_seconds(max(lengths), drafting)
        pace = tokens / (float(step_seconds[total]) + drafts)
        added = float(step_seconds[total] - step_seconds[total - own]) + drafts / drafting
        steps = min(HORIZON, request.num_remaining / (1 + gained))
        return steps * (gained - pace * added) > pace * self.costs.catch_up * backlog

    def _deepened(self, lengths: list[int], rooms: Sequence[int], step_seconds: Floats) -> list[int]:
        """Drafts made as deep as costs next to nothing, where confidences will cut them again."""
        deepest, drafting = max(lengths), sum(length > 0 for length in lengths)
        if not self._has_confidence or not drafting:
            return lengths
        allowed = self.costs.draft_seconds(deepest, drafting) + NEGLIGIBLE * float(step_seconds[0])
        while deepest < max(rooms) and self.costs.draft_seconds(deepest + 1, drafting) <= allowed:
            deepest += 1
        return [min(room, deepest) if length else 0 for length, room in zip(lengths, rooms, strict=True)]

    def _trial(
        self, requests: Sequence[Draftable], lengths: Sequence[int], reach: Floats, step_seconds: Floats
    ) -> tuple[str | None, int]:
        """The parked request to try, if it is time, and how many tokens to draft for it."""
        ready = [
            row
            for row, request in enumerate(requests)
            if request.room and not lengths[row] and self._parking.is_ready(request.request_id, self._number)
        ]
        if not ready:
            return None, 0
        drafting, deepest, total = sum(length > 0 for length in lengths), max(lengths), sum(lengths)
        already = self.costs.draft_seconds(deepest, drafting)
        sizes = np.arange(self._width, reach.shape[1] + 1, self._width)
        if not len(sizes):  # room for less than one level of a tree
            return None, 0
        alone = step_seconds[sizes] + [self.costs.draft_seconds(int(size), 1) for size in sizes]
        tries: dict[str, int] = {}
        costs = []
        for row in ready:
            request = requests[row]
            # The best length above 0 for this request alone; nodes past its room reach nothing.
            best = int(sizes[((1 + reach[row].cumsum()[sizes - 1]) / alone).argmax()])
            length = min(best, request.room)
            missed = self._parking.backlog(request.request_id, request.num_tokens)
            seconds = (
                self.costs.draft_seconds(max(deepest, length), drafting + 1)
                - already
                + float(step_seconds[total + length] - step_seconds[total])
                + self.costs.catch_up * missed
            )
            tries[request.request_id] = length
            costs.append((max(seconds, 0.0), request.request_id))
        chosen = self._parking.trial(costs)
        return chosen, 0 if chosen is None else tries[chosen]

    def _node_reach(self, levels: Floats, rooms: Sequence[int]) -> Floats:
        """Expected accepted tokens [B, γ] that each node adds: a level's, shared by its nodes."""
        width = max(rooms)
        reach = np.repeat(levels.cumprod(-1) / self._width, self._width, axis=-1)[:, :width]
        reach[np.arange(width) >= np.array(rooms)[:, None]] = 0.0
        return reach

    # ---- after drafting

    def _note_drafting(self, plan: StepPlan, seconds: float) -> None:
        drafting = [request for request, length in zip(plan.requests, plan.chosen, strict=True) if length]
        missed = [self._parking.backlog(each.request_id, each.num_tokens) for each in drafting]
        self.costs.refresh_drafting(max(plan.chosen, default=0), len(drafting), sum(missed), seconds)
        for request in drafting:
            self._parking.caught_up(request.request_id, request.num_tokens)

    def _conditional(self, plan: StepPlan, proposal: DraftProposal, drafted: Sequence[int]) -> tuple[Floats, bool]:
        """The probability of each draft token given those before it [B, γ], and whether the proposal gave it.

        Of a tree, what each node adds to the expected accepted tokens is the probability of its path; written as
        ratios from node to node it is cut as chains are.
        """
        width = proposal.token_ids.shape[1]
        self._raw = None
        if proposal.confidence is None or not any(drafted):
            return self._node_conditional(plan.levels, width), False
        self._has_confidence = True
        raw = proposal.confidence.double().cpu().numpy().clip(0.0, 1.0)
        if proposal.tree is None:
            self._raw = raw
            return self._calibrated(raw), True
        parents = proposal.tree.parents.tolist()
        paths = np.zeros_like(raw)
        for row, length in enumerate(drafted):
            for node in range(length):
                above = parents[row][node]
                paths[row, node] = raw[row, node] * (1.0 if above < 0 else paths[row, above])
        paths = np.minimum.accumulate(paths, axis=-1)
        before = np.concatenate([np.ones((len(paths), 1)), paths[:, :-1]], axis=-1)
        return np.divide(paths, before, out=np.zeros_like(paths), where=before > 0), True

    def _node_conditional(self, levels: Floats, width: int) -> Floats:
        """Rates of the past by draft token [B, width]; what was not foreseen goes on as the last level."""
        if width == 0 or levels.shape[1] == 0:
            return np.zeros((len(levels), width))
        places = np.minimum(np.arange(width), levels.shape[1] - 1)
        return levels[:, places]

    def _calibrated(self, raw: Floats) -> Floats:
        """Confidences after the running correction of their logits."""
        missing = raw.shape[1] - len(self._bias)
        if missing > 0:
            self._bias = np.concatenate([self._bias, np.zeros(missing)])
        return _shifted(raw, self._bias[: raw.shape[1]])

    # ---- after the step

    def _learn_acceptance(self, plan: StepPlan, row: int, accepted: int) -> None:
        verified = plan.verified[row]
        # A tree's acceptance is by level; of a tree that was cut, only that it was reached is known.
        depth = plan.depths[row] if plan.verified[row] == plan.drafted[row] else min(verified, plan.depths[row])
        outcomes = [1.0] * accepted
        if accepted < depth:
            outcomes.append(0.0)
        elif plan.confident and verified < plan.drafted[row] and self._raw is not None:
            outcomes.append(float(plan.conditional[row, verified]))  # cut unseen: what was predicted stands for it
        self._rates.record(plan.requests[row].request_id, outcomes)
        if self._raw is not None:
            reached = min(accepted + 1, verified)
            errors = (np.arange(reached) < accepted) - plan.conditional[row, :reached]
            self._bias[:reached] += CALIBRATION_RATE * errors


def _shifted(probabilities: Floats, bias: Floats) -> Floats:
    """Probabilities whose logits are moved by `bias`; 0 and 1 stay."""
    odds = np.exp(bias) * probabilities
    return np.asarray(odds / (odds + 1 - probabilities))
