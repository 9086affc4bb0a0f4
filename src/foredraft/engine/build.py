"""Puts an engine together from its configuration: target, cache, drafter, scheduler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foredraft.config import UTILIZATION_NEEDS_CUDA, EngineConfig, SpeculativeConfig, require
from foredraft.draft.backbone_config import check_length
from foredraft.draft.block import BlockDrafter
from foredraft.draft.block_model import BlockModel, load_block_model, uncorrected
from foredraft.draft.draft_model import DraftModelDrafter
from foredraft.draft.drafter import Drafter
from foredraft.draft.mixture import MixtureDrafter
from foredraft.draft.ngram import NgramDrafter
from foredraft.draft.prediction import PredictionDrafter
from foredraft.draft.shipped import SHIPPED_NAME, shipped_drafter
from foredraft.engine.memory import cache_bytes
from foredraft.engine.scheduler import Scheduler
from foredraft.engine.start_costs import adaptive_policy
from foredraft.engine.step import Engine
from foredraft.errors import ConfigError, DrafterError
from foredraft.kv.pool import BlockPool, blocks_for
from foredraft.models.decoder import Decoder, TargetModel
from foredraft.models.invariant import InvariantModel
from foredraft.models.load import LoadedModel, load_model, resolve_device

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Built:
    """An engine and what a request needs to know of its model."""

    engine: Engine
    tokenizer: Any
    eos_token_ids: Sequence[int]
    vocab_size: int
    max_model_len: int
    bytes_per_block: int
    drafter_name: str | None


def build_engine(config: EngineConfig, progress: Progress | None = None) -> Built:
    """Loads the target and the drafter and sizes the cache.

    Raises `ModelError`, `DrafterError` or `ConfigError`.
    """
    if config.gpu_memory_utilization is not None:
        require(resolve_device(config.device).type == "cuda", UTILIZATION_NEEDS_CUDA)
    target = load_model(config, progress=progress)
    model = _invariant(config, target.model)
    max_model_len = _context_length(config, model.config.max_model_len)
    members = _members(config.speculative)
    drafts = [_draft_model(config, member, target, progress) for member in members]
    draft_models = [draft.model for draft in drafts if draft is not None]
    block_models = [_block_model(member, model) for member in members]

    bytes_per_token = model.kv_bytes_per_token + sum(each.kv_bytes_per_token for each in draft_models)
    bytes_per_token += sum(each.config.kv_values_per_token for each in block_models if each) * model.dtype.itemsize
    bytes_per_block = bytes_per_token * config.block_size
    available = cache_bytes(config, [model, *draft_models])
    num_blocks = _num_blocks(config, max_model_len, bytes_per_block, available)
    scheduler = Scheduler(
        BlockPool(num_blocks, config.block_size),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        num_speculative_tokens=config.speculative.num_speculative_tokens if config.speculative else 0,
        max_model_len=max_model_len,
        enable_prefix_caching=config.enable_prefix_caching,
    )
    drafter: Drafter | None = None
    if config.speculative is not None:
        drafters = [
            _drafter(member, model, draft, block, num_blocks, config.block_size)
            for member, draft, block in zip(members, drafts, block_models, strict=True)
        ]
        drafter = drafters[0]
        if config.speculative.method == "mixture":
            longest = [member.num_speculative_tokens for member in members]
            drafter = MixtureDrafter(list(zip(drafters, longest, strict=True)), model.device)
    cache = model.new_cache(num_blocks, config.block_size)
    lengths = None
    if drafter is not None and config.speculative is not None and config.speculative.adaptive:
        lengths = adaptive_policy(config, model, cache, drafter, sum(each.weight_bytes for each in draft_models))
    engine = Engine(model, cache, scheduler, drafter, lengths=lengths)
    return Built(
        engine=engine,
        tokenizer=target.tokenizer,
        eos_token_ids=target.eos_token_ids,
        vocab_size=model.config.vocab_size,
        max_model_len=max_model_len,
        bytes_per_block=bytes_per_block,
        drafter_name=_name(config.speculative),
    )


def _invariant(config: EngineConfig, model: TargetModel) -> TargetModel:
    """The target at one fixed shape, where that is asked for and not given anyway."""
    if not config.invariant or model.is_row_invariant:
        return model
    require(
        config.speculative is None or config.speculative.tree_width == 1,
        "invariant: on this device it is for chains; leave tree_width at 1",
    )
    return InvariantModel(model)


def _members(speculative: SpeculativeConfig | None) -> Sequence[SpeculativeConfig]:
    """The drafters that are wanted, one by one."""
    if speculative is None:
        return ()
    return speculative.drafters or (speculative,)


def _drafter(
    speculative: SpeculativeConfig,
    target: TargetModel,
    draft: LoadedModel | None,
    block_model: BlockModel | None,
    num_blocks: int,
    block_size: int,
) -> Drafter:
    if block_model is not None:
        assert isinstance(target, Decoder)
        return BlockDrafter(block_model, target, num_blocks, block_size, tree=speculative.tree_width > 1)
    if draft is not None:
        cache = draft.model.new_cache(num_blocks, block_size)
        return DraftModelDrafter(draft.model, cache, target.config.vocab_size, speculative.tree_width)
    if speculative.method == "prediction":
        return PredictionDrafter()
    return NgramDrafter(*speculative.lookup_sizes, speculative.tree_width)


def _draft_model(
    config: EngineConfig, speculative: SpeculativeConfig, target: LoadedModel, progress: Progress | None
) -> LoadedModel | None:
    """The draft model, checked to speak the target's vocabulary."""
    if speculative.method != "draft_model":
        return None
    assert speculative.model is not None
    draft = load_model(config, path=speculative.model, progress=progress)
    if target.tokenizer is not None and draft.tokenizer is not None:
        differences = target.tokenizer.first_differences(draft.tokenizer)
        if differences:
            listed = "; ".join(f"{token}: {own!r} against {other!r}" for token, own, other in differences)
            raise DrafterError(
                f"draft model {speculative.model}: its tokenizer is not the target's, so its drafts would mean other "
                f"text. First ids that differ: {listed}. Choose a draft model of the target's family"
            )
    elif target.model.config.vocab_size != draft.model.config.vocab_size:
        raise DrafterError(
            f"draft model {speculative.model}: its vocabulary has {draft.model.config.vocab_size} ids, the target's "
            f"{target.model.config.vocab_size}, and there is no tokenizer to compare. Choose a draft model of the "
            "target's family"
        )
    return draft


