"""A target without a network: it reads the request's history back from its paged cache and looks the logits up.

Whatever the engine gets wrong about slots, positions, rollback or block tables changes the history that it reads, and
so the tokens. Slots that were never written, or that belong to another request, hold a poison value that it refuses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace

import torch
from torch import Tensor

from foredraft.config import EngineConfig, SpeculativeConfig
from foredraft.draft.drafter import DraftRequest
from foredraft.draft.proposal import DraftProposal
from foredraft.engine.build import Built
from foredraft.engine.lengths import LengthPolicy
from foredraft.engine.prompts import RequestFactory
from foredraft.engine.scheduler import Scheduler
from foredraft.engine.step import Engine
from foredraft.engine.verifying import RATIO_RULES, RatioRule
from foredraft.kv.pool import BlockPool
from foredraft.models.decoder import ForwardOutput
from foredraft.sampling.params import SamplingParams

CPU = torch.device("cpu")
POISON = -1


class FakeCache:
    """Token ids by slot, in place of keys and values."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.ids = torch.full((num_blocks * block_size,), POISON)
        self.block_size = block_size

    def copy_slots(self, source: Tensor, destination: Tensor) -> None:
        self.ids[destination] = self.ids[source].clone()


class FakeModel:
    """Logits drawn once for every pair of last tokens: a second-order Markov chain over `vocab_size` tokens."""

    device = CPU
    dtype = torch.float32
    kv_bytes_per_token = 8
    is_row_invariant = True
    weight_bytes = 0

    def __init__(
        self, vocab_size: int = 11, max_model_len: int = 256, seed: int = 0, sharpness: float = 2.0, fast: bool = False
    ) -> None:
        self.fast = fast  # looks at the last two tokens only, all rows at once
        generator = torch.Generator().manual_seed(seed)
        self.table = torch.randn(vocab_size + 1, vocab_size, vocab_size, generator=generator) * sharpness
        self.config = SimpleNamespace(vocab_size=vocab_size, max_model_len=max_model_len)
        self.num_forwards = 0
        self.tokens_per_forward: list[int] = []
        self.nan_after: int | None = None  # a last token after which the logits are not numbers

    def new_cache(self, num_blocks: int, block_size: int) -> FakeCache:
        return FakeCache(num_blocks, block_size)

    def next_logits(self, history: Sequence[int]) -> Tensor:
        """Logits [V] after `history`."""
        before = history[-2] if len(history) > 1 else self.config.vocab_size
        logits = self.table[before, history[-1]]
        return torch.full_like(logits, float("nan")) if history[-1] == self.nan_after else logits

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """Plain greedy decoding by the definition."""
        history = list(prompt)
        for _ in range(count):
            history.append(int(self.next_logits(history).argmax()))
        return history[len(prompt) :]

    def forward(self, batch, cache: FakeCache, feature_layers: tuple[int, ...] = ()) -> ForwardOutput:
        self.num_forwards += 1
        self.tokens_per_forward.append(len(batch.input_ids))
        cache.ids[batch.slot_mapping] = batch.input_ids
        hidden = batch.input_ids[:, None].to(torch.float32)
        if self.fast:
            features = tuple(hidden for _ in feature_layers)
            return ForwardOutput(hidden=hidden, features=features, logits=self._all_logits(batch, cache))
        wanted = set(batch.logits_indices.tolist())
        rows, bounds = [], batch.query_start_loc.tolist()
        for request, (begin, end) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
            table = batch.block_tables[request]
            for row in range(begin, end):
                if row not in wanted:
                    continue
                visible = self._visible(batch, request, begin, end, row)
                slots = [int(table[p // cache.block_size]) * cache.block_size + p % cache.block_size for p in visible]
                history = cache.ids[slots].tolist()
                assert POISON not in history, "the model attended to a slot that was never written"
                rows.append(self.next_logits(history))
        logits = torch.stack(rows) if rows else torch.empty(0, self.config.vocab_size)
        return ForwardOutput(hidden=hidden, features=tuple(hidden for _ in feature_layers), logits=logits)

    def _all_logits(self, batch, cache: FakeCache) -> Tensor:
        rows = batch.logits_indices
        counts = batch.query_start_loc.diff()
        owners = torch.repeat_interleave(torch.arange(len(counts)), counts)[rows]
        local = rows - batch.query_start_loc[owners]
        prefix = (batch.seq_lens - counts)[owners]
        before = prefix + local - 1  # where the token before a row's own lies
        if batch.tree_mask is not None:
            mask = batch.tree_mask[rows].clone()
            mask[torch.arange(len(rows)), local] = False
            last = mask.int() * torch.arange(1, mask.shape[1] + 1)
            before = prefix + last.amax(-1) - 1
        blocks = batch.block_tables[owners, (before.clamp(min=0)) // cache.block_size]
        previous = cache.ids[blocks * cache.block_size + before.clamp(min=0) % cache.block_size]
        previous = torch.where(before < 0, self.config.vocab_size, previous)
        assert (previous >= 0).all(), "the model attended to a slot that was never written"
        return self.table[previous, batch.input_ids[rows]]

    @staticmethod
    def _visible(batch, request: int, begin: int, end: int, row: int) -> list[int]:
        """Cache positions that `row` may attend to, in order."""
        prefix = int(batch.seq_lens[request]) - (end - begin)
        if batch.tree_mask is None:
            return list(range(int(batch.positions[row]) + 1))
        mask = batch.tree_mask[row, : end - begin].tolist()
        return [*range(prefix), *(prefix + index for index, seen in enumerate(mask) if seen)]


class OracleDrafter:
    """Proposes what the target will say, wrong at every `wrong_every`-th position if that is given."""

    method = "oracle"
    corrector: str | None = None
    feature_layers: tuple[int, ...] = ()

    def __init__(self, model: FakeModel, wrong_every: int = 0) -> None:
        self.model = model
        self.wrong_every = wrong_every
        self.released: list[str] = []

    def propose(self, requests: Sequence[DraftRequest]) -> DraftProposal:
        drafts = []
        for request in requests:
            draft = self.model.greedy(request.token_ids, request.max_draft_tokens)
            for index in range(len(draft)):
                if self.wrong_every and (len(request.token_ids) + index) % self.wrong_every == 0:
                    draft[index] = (draft[index] + 1) % self.model.config.vocab_size
            drafts.append(draft)
        return DraftProposal.deterministic(drafts)

    def observe(self, observations, features) -> None:
        pass

    def release(self, request_id: str) -> None:
        self.released.append(request_id)

    def num_reusable(self, block_table, block_hashes) -> int:
        return len(block_hashes)


class ByteTokenizer:
    """Token id = byte."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return bytes(token_ids).decode(errors="replace")


def fake_engine(
    model: FakeModel,
    drafter=None,
    *,
    gamma: int = 4,
    num_blocks: int = 64,
    block_size: int = 4,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    tokenizer=None,
    eos_token_ids: Sequence[int] = (),
    verification: str | None = None,
    rules: Mapping[str, RatioRule] = RATIO_RULES,
    lengths: LengthPolicy | None = None,
    enable_prefix_caching: bool = True,
) -> tuple[Engine, RequestFactory]:
    """An engine over `model`, and the factory for its requests."""
    scheduler = Scheduler(
        BlockPool(num_blocks, block_size),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        num_speculative_tokens=gamma if drafter else 0,
        max_model_len=model.config.max_model_len,
        enable_prefix_caching=enable_prefix_caching,
    )
    engine = Engine(model, model.new_cache(num_blocks, block_size), scheduler, drafter, rules, lengths)
    built = Built(
        engine=engine,
        tokenizer=tokenizer,
        eos_token_ids=eos_token_ids,
        vocab_size=model.config.vocab_size,
        max_model_len=model.config.max_model_len,
        bytes_per_block=8 * block_size,
        drafter_name=None,
    )
    config = EngineConfig(model="fake", speculative=SpeculativeConfig(verification=verification))
    return engine, RequestFactory(config, built)


def run(engine: Engine, factory: RequestFactory, prompts, params: SamplingParams | list[SamplingParams]):
    """Completes `prompts` (lists of ids) together; returns their outputs in order."""
    listed = params if isinstance(params, list) else [params] * len(prompts)
    assembled = [
        factory.assemble({"prompt_token_ids": ids}, chosen, None) for ids, chosen in zip(prompts, listed, strict=True)
    ]
    for each in assembled:
        for request in each.requests:
            engine.add(request)
    while engine.scheduler.has_unfinished:
        engine.step()
    return [each.output() for each in assembled]
