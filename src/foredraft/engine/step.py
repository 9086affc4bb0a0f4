"""The engine's step: schedule, draft, run the target once, verify, commit.

Owns the scheduler, the target with its cache, and the drafter. Knows nothing of prompts' text, HTTP or threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from foredraft.draft.drafter import Drafter, DraftRequest, Observation
from foredraft.draft.proposal import DraftProposal
from foredraft.engine.batch import build_batch
from foredraft.engine.commit import commit_tokens
from foredraft.engine.lengths import Draftable, FixedLengths, LengthPolicy, StepOutcome
from foredraft.engine.logprobs import logprobs_of, record_prompt_logprobs
from foredraft.engine.request import Request
from foredraft.engine.scheduler import Scheduled, Scheduler
from foredraft.engine.stats import AcceptanceStats, StepTimes
from foredraft.engine.verifying import RATIO_RULES, Decision, RatioRule, decide
from foredraft.kv.cache import KVCache
from foredraft.models.decoder import ForwardOutput, TargetModel
from foredraft.sampling.logprobs import Logprob

NAN_MESSAGE = (
    "there is no distribution at this request's position: the target's logits are not numbers (NaN), or the request's "
    "own constraints leave no token; try dtype float32, or looser constraints"
)


class Engine:
    """Continuous batching over one target model.

    Args:
        model: the target.
        cache: its KV cache.
        scheduler: queues and blocks.
        drafter: proposes tokens; None for plain decoding.
        rules: how p is weighed against q, by name; an audit puts broken ones here to see them caught.
        lengths: decides how long drafts are; as long as there is room for, when None.
    """

    def __init__(
        self,
        model: TargetModel,
        cache: KVCache,
        scheduler: Scheduler,
        drafter: Drafter | None,
        rules: Mapping[str, RatioRule] = RATIO_RULES,
        lengths: LengthPolicy | None = None,
    ) -> None:
        self.model = model
        self.cache = cache
        self.scheduler = scheduler
        self.drafter = drafter
        self.rules = rules
        self.lengths: LengthPolicy = lengths or FixedLengths()
        self.stats = AcceptanceStats()
        self.times = StepTimes()
        self.peak_blocks = 0

    def add(self, request: Request) -> None:
        """Queues a request."""
        self.scheduler.add(request)

    def abort(self, request: Request) -> None:
        """Ends a request before its time and frees what it holds."""
        if not request.finished:
            request.finish("abort")
        elif not request.block_table:
            return  # over long ago; with blocks left, its last step failed before it gave them back
        self._release(request)

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """One target forward over the running batch; returns the requests that got tokens or ended."""
        before = replace(self.times)
        with self.times.measure("schedule"):
            plan, preempted = self.scheduler.schedule(self.drafter.num_reusable if self.drafter else None)
            self._forget(preempted)
            self.peak_blocks = max(self.peak_blocks, self.scheduler.pool.num_used)
            sampling = [part for part in plan if part.samples]
        if not plan:
            return []
        proposal, drafts, trees = self._draft(plan, sampling)
        with self.times.measure("schedule"):
            batch = build_batch(
                plan,
                _for_all(plan, drafts),
                _for_all(plan, trees) if trees else None,
                self.scheduler.pool.block_size,
                self.model.device,
            )
        with self.times.measure("forward"):
            output = self.model.forward(batch, self.cache, self.drafter.feature_layers if self.drafter else ())
        with self.times.measure("sample"):
            logits = record_prompt_logprobs(plan, _for_all(plan, drafts), output.logits)
            states = [part.request.state for part in sampling]
            decisions = decide(logits, states, proposal, drafts, trees, self.rules) if sampling else []
            logprobs = logprobs_of(sampling, drafts, decisions, logits)
        with self.times.measure("commit"):
            changed = self._commit(plan, drafts, decisions, logprobs, output)
        self.times.num_steps += 1
        if self.drafter is not None:
            self._report(decisions, len(batch.input_ids), before)
        return changed

    def _draft(
        self, plan: Sequence[Scheduled], sampling: Sequence[Scheduled]
    ) -> tuple[DraftProposal, list[list[int]], list[list[int]] | None]:
        """The drafts to verify: how many tokens to draft, their drafting, and how many of them to keep."""
        lengths = [0] * len(sampling)
        if self.drafter is not None:
            with self.times.measure("schedule"):
                num_prefill_tokens = sum(part.num_tokens for part in plan) - len(sampling)
                lengths = self.lengths.choose([draftable(part) for part in sampling], num_prefill_tokens)
        if self.drafter is None or not any(lengths):
            nothing = DraftProposal.deterministic([[] for _ in sampling], self.model.device)
            return nothing, [[] for _ in sampling], None
        before = self.times.draft
        with self.times.measure("draft"):
            proposal = self._propose(self.drafter, sampling, lengths)
            proposal.lengths.tolist()  # waits for the device, so that drafting's time is counted as its own
        with self.times.measure("schedule"):
            proposal = self.lengths.cut(proposal, self.times.draft - before)
            drafts, trees = draft_lists(proposal)
        return proposal, drafts, trees

    def _report(self, decisions: Sequence[Decision], num_tokens: int, before: StepTimes) -> None:
        """Tells the length policy what became of the step."""
        now = self.times
        self.lengths.learn(
            StepOutcome(
                accepted=[None if decision.invalid else decision.num_accepted for decision in decisions],
                num_emitted=sum(0 if decision.invalid else decision.num_accepted + 1 for decision in decisions),
                num_tokens=num_tokens,
                target_seconds=now.forward + now.sample - before.forward - before.sample,
                rest_seconds=now.schedule + now.commit - before.schedule - before.commit,
            )
        )

    def _propose(self, drafter: Drafter, sampling: Sequence[Scheduled], lengths: Sequence[int]) -> DraftProposal:
        return drafter.propose(
            [
                DraftRequest(
                    request_id=part.request.request_id,
                    token_ids=part.request.token_ids,
                    block_table=part.request.block_table,
                    max_draft_tokens=length,
                    state=part.request.state,
                    prediction=part.request.prediction,
                    block_hashes=part.request.block_hashes,
                )
                for part, length in zip(sampling, lengths, strict=True)
            ]
        )

    def _commit(
        self,
        plan: Sequence[Scheduled],
        drafts: Sequence[Sequence[int]],
        decisions: Sequence[Decision],
        logprobs: Sequence[list[dict[int, Logprob]]],
        output: ForwardOutput,
    ) -> list[Request]:
        changed: list[Request] = []
        observations: list[Observation] = []
        outcomes = iter(zip(drafts, decisions, logprobs, strict=True))
        row = 0
        for part in plan:
            request, start = part.request, part.request.num_computed_tokens
            valid = list(range(part.num_tokens))  # query tokens that are part of the text now
            num_rows = part.num_tokens
            if part.samples:
                draft, decision, entries = next(outcomes)
                num_rows += len(draft)
                valid += [part.num_tokens + node for node in decision.path]
                self._compact(request, start + part.num_tokens, decision.path)
                self._commit_one(part, draft, decision)
                request.logprobs += entries[: request.num_output_tokens - len(request.logprobs)]
                changed.append(request)
            request.num_computed_tokens = min(start + len(valid), len(request.token_ids))
            if request.error is None:
                self.scheduler.settle(request)
                if output.features:
                    valid = valid[: request.num_computed_tokens - start]
                    rows = [row + index for index in valid]
                    observations.append(
                        Observation(request.request_id, start, rows, request.block_table, request.block_hashes)
                    )
            row += num_rows
        if self.drafter is not None and observations:
            self.drafter.observe(observations, output.features)
        for request in changed:
            if request.finished:
                self._release(request)
        return changed

    def _compact(self, request: Request, start: int, path: Sequence[int]) -> None:
        """Moves the accepted nodes' keys and values together: node `path[k]` to position `start + k`."""
        if list(path) == list(range(len(path))):
            return  # a chain's prefix lies where it belongs
        source = slots_at(request.block_table, [start + node for node in path], self.cache.block_size)
        destination = slots_at(request.block_table, range(start, start + len(path)), self.cache.block_size)
        self.cache.copy_slots(
            torch.tensor(source, device=self.model.device), torch.tensor(destination, device=self.model.device)
        )

    def _commit_one(self, part: Scheduled, draft: Sequence[int], decision: Decision) -> None:
        request = part.request
        if decision.invalid:
            request.error = NAN_MESSAGE
            request.finish("error")
            return
        # A prompt that is cached but for its last token may draft at once.
        decoding = request.num_output_tokens > 0 or bool(draft)
        kept = commit_tokens(request, decision.token_ids, decision.num_accepted, len(draft))
        if request.first_token_at is None:
            request.mark_first_token()
        if decoding:
            request.draft_lengths.append(len(draft))
            accepted = min(decision.num_accepted, kept)
            request.stats.record(len(draft), accepted, kept)
            self.stats.record(len(draft), accepted, kept)

    def _release(self, request: Request) -> None:
        self._forget([request])
        self.scheduler.release(request)

    def _forget(self, requests: Sequence[Request]) -> None:
        if self.drafter is not None:
            for request in requests:
                self.drafter.release(request.request_id)
                self.lengths.release(request.request_id)


