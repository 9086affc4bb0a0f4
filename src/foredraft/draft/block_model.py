"""A block drafter's weights as one: backbone, corrector and draft vocabulary, and their directory on disk.

`model.safetensors` has the tensor names of published DFlash, DSpark, DFlash 2 and Domino drafters where they
have one.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from foredraft.draft.backbone import Backbone
from foredraft.draft.backbone_config import BlockConfig, from_json, to_json, with_corrector
from foredraft.draft.correctors import Sizes, make_corrector
from foredraft.draft.correctors.corrector import Embed
from foredraft.errors import DrafterError
from foredraft.models.weights import read_json

DRAFT_IDS = "d2t"
"""Offsets from draft to target ids, as EAGLE-3 stores them."""


class BlockModel(nn.Module):
    """The trained parts of a block drafter.

    Args:
        draft_ids: [Vd] target ids of the draft vocabulary, ascending; None when it is the target's.
    """

    def __init__(self, config: BlockConfig, draft_ids: Tensor | None = None) -> None:
        super().__init__()
        if (None if draft_ids is None else len(draft_ids)) != config.draft_vocab_size:
            raise DrafterError(f"draft_vocab_size: {config.draft_vocab_size} does not fit the list of draft token ids")
        self.config = config
        self.backbone = Backbone(config)
        sizes = Sizes(config.hidden_size, config.vocab_size, config.num_draft_tokens, draft_ids)
        self.corrector = make_corrector(config.corrector, sizes, config.corrector_options, confidence=config.confidence)

    @property
    def draft_ids(self) -> Tensor | None:
        return self.corrector.draft_ids

    def bind(self, embed: Embed) -> None:
        """Gives access to the target's embeddings."""
        self.corrector.bind(embed)

    def start_from(self, other: BlockModel) -> None:
        """Copies the weights that both have; what only this drafter has stays as it is."""
        theirs = other.tensors()
        with torch.no_grad():
            for name, value in self.tensors().items():
                if name in theirs and theirs[name].shape == value.shape:
                    value.copy_(theirs[name])

    def tensors(self) -> dict[str, Tensor]:
        """All weights under the names that they have on disk."""
        named: dict[str, Tensor] = dict(self.backbone.state_dict())
        for name, value in self.corrector.state_dict().items():
            own = name.startswith("confidence_head.")
            named[name if own else self.corrector.prefix + name] = value
        return named


def uncorrected(model: BlockModel) -> BlockModel:
    """The same backbone without its corrector: the baseline that a corrector is measured against."""
    bare = BlockModel(replace(with_corrector(model.config, "none"), confidence=None), model.draft_ids)
    bare.backbone.load_state_dict(model.backbone.state_dict())
    return bare.eval()


def save_block_model(model: BlockModel, directory: Path, dtype: torch.dtype = torch.float32) -> None:
    """Writes `config.json` and `model.safetensors`, with weights in `dtype`."""
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.detach().to("cpu", dtype).contiguous() for name, value in model.tensors().items()}
    if model.draft_ids is not None:
        ids = model.draft_ids.cpu()
        tensors[DRAFT_IDS] = ids - torch.arange(len(ids))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = {**to_json(model.config), "dtype": str(dtype).removeprefix("torch.")}
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load_block_model(directory: Path) -> BlockModel:
    """Reads what `save_block_model` wrote; weights become float32.

    Raises:
        DrafterError: a file that is missing, damaged or of another kind, or tensors that do not fit the
            configuration: says which are missing, surplus or of a wrong shape.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    for name in ("config.json", "model.safetensors"):
        if not (directory / name).is_file():
            raise DrafterError(f"{directory}: {name} is missing; is it a drafter's directory?")
    config = from_json(read_json(directory / "config.json"), str(directory / "config.json"))
    file = directory / "model.safetensors"
    try:
        found = load_file(file)
    except (SafetensorError, OSError) as error:
        raise DrafterError(f"{file}: not readable as safetensors ({error}); get the file again") from error
    offsets = found.pop(DRAFT_IDS, None)
    draft_ids = None if offsets is None else offsets + torch.arange(len(offsets))
    model = BlockModel(config, draft_ids)
    _fill(model, found, str(file))
    return model.eval()


def _fill(model: BlockModel, found: dict[str, Tensor], where: str) -> None:
    wanted = model.tensors()
    missing = sorted(wanted.keys() - found.keys())
    surplus = sorted(found.keys() - wanted.keys())
    wrong = [
        f"{name} is {list(found[name].shape)}, not {list(value.shape)}"
        for name, value in wanted.items()
        if name in found and found[name].shape != value.shape
    ]
    problems = [f"missing: {_some(missing)}"] if missing else []
    problems += [f"surplus: {_some(surplus)}"] if surplus else []
    problems += [f"wrong shape: {_some(wrong)}"] if wrong else []
    if problems:
        raise DrafterError(f"{where}: does not fit its config.json ({'; '.join(problems)})")
    for name, value in wanted.items():
        value.copy_(found[name])


def _some(names: list[str], limit: int = 5) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