def _block_model(speculative: SpeculativeConfig, target: TargetModel) -> BlockModel | None:
    """The block drafter, checked against the target and the drafts that are asked of it."""
    if speculative.method != "block":
        return None
    if not isinstance(target, Decoder):
        raise DrafterError(
            "method block: this target runs through transformers or at a fixed shape, where a block drafter cannot "
            "reach its embedding and head; use ngram or draft_model"
        )
    directory = shipped_drafter() if speculative.model is None else Path(speculative.model).expanduser()
    model = load_block_model(directory)
    if speculative.tree_width == 1:
        check_length(model.config, speculative.num_speculative_tokens, str(directory))
    own = model.config.corrector
    if speculative.corrector == "none":
        return uncorrected(model)
    if speculative.corrector not in (None, own):
        raise DrafterError(f"corrector: {directory} has {own}, not {speculative.corrector}; use {own} or none")
    return model


def _context_length(config: EngineConfig, own: int) -> int:
    if config.max_model_len is None:
        return own
    if config.max_model_len > own:
        raise ConfigError(f"max_model_len: {config.max_model_len} is above the model's own {own} tokens; lower it")
    return config.max_model_len


def _num_blocks(config: EngineConfig, max_model_len: int, bytes_per_block: int, available: int) -> int:
    """Blocks for `max_num_seqs` full contexts, as far as `available` bytes allow."""
    wanted = blocks_for(max_model_len, config.block_size) * config.max_num_seqs
    affordable = available // bytes_per_block
    if affordable < 1:
        given = config.gpu_memory_utilization
        flag = "kv_cache_memory" if given is None else "gpu_memory_utilization"
        raise ConfigError(
            f"{flag}: {available} bytes hold no block of {config.block_size} tokens, which takes {bytes_per_block} "
            "bytes; raise it"
        )
    return min(wanted, affordable)


def _name(speculative: SpeculativeConfig | None) -> str | None:
    if speculative is None:
        return None
    if speculative.drafters:
        return " + ".join(str(_name(each)) for each in speculative.drafters)
    if speculative.method == "block" and speculative.model is None:
        return SHIPPED_NAME
    return speculative.model or speculative.method
