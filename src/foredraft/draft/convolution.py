"""Two-tap causal convolutions along a block, before and after each sublayer of a backbone (DFlash 2).

They let a slot see its neighbour before attention has mixed them. Both start as the identity.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class CausalConvolution(nn.Module):
    """A depthwise convolution on a sublayer's input, and one on its output, with kernels that the input
    adjusts.

    Args:
        hidden_size: d.
        taps: slots that are mixed, the own one included.
        group_size: channels that share a dynamic kernel; 0 for static kernels only.
    """

    def __init__(self, hidden_size: int, taps: int, group_size: int) -> None:
        super().__init__()
        self.taps, self.group_size = taps, group_size
        self.groups = hidden_size // group_size if group_size else 0
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, hidden_size))
        with torch.no_grad():
            self.base_kernel[:, 0] = 1.0
        self.kernel_projection = None
        if group_size:
            self.kernel_projection = nn.Linear(hidden_size, 2 * taps * self.groups, bias=False)
            nn.init.zeros_(self.kernel_projection.weight)

    def prepare(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """A sublayer's input [..., n, d] to the convolved input, and the kernel [..., n, taps, d] for its
        output."""
        kernels = self.base_kernel.to(x.dtype)  # [2, taps, d]
        if self.kernel_projection is None:
            return _convolved(x, kernels[0]), kernels[1]
        dynamic = self.kernel_projection(x).reshape(*x.shape[:-1], 2, self.taps, self.groups)
        kernels = kernels + dynamic.repeat_interleave(x.shape[-1] // self.groups, dim=-1)
        return _convolved(x, kernels[..., 0, :, :]), kernels[..., 1, :, :]

    def finish(self, x: Tensor, kernel: Tensor) -> Tensor:
        """A sublayer's output [..., n, d], convolved by the kernel that `prepare` gave."""
        return _convolved(x, kernel)


def _convolved(x: Tensor, kernel: Tensor) -> Tensor:
    """Σ_j kernel[.., j, :] · x[.., slot - j, :], with nothing before the block."""
    out = kernel[..., 0, :] * x
    for tap in range(1, min(kernel.shape[-2], x.shape[-2])):
        out = out + kernel[..., tap, :] * F.pad(x, (0, 0, tap, 0))[..., : x.shape[-2], :]
    return out
