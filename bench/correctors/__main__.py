"""Compares causal correctors on one backbone, with the same texts and the same number of steps for each.

Run after `foredraft train --out DIR …`, whose work folder has the texts and the backbone:

    .venv/bin/python -m bench.correctors --drafter DIR --prompts ../shared/prompts/chat.jsonl … --out docs/correctors

Every corrector starts on the backbone as its own stage left it, frozen, and is trained for `--epochs` passes. What is
reported was measured by the engine: τ by domain with 95 % intervals over prompts, acceptance by slot, and where a
step's time goes, at temperature 0 and 1, for chains under token and block verification, and for trees.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench.correctors.report import write_report

from foredraft import LLM, SamplingParams, SpeculativeConfig
from foredraft.config import EngineConfig
from foredraft.draft.backbone_config import with_corrector
from foredraft.draft.block_model import BlockModel, load_block_model, save_block_model
from foredraft.draft.correctors import CORRECTORS, makes_trees
from foredraft.measure.prompts import encoded, read_prompts
from foredraft.models.decoder import Decoder
from foredraft.models.load import load_model
from foredraft.train.evaluate import calibrate_confidence, slot_figures
from foredraft.train.objective import Objective
from foredraft.train.plan import CALIBRATION, EVALUATION, FEATURES
from foredraft.train.trainer import Network, Settings, Stage, Trainer, after_stage


@dataclass(frozen=True)
class Setting:
    """One way to decode: its name in tables, and the flags behind it."""

    name: str
    temperature: float
    verification: str | None
    tree: bool


SETTINGS = (
    Setting("greedy chain", 0.0, None, False),
    Setting("greedy tree", 0.0, None, True),
    Setting("T=1 token", 1.0, "token", False),
    Setting("T=1 block", 1.0, "block", False),
    Setting("T=1 tree", 1.0, "token", True),
)


def train_corrector(
    name: str, drafter: Path, target: Decoder, epochs: int, num_files: int | None, out: Path
) -> dict[str, Any]:
    """Trains one corrector on the frozen backbone into `out`, unless it is there; its teacher-forced figures."""
    figures = out / "slots.json"
    if figures.exists():
        return dict(json.loads(figures.read_text(encoding="utf-8")))
    torch.manual_seed(0)
    shipped = load_block_model(drafter)
    options = {} if name == "none" else {"num_candidates": 16}
    model = BlockModel(with_corrector(shipped.config, name, **options), shipped.draft_ids)
    model.bind(target.embed)
    state = torch.load(drafter / "work" / after_stage("backbone"), weights_only=True)
    prefix = "backbone."
    model.backbone.load_state_dict({key[len(prefix) :]: v for key, v in state.items() if key.startswith(prefix)})
    network = Network(model, target)
    stages = (Stage("corrector", epochs, 0.0, 2e-3, (0.0, 0.0)),)
    out.mkdir(parents=True, exist_ok=True)
    files, calibration, evaluation = (
        sorted((drafter / "work" / folder).glob("*.safetensors")) for folder in (FEATURES, CALIBRATION, EVALUATION)
    )
    trainer = Trainer(network, files[:num_files], Settings(stages, Objective(), anchors=32), out)
    trainer.run(lambda each: print(f"\r{name}: {each.done}/{each.total} {each.alpha}", end="", file=sys.stderr))
    print(file=sys.stderr)
    calibrate_confidence(network, calibration)
    save_block_model(model, out, torch.bfloat16)
    found = vars(slot_figures(network, evaluation))
    parameters = sum(each.numel() for each in model.corrector.parameters())
    found = {**found, "parameters": parameters}
    figures.write_text(json.dumps(found, indent=2), encoding="utf-8")
    return dict(json.loads(figures.read_text(encoding="utf-8")))


def decode(
    name: str, directory: Path, prompts: dict[str, list[str]], setting: Setting, max_tokens: int
) -> dict[str, Any]:
    """One corrector in one setting over all prompts, one at a time."""
    slots = load_block_model(directory).config.num_draft_tokens
    speculative = SpeculativeConfig(
        method="block",
        model=str(directory),
        num_speculative_tokens=2 * slots if setting.tree else slots,
        verification=setting.verification,
        tree_width=2 if setting.tree else 1,
        adaptive=False,
    )
    llm = LLM("demo", speculative=speculative)
    params = SamplingParams(max_tokens=max_tokens, temperature=setting.temperature)
    lengths: dict[str, list[float]] = {}
    for domain, texts in prompts.items():
        for text in texts:
            stats = llm.generate([encoded(llm, text)], params)[0].stats
            if stats.num_steps:
                lengths.setdefault(domain, []).append(stats.mean_acceptance_length)
    times, steps = llm.times, max(llm.times.num_steps, 1)
    everything = [each for domain in lengths.values() for each in domain]
    return {
        "corrector": name,
        "setting": setting.name,
        "tau": {domain: interval(values) for domain, values in [*lengths.items(), ("all", everything)]},
        "tau_by_prompt": lengths,
        "acceptance_rate": llm.stats.acceptance_rate,
        "acceptance_rate_per_position": list(llm.stats.acceptance_rate_per_position),
        "draft_ms": 1e3 * times.draft / steps,
        "verify_ms": 1e3 * (times.forward + times.sample) / steps,
        "step_ms": 1e3 * (times.schedule + times.draft + times.forward + times.sample + times.commit) / steps,
    }


def interval(values: Sequence[float], resamples: int = 2000) -> dict[str, float]:
    """The mean over prompts and its 95 % bootstrap interval."""
    random = np.random.default_rng(0)
    array = np.asarray(values)
    means = array[random.integers(len(array), size=(resamples, len(array)))].mean(1)
    low, high = np.percentile(means, [2.5, 97.5])
    return {"mean": float(array.mean()), "low": float(low), "high": float(high)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafter", type=Path, required=True, help="trained by foredraft train, with its work folder")
    parser.add_argument("--prompts", type=Path, nargs="+", required=True, help="a file for each domain")
    parser.add_argument("--limit", type=int, default=20, help="prompts of each domain")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--files", type=int, help="feature files to train on; all of them")
    parser.add_argument("--settings", nargs="+", default=[each.name for each in SETTINGS])
    parser.add_argument("--train-only", action="store_true", help="leave the decoding for a quiet machine")
    parser.add_argument("--correctors", nargs="+", default=list(CORRECTORS), choices=list(CORRECTORS))
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    target = load_model(EngineConfig("demo")).model
    assert isinstance(target, Decoder)
    prompts = {
        path.stem: [record.prompt for record in read_prompts(path)][: arguments.limit] for path in arguments.prompts
    }
    slots, runs = {}, []
    for name in arguments.correctors:
        out = arguments.out / "drafters" / name
        slots[name] = train_corrector(name, arguments.drafter, target, arguments.epochs, arguments.files, out)
    if arguments.train_only:
        return
    for setting in [each for each in SETTINGS if each.name in arguments.settings]:
        for name in arguments.correctors:
            if setting.tree and not makes_trees(name):
                continue
            print(f"{setting.name}: {name}", file=sys.stderr)
            runs.append(decode(name, arguments.out / "drafters" / name, prompts, setting, arguments.max_tokens))
    figures = {"command": " ".join(sys.argv[1:]), "slots": slots, "runs": runs}
    (arguments.out / "figures.json").write_text(json.dumps(figures, indent=2), encoding="utf-8")
    write_report(figures, arguments.out)


if __name__ == "__main__":
    main()
