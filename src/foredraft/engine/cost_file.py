"""Keeps cost curves between runs, a file per model, device and everything else that they depend on.

A file that is damaged, of another version or about something else is ignored and written anew.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from foredraft.engine.costs import CostCurve, Curve

Key = Mapping[str, str | int]


def cache_directory() -> Path:
    """Where this user's caches are: `$XDG_CACHE_HOME/foredraft/costs`, else under `~/.cache`."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    # The specification calls relative paths invalid.
    base = Path(home) if os.path.isabs(home) else Path.home() / ".cache"
    return base / "foredraft" / "costs"


def file_of(key: Key) -> Path:
    """The file for a key."""
    text = json.dumps(dict(key), sort_keys=True)
    return cache_directory() / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def load_costs(key: Key) -> CostCurve | None:
    """The curves kept for a key; None when there are none that can be used."""
    try:
        found = json.loads(file_of(key).read_text(encoding="utf-8"))
        if found["key"] != dict(key):
            return None
        drafts = {int(depth): _curve(curve) for depth, curve in found["drafts"].items()}
        costs = CostCurve(_curve(found["target"]), drafts, float(found["catch_up"]), float(found["rest"]))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    sound = all(0 <= value < math.inf for value in (costs.catch_up, costs.rest)) and min(drafts, default=1) > 0
    return costs if sound else None


def save_costs(key: Key, costs: CostCurve) -> None:
    """Keeps curves, at their live heights. A directory that cannot be written is no reason to fail."""
    content = {
        "key": dict(key),
        "target": _plain(costs.target),
        "drafts": {str(depth): _plain(curve) for depth, curve in costs.drafts.items()},
        "catch_up": costs.catch_up,
        "rest": costs.rest,
    }
    path = file_of(key)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        # Written whole and moved into place: another process reads the old file or the new one.
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".part")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as stream:
                json.dump(content, stream)
            os.replace(temporary, path)
        except OSError:
            os.unlink(temporary)
            raise


def _curve(found: Any) -> Curve:
    sizes, seconds = [int(size) for size in found["sizes"]], [float(value) for value in found["seconds"]]
    ascending = all(left < right for left, right in zip(sizes, sizes[1:], strict=False))
    good = ascending and len(sizes) == len(seconds) > 0 and sizes[0] > 0
    if not good or not all(0 < value < math.inf for value in seconds):
        raise ValueError("no curve")
    return Curve(sizes, seconds)


def _plain(curve: Curve) -> dict[str, Any]:
    scale = math.exp(curve.log_scale)
    return {"sizes": curve.sizes, "seconds": [value * scale for value in curve.seconds]}
