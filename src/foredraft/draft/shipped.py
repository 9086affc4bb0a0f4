"""The block drafter that comes with the package, trained by `foredraft train` for the demo model."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

SHIPPED_NAME = "foredraft-smollm2-135m-chain"


def shipped_drafter() -> Path:
    """Its directory; what it was made from and what it reaches stands in its README."""
    return Path(str(files("foredraft") / "data" / "drafters" / SHIPPED_NAME))
