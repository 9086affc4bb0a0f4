"""Frozen configuration, validated once. Messages name the field as the user typed it.

Knows no torch: the command line imports this before anything heavy, so that a wrong flag is refused at once.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

from foredraft.errors import ConfigError

DTYPES = ("float32", "bfloat16")
METHODS = ("block", "draft_model", "ngram", "prediction", "mixture")
VERIFICATIONS = ("token", "block", "coupled")
DEFAULT_NUM_SPECULATIVE_TOKENS = 5
DEFAULT_PROMPT_LOOKUP = (2, 4)
"""Shortest and longest suffix, in tokens."""
DEMO = "demo"
DEMO_DRAFTS = 7
"""Drafts of a block of the drafter that is shipped for it."""
UTILIZATION_NEEDS_CUDA = (
    "gpu_memory_utilization: it is for CUDA devices, and this one is the CPU; give kv_cache_memory instead, the KV "
    "cache's size in bytes (--kv-cache-memory)"
)
BLOCK_ARCHITECTURE = "ForedraftBlockDrafter"
"""How a block drafter's `config.json` names itself."""


def require(condition: bool, message: str) -> None:
    """Raises `ConfigError` with `message` unless `condition` holds."""
    if not condition:
        raise ConfigError(message)


def require_choice(flag: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raises `ConfigError` naming the allowed values unless `value` is one of them."""
    require(value in allowed, f"{flag}: unknown value {value!r}; allowed: {', '.join(allowed)}")


def require_at_least(flag: str, value: int, minimum: int) -> None:
    """Raises `ConfigError` unless `value` is an integer of at least `minimum`."""
    good = isinstance(value, int) and not isinstance(value, bool) and value >= minimum
    require(good, f"{flag}: {value!r} is not an integer of at least {minimum}")


def require_integer(flag: str, value: int) -> None:
    """Raises `ConfigError` unless `value` is an integer."""
    require(isinstance(value, int) and not isinstance(value, bool), f"{flag}: {value!r} is not an integer")


@dataclass(frozen=True)
class SpeculativeConfig:
    """How drafts are made and verified.

    Args:
        method: `block` (a block-parallel drafter), `draft_model` (a smaller causal LM), `ngram` (prompt lookup),
            `prediction` (the text a client sends), `mixture` (whichever of `drafters` gains most, step by step).
            None: what `model`'s own configuration says when it is given;
            else `ngram`, for the target `demo` in a mixture with `block`, since a drafter for it is shipped.
        model: the drafter's directory for `block` (None: the one shipped for the target), or the draft model: a
            directory, a hub id or a `.gguf` file.
        num_speculative_tokens: γ, draft tokens proposed per step, at least 1.
        verification: `token`, `block` or `coupled`. None means `coupled` for requests with a seed, else `block`.
        prompt_lookup_max, prompt_lookup_min: longest and shortest suffix that `ngram` looks up, in tokens; None for 4
            and 2. Only for `ngram`; in a mixture they are its part's.
        tree_width: tokens drafted for each position; above 1 the draft is a tree of at most `num_speculative_tokens`
            nodes, for `block` the best such tree whatever the width. Not for `prediction`.
        corrector: `none` runs a block drafter's backbone uncorrected; None takes the drafter's own corrector, and
            its name may be given, too.
        adaptive: draft at most `num_speculative_tokens`, and as many as give the most tokens per second, none where
            speculation does not pay; False always drafts as many as there is room for.
        explain_lengths: a file, or `-` for stderr, for one line a step on the lengths chosen; only with `adaptive`.
        drafters: the parts of a `mixture`, two or more. Of theirs count `method`, `model`, the lookup sizes, and
            `num_speculative_tokens`, which shortens the drafts of that one.
    """

    method: str | None = None
    model: str | None = None
    num_speculative_tokens: int = DEFAULT_NUM_SPECULATIVE_TOKENS
    verification: str | None = None
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None
    tree_width: int = 1
    corrector: str | None = None
    adaptive: bool = True
    explain_lengths: str | None = None
    drafters: tuple[SpeculativeConfig, ...] = ()

    def __post_init__(self) -> None:
        if self.method is None and self.model is not None:
            object.__setattr__(self, "method", _method_of(self.model))
        if self.method is not None:
            require_choice("method", self.method, METHODS)
        require_at_least("num_speculative_tokens", self.num_speculative_tokens, 1)
        if self.verification is not None:
            require_choice("verification", self.verification, VERIFICATIONS)
        self._check_lookup()
        require_at_least("tree_width", self.tree_width, 1)
        require(isinstance(self.adaptive, bool), f"adaptive: {self.adaptive!r} is neither true nor false")
        require(
            self.explain_lengths is None or self.adaptive,
            "explain_lengths: with fixed lengths there is nothing to explain; leave out adaptive=False (--no-adaptive)",
        )
        require(
            self.tree_width <= self.num_speculative_tokens,
            f"tree_width: {self.tree_width} is above num_speculative_tokens {self.num_speculative_tokens}, so not even "
            "one position's tokens would fit",
        )
        require(
            self.tree_width == 1 or self.method != "prediction",
            "tree_width: a prediction is one text, not a tree; use another method",
        )
        require(
            self.tree_width == 1 or self.verification != "block",
            "verification: the block rule is for chains; with tree_width above 1 use token or coupled",
        )
        self._check_drafters()
        if self.method == "draft_model":
            require(self.model is not None, "method draft_model needs a draft model: give model= (--speculative-model)")
        require(
            self.model is None or self.method in ("block", "draft_model"),
            f"method {self.method} takes no draft model, but model={self.model!r} was given",
        )
        require(
            self.corrector is None or self.method in ("block", None),
            f"corrector: method {self.method} has none; it is for method block",
        )

    def resolved(self, target: str) -> SpeculativeConfig:
        """This configuration with a method, when it was left to the target ("" when that is not known)."""
        if self.drafters:
            return replace(self, drafters=tuple(each.resolved(target) for each in self.drafters))
        if self.method is not None:
            return self
        if target != DEMO:
            return replace(self, method="ngram")
        if self.tree_width > 1 or self.corrector is not None:
            return replace(self, method="block")
        # Look-up is unbeaten where a text repeats itself, the drafter elsewhere.
        block = SpeculativeConfig("block", num_speculative_tokens=min(self.num_speculative_tokens, DEMO_DRAFTS))
        ngram = SpeculativeConfig(
            "ngram",
            num_speculative_tokens=self.num_speculative_tokens,
            prompt_lookup_max=self.prompt_lookup_max,
            prompt_lookup_min=self.prompt_lookup_min,
        )
        drafters = (block, ngram)
        return replace(self, method="mixture", drafters=drafters, prompt_lookup_max=None, prompt_lookup_min=None)

    @property
    def lookup_sizes(self) -> tuple[int, int]:
        """Shortest and longest suffix that `ngram` looks up."""
        shortest, longest = DEFAULT_PROMPT_LOOKUP
        shortest = shortest if self.prompt_lookup_min is None else self.prompt_lookup_min
        return shortest, longest if self.prompt_lookup_max is None else self.prompt_lookup_max

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods at work: a mixture's parts', or the one."""
        return tuple(str(each.method) for each in self.drafters or (self,))

    def _check_lookup(self) -> None:
        for name in ("prompt_lookup_max", "prompt_lookup_min"):
            value = getattr(self, name)
            if value is None:
                continue
            require_at_least(name, value, 1)
            where = "give it to its ngram part" if self.method == "mixture" else "it is for method ngram"
            require(self.method in ("ngram", None), f"{name}: method {self.method} looks nothing up; {where}")
        shortest, longest = self.lookup_sizes
        require(longest >= shortest, f"prompt_lookup_max: {longest} is below prompt_lookup_min {shortest}")

    def _check_drafters(self) -> None:
        if self.method != "mixture":
            require(not self.drafters, f"drafters: they are for method mixture, not {self.method}")
            return
        require(
            len(self.drafters) >= 2,
            f"drafters: a mixture needs at least two, not {len(self.drafters)} (--speculative-config)",
        )
        require(self.tree_width == 1, "tree_width: a mixture drafts chains; leave it at 1")
        for drafter in self.drafters:
            known = isinstance(drafter, SpeculativeConfig)
            require(known, f"drafters: {drafter!r} is not a SpeculativeConfig")
            require(drafter.method != "mixture", "drafters: a mixture of mixtures is not supported; list the drafters")
            require(drafter.tree_width == 1, "drafters: a mixture drafts chains; leave tree_width at 1")
            whole = drafter.verification is None and drafter.adaptive and drafter.explain_lengths is None
            require(whole, "drafters: verification, adaptive and explain_lengths are the mixture's, not a drafter's")


def _method_of(model: str) -> str:
    """`block` for the directory of a block drafter, by its own configuration; else `draft_model`."""
    try:
        found = json.loads((Path(model).expanduser() / "config.json").read_text(encoding="utf-8"))
        return "block" if BLOCK_ARCHITECTURE in found["architectures"] else "draft_model"
    except (OSError, ValueError, KeyError, TypeError):
        return "draft_model"  # a hub id or a file; what is wrong with a directory is told when it is loaded


@dataclass(frozen=True)
class EngineConfig:
    """The target and the engine around it.

    Args:
        model: a directory, a hub id in the local cache, a `.gguf` file, or `demo`.
        dtype: `float32` or `bfloat16`, of weights and KV cache.
        device: `cpu`, `cuda`, `cuda:N`, or `auto` (CUDA where there is one).
        max_model_len: longest prompt plus output in tokens; None takes the model's own.
        block_size: tokens per KV-cache block.
        kv_cache_memory: bytes for the KV cache; None takes enough for `max_num_seqs` full contexts, at most a
            quarter of the free memory.
        gpu_memory_utilization: on CUDA, instead of `kv_cache_memory`: the share of the device's memory that this engine
            takes in all. What weights and the largest forward leave of it, which is measured, is for the KV cache.
        max_num_seqs: requests that run at once.
        max_num_batched_tokens: tokens in one target forward; longer prompts are prefilled in chunks.
        enable_prefix_caching: requests whose texts begin alike share the full KV-cache blocks that they have in common,
            also with finished ones for as long as memory allows.
        invariant: every token's logits have the same bits in any company, so that greedy and seeded tokens do not
            depend on drafts or batch mates in bfloat16 either. Free with our CPU kernels; elsewhere it costs batching.
        quantization: must be None: weights are read in the format that the model's files have, and no other.
        tensor_parallel_size: must be 1: the engine runs on one device.
        skip_tokenizer_init: for models without a tokenizer: prompts and outputs are token ids only.
    """

    model: str
    dtype: str = "bfloat16"
    device: str = "auto"
    tokenizer: str | None = None
    max_model_len: int | None = None
    block_size: int = 16
    kv_cache_memory: int | None = None
    gpu_memory_utilization: float | None = None
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 2048
    enable_prefix_caching: bool = True
    invariant: bool = False
    quantization: str | None = None
    tensor_parallel_size: int = 1
    skip_tokenizer_init: bool = False
    trust_remote_code: bool = False
    speculative: SpeculativeConfig | None = field(default=None)

    def __post_init__(self) -> None:
        if self.speculative is not None:
            # A block drafter needs more of its target than one at a fixed shape shows.
            target = "" if self.invariant else self.model
            object.__setattr__(self, "speculative", self.speculative.resolved(target))
        require_choice("dtype", self.dtype, DTYPES)
        require(
            self.device in ("auto", "cpu", "cuda") or self.device.startswith("cuda:"),
            f"device: unknown value {self.device!r}; allowed: auto, cpu, cuda, cuda:N",
        )
        require_at_least("block_size", self.block_size, 1)
        require_at_least("max_num_seqs", self.max_num_seqs, 1)
        require_at_least("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        require(
            self.max_num_batched_tokens >= self.max_num_seqs,
            f"max_num_batched_tokens: {self.max_num_batched_tokens} is below max_num_seqs {self.max_num_seqs}, "
            "so not every running request could decode in a step",
        )
        if self.max_model_len is not None:
            require_at_least("max_model_len", self.max_model_len, 1)
        if self.kv_cache_memory is not None:
            require_at_least("kv_cache_memory", self.kv_cache_memory, 1)
        if self.gpu_memory_utilization is not None:
            self._check_utilization(self.gpu_memory_utilization)
        require(
            self.quantization is None,
            f"quantization: {self.quantization!r} is not supported; leave it out and give an unquantised model, or a "
            ".gguf file, whose weights are unpacked to dtype as they load",
        )
        require_at_least("tensor_parallel_size", self.tensor_parallel_size, 1)
        require(
            self.tensor_parallel_size == 1,
            f"tensor_parallel_size: {self.tensor_parallel_size} devices were asked for, but the engine runs on one; "
            "leave it at 1, and choose the device with device (--device cuda:N)",
        )

    def _check_utilization(self, share: float) -> None:
        good = isinstance(share, int | float) and not isinstance(share, bool) and 0 < share <= 1
        require(good, f"gpu_memory_utilization: {share!r} is not a share above 0 and up to 1")
        require(self.device != "cpu", UTILIZATION_NEEDS_CUDA)
        require(
            self.kv_cache_memory is None,
            "gpu_memory_utilization: contradicts kv_cache_memory, which says how much memory the cache takes; give one "
            "of them",
        )
