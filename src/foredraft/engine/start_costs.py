"""An engine's costs at its start: those that the last run on the same model and machine kept, unless they turn out too
high, else measured ones."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import torch

from foredraft.config import EngineConfig, SpeculativeConfig
from foredraft.draft.drafter import Drafter
from foredraft.engine.adaptive import AdaptiveLengths
from foredraft.engine.calibration import are_too_high, measure_costs
from foredraft.engine.cost_file import Key, load_costs, save_costs
from foredraft.engine.costs import CostCurve
from foredraft.engine.explain import explanation
from foredraft.kv.cache import KVCache
from foredraft.models import native
from foredraft.models.decoder import TargetModel


def adaptive_policy(
    config: EngineConfig, model: TargetModel, cache: KVCache, drafter: Drafter, draft_bytes: int
) -> AdaptiveLengths:
    """The length policy of an engine that holds no request yet; measures its costs unless they are kept.

    Args:
        draft_bytes: of the draft model's weights, 0 without one.

    Raises `ConfigError` when the file for explanations cannot be written.
    """
    speculative = config.speculative
    assert speculative is not None
    explain = explanation(speculative.explain_lengths) if speculative.explain_lengths is not None else None
    key = key_of(config, speculative, model, draft_bytes)
    gamma, most = speculative.num_speculative_tokens, config.max_num_seqs
    costs = load_costs(key)
    if costs is None or are_too_high(costs, model, cache, gamma=gamma, max_num_seqs=most):
        costs = measure_costs(model, cache, drafter, gamma=gamma, max_num_seqs=most)
        save_costs(key, costs)
    return AdaptiveLengths(costs, tree_width=speculative.tree_width, explain=explain, save=_keeper(key))


def key_of(config: EngineConfig, speculative: SpeculativeConfig, model: TargetModel, draft_bytes: int) -> Key:
    """What costs depend on. Weights count by shape and size, not by value: training a model further changes no time."""
    shape = f"{type(model).__name__} {model.config!r} {model.weight_bytes}"
    parts = [(each.method, each.model) for each in speculative.drafters]
    drafting = f"{speculative.method} {speculative.model} {parts} {speculative.tree_width} {draft_bytes}"
    return {
        "model": hashlib.sha256(shape.encode()).hexdigest()[:16],
        "drafter": hashlib.sha256(drafting.encode()).hexdigest()[:16],
        "device": _device_name(model.device),
        "dtype": str(model.dtype),
        "threads": torch.get_num_threads(),
        "version": _version(),
        "gamma": speculative.num_speculative_tokens,
        "max_num_seqs": config.max_num_seqs,
    }


def _keeper(key: Key) -> Callable[[CostCurve], None]:
    return lambda costs: save_costs(key, costs)


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    kernels = "tiles" if native.has_amx() else "native" if native.available() else "torch"
    return f"cpu {_processor()} {torch.backends.cpu.get_cpu_capability()} {kernels}"


def _processor() -> str:
    """The processor's model, where the system says."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _version() -> str:
    try:
        return metadata.version("foredraft")
    except metadata.PackageNotFoundError:  # run from a checkout
        return "source"
