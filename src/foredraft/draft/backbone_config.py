"""What a block drafter is: the sizes of its backbone, its conventions, and its corrector.

The names in `config.json` follow the published DFlash and DSpark drafters where they have one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from foredraft.config import BLOCK_ARCHITECTURE as ARCHITECTURE
from foredraft.errors import DrafterError
from foredraft.models.config import ModelConfig
from foredraft.models.rope import RopeConfig


@dataclass(frozen=True)
class BlockConfig:
    """A block drafter for one target.

    Args:
        vocab_size, hidden_size: the target's; the backbone has the same, since it uses the target's embedding
            and head.
        target_layers: layers of the target whose outputs are the context's features, 0 the first.
        block_size: inputs of a block: the anchor and masks.
        anchor_predicts: whether the anchor's own slot predicts the first draft (DSpark: a block of n gives n
            drafts) or only the masks predict (DFlash: n - 1 drafts).
        mask_token_id: token whose embedding is the mask's; None when the drafter has a mask embedding of its
            own.
        draft_vocab_size: size of the reduced draft vocabulary; None for the target's.
        carry: whether every input of a block also gets the context's last row, through a matrix of its own, as EAGLE's
            drafter gets the feature before its token. Attention alone passes on no more than its few value heads hold.
        conv_taps: taps of the causal convolutions around each sublayer; 0 for none.
        conv_group_size: channels that share a dynamic kernel; 0 for static kernels only.
        corrector, corrector_options: see `draft.correctors`.
        confidence: options of the confidence head; None for no head.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rope: RopeConfig
    target_layers: tuple[int, ...]
    block_size: int
    anchor_predicts: bool = True
    mask_token_id: int | None = None
    draft_vocab_size: int | None = None
    rms_norm_eps: float = 1e-6
    qk_norm: bool = False
    carry: bool = False
    conv_taps: int = 0
    conv_group_size: int = 0
    corrector: str = "none"
    corrector_options: Mapping[str, Any] = field(default_factory=dict)
    confidence: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        _require(len(self.target_layers) > 0, "target_layer_ids: at least one target layer is needed")
        _require(self.num_heads % self.num_kv_heads == 0, "num_attention_heads: not a multiple of the kv heads")
        _require(self.num_draft_tokens >= 1, f"block_size: {self.block_size} leaves no slot that predicts")
        in_vocabulary = self.mask_token_id is None or 0 <= self.mask_token_id < self.vocab_size
        _require(
            in_vocabulary,
            f"mask_token_id: {self.mask_token_id} is outside the vocabulary of {self.vocab_size}",
        )
        _require(
            self.conv_taps <= self.block_size,
            f"conv_kernel_size: {self.conv_taps} taps are more than the block's {self.block_size} slots",
        )
        _require(
            self.conv_group_size == 0 or self.hidden_size % self.conv_group_size == 0,
            f"conv_group_size: {self.conv_group_size} does not divide the {self.hidden_size} channels",
        )

    @property
    def num_draft_tokens(self) -> int:
        """γ, the most drafts of a block."""
        return self.block_size if self.anchor_predicts else self.block_size - 1

    @property
    def kv_values_per_token(self) -> int:
        """Numbers that one token of context takes in the drafter's cache, over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    @property
    def first_predicting(self) -> int:
        """The first input of a block whose output is a draft."""
        return 0 if self.anchor_predicts else 1


def config_for(target: ModelConfig, *, num_layers: int, num_draft_tokens: int, **options: Any) -> BlockConfig:
    """A drafter with layers of the target's shape, so that they can start as layers of the target.

    Args:
        options: fields of `BlockConfig`; `target_layers` is spread over the target when not given.
    """
    anchor_predicts = options.pop("anchor_predicts", True)
    target_layers = options.pop("target_layers", None) or spread_layers(target.num_layers, min(3, target.num_layers))
    assert target.rope is not None
    return BlockConfig(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        num_layers=num_layers,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        intermediate_size=target.intermediate_size,
        rope=target.rope,
        rms_norm_eps=target.rms_norm_eps,
        target_layers=tuple(target_layers),
        block_size=num_draft_tokens + (not anchor_predicts),
        anchor_predicts=anchor_predicts,
        **{"qk_norm": target.qk_norm, **options},
    )


def spread_layers(num_target_layers: int, count: int) -> list[int]:
    """Feature layers from early to late, as DFlash spreads them: `round(1 + i·(L−4)/(m−1))`."""
    if count == 1 or num_target_layers < 5:
        return [round((i + 1) * num_target_layers / count) - 1 for i in range(count)]
    return [round(1 + i * (num_target_layers - 4) / (count - 1)) for i in range(count)]


def to_json(config: BlockConfig) -> dict[str, Any]:
    """The content of `config.json`."""
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "foredraft_block",
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "rms_norm_eps": config.rms_norm_eps,
        "qk_norm": config.qk_norm,
        "rope": asdict(config.rope),
        "block_size": config.block_size,
        "sample_from_anchor": config.anchor_predicts,
        "dflash_config": {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.target_layers),
            "context_carry": config.carry,
            "conv_kernel_size": config.conv_taps,
            "conv_group_size": config.conv_group_size,
        },
        "corrector": {"name": config.corrector, **config.corrector_options},
        "confidence_head": dict(config.confidence) if config.confidence is not None else None,
    }


def from_json(raw: Mapping[str, Any], where: str) -> BlockConfig:
    """The configuration in a `config.json` that `to_json` made.

    Raises:
        DrafterError: another architecture, a missing key or an impossible value, naming the key.
    """
    names = raw.get("architectures") or ["nothing"]
    if ARCHITECTURE not in names:
        raise DrafterError(f"{where}: architectures names {names[0]}; a block drafter of foredraft is {ARCHITECTURE}")
    try:
        dflash, corrector = raw["dflash_config"], dict(raw["corrector"])
        rope = dict(raw["rope"])
        if rope.get("divisors") is not None:
            rope["divisors"] = tuple(rope["divisors"])
        return BlockConfig(
            vocab_size=raw["vocab_size"],
            hidden_size=raw["hidden_size"],
            num_layers=raw["num_hidden_layers"],
            num_heads=raw["num_attention_heads"],
            num_kv_heads=raw["num_key_value_heads"],
            head_dim=raw["head_dim"],
            intermediate_size=raw["intermediate_size"],
            rope=RopeConfig(**rope),
            target_layers=tuple(dflash["target_layer_ids"]),
            block_size=raw["block_size"],
            anchor_predicts=raw["sample_from_anchor"],
            mask_token_id=dflash["mask_token_id"],
            draft_vocab_size=raw.get("draft_vocab_size"),
            rms_norm_eps=raw["rms_norm_eps"],
            qk_norm=raw["qk_norm"],
            carry=dflash.get("context_carry", False),
            conv_taps=dflash["conv_kernel_size"],
            conv_group_size=dflash["conv_group_size"],
            corrector=corrector.pop("name"),
            corrector_options=corrector,
            confidence=raw.get("confidence_head"),
        )
    except KeyError as error:
        raise DrafterError(f"{where}: {error.args[0]} is missing") from error
    except TypeError as error:
        raise DrafterError(f"{where}: {error}") from error
    except DrafterError as error:
        raise DrafterError(f"{where}: {error}") from error


def check_target(config: BlockConfig, target: ModelConfig, where: str) -> None:
    """Raises `DrafterError` when a drafter cannot draft for `target`, saying which figure differs."""
    for name, own, theirs in (
        ("vocab_size", config.vocab_size, target.vocab_size),
        ("hidden_size", config.hidden_size, target.hidden_size),
    ):
        _require(
            own == theirs,
            f"{where}: its {name} is {own}, the target's {theirs}; it was made for another target",
        )
    highest = max(config.target_layers)
    _require(
        highest < target.num_layers,
        f"{where}: it wants target layer {highest}, counted from 0, but the target has {target.num_layers}",
    )


def check_length(config: BlockConfig, num_speculative_tokens: int, where: str) -> None:
    """Raises `DrafterError` when longer chains are asked for than the drafter was trained for."""
    longest = config.num_draft_tokens
    _require(
        num_speculative_tokens <= longest,
        f"num_speculative_tokens: {num_speculative_tokens} is above the {longest} drafts of a block that {where} was "
        f"trained for; use at most {longest}",
    )


def with_corrector(config: BlockConfig, name: str, **options: Any) -> BlockConfig:
    """The same drafter with another corrector."""
    return replace(config, corrector=name, corrector_options=options)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise DrafterError(message)
