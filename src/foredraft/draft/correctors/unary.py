"""`none`: every slot by itself, as in DFlash (2602.06036). The baseline of every comparison."""

from __future__ import annotations

import torch
from torch import Tensor

from foredraft.draft.correctors.corrector import FirstOrder, Sizes


class Uncorrected(FirstOrder):
    """Adds nothing."""

    def __init__(self, sizes: Sizes, num_candidates: int | None = None) -> None:
        super().__init__(sizes, num_candidates)

    def edges(self, hidden: Tensor, previous: Tensor, candidates: Tensor | None, first_slot: int = 0) -> Tensor:
        num_columns = self.sizes.num_columns if candidates is None else candidates.shape[-1]
        return torch.zeros(1, device=hidden.device).expand(*previous.shape, num_columns)
