"""Speed and memory beside their goals: against transformers, a forward's cost, Python's share, memory.

Run: .venv/bin/python bench/goals.py [--json PATH]. Takes some minutes; each ratio is from one process.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

COMMAND = [sys.executable, "-c", "import sys; from foredraft.cli.main import main; sys.exit(main())", "bench"]
# About 256 tokens of context on average: prompts of 60 to 170 tokens with 192 to come.
COMMON = ["--max-tokens", "192", "--ignore-eos", "--rounds", "3", "--num-speculative-tokens", "7"]


def figures(*flags: str) -> dict[str, Any]:
    """The JSON of one bench."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "figures.json"
        print("foredraft bench", *COMMON, *flags, file=sys.stderr)
        subprocess.run([*COMMAND, *COMMON, *flags, "--json", str(path)], check=True, stdout=sys.stderr)
        return json.loads(path.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    runs = {
        "bfloat16 with transformers": figures("--dtype", "bfloat16", "--compare-transformers"),
        "float32 with transformers": figures("--dtype", "float32", "--compare-transformers"),
        "bfloat16": figures("--dtype", "bfloat16"),
    }
    alone = runs["bfloat16"]
    memory = alone["memory"]
    allowed = memory["weight_bytes"] + memory["kv_cache_bytes"] + 300e6
    rows = [
        (f"plain decoding / transformers, {dtype}", runs[f"{dtype} with transformers"], goal)
        for dtype, goal in (("bfloat16", 1.8), ("float32", 2.0))
    ]
    print(f"{'figure':<56}{'measured':>10}  goal")
    for name, run, goal in rows:
        print(f"{name:<56}{run['compared_with_transformers']['plain_gain']:>9.2f}×  at least {goal}×")
    wider = alone["forward_cost"]["ratio"]["median"]
    print(f"{'forward over 8 tokens / 1 token':<56}{wider:>9.2f}×  at most 1.25×")
    for mode, split in alone["step_time_fractions"].items():
        print(f"{f'outside the models, {mode}':<56}{split['outside_models']:>10.1%}  under 12%")
    print(
        f"{'peak memory / (weights + KV cache + 300 MB)':<56}"
        f"{memory['peak_memory_bytes'] / allowed:>9.2f}×  at most 1.15×"
    )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(runs, indent=2))


if __name__ == "__main__":
    main()
