"""foredraft: exact, fast speculative decoding.

from foredraft import LLM, SamplingParams, SpeculativeConfig
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from foredraft.config import SpeculativeConfig

if TYPE_CHECKING:
    from foredraft.engine.llm import LLM
    from foredraft.sampling.params import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "SpeculativeConfig", "__version__"]


def __getattr__(name: str) -> Any:
    """Imports what needs torch when it is first used, so that a wrong flag is refused at once."""
    if name == "LLM":
        from foredraft.engine.llm import LLM

        return LLM
    if name == "SamplingParams":
        from foredraft.sampling.params import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'foredraft' has no attribute {name!r}")