def draftable(part: Scheduled) -> Draftable:
    """What the length policy may know of a request."""
    request = part.request
    return Draftable(
        request_id=request.request_id,
        room=part.max_draft_tokens,
        num_tokens=len(request.token_ids),
        num_remaining=request.num_remaining_tokens,
        immune=request.state.matches_target,
    )


def draft_lists(proposal: DraftProposal) -> tuple[list[list[int]], list[list[int]] | None]:
    """A proposal's tokens as ragged lists, and its trees' parents when it has trees."""
    lengths = proposal.lengths.tolist()
    drafts = [ids[:length] for ids, length in zip(proposal.token_ids.tolist(), lengths, strict=True)]
    if proposal.tree is None:
        return drafts, None
    parents = proposal.tree.parents.tolist()
    return drafts, [row[:length] for row, length in zip(parents, lengths, strict=True)]


def slots_at(block_table: Sequence[int], positions: Iterable[int], block_size: int) -> list[int]:
    """Cache slots of a request's `positions`."""
    return [block_table[position // block_size] * block_size + position % block_size for position in positions]


def _for_all(plan: Sequence[Scheduled], lists: Sequence[Sequence[int]]) -> list[Sequence[int]]:
    """`lists` of the requests that sample, spread over all scheduled ones."""
    remaining = iter(lists)
    return [next(remaining) if part.samples else [] for part in plan]
