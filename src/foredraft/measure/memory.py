"""Peak memory of this process, or of the device where the model lies."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def reset_peak(device: torch.device) -> None:
    """Starts a new peak. Where the system cannot, the peak stays that of the whole process so far."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        _CLEAR.write_text("5")
    except OSError:
        return


def peak_memory(device: torch.device) -> int:
    """Bytes at the peak since `reset_peak`: device memory on CUDA, else resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return process_peak()


def process_peak() -> int:
    """Bytes of resident memory at the peak of the whole process, loading included."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
