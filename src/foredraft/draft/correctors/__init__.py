"""Causal correctors by name. A drafter's configuration names one and its options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from foredraft.draft.correctors.bilinear import Bilinear
from foredraft.draft.correctors.chain import ChainCorrector
from foredraft.draft.correctors.confidence import ConfidenceHead
from foredraft.draft.correctors.corrector import Corrected, Corrector, FirstOrder, Sizes
from foredraft.draft.correctors.lattice_transformer import LatticeTransformer
from foredraft.draft.correctors.markov import Gated, Markov
from foredraft.draft.correctors.recurrent import Gru, Rnn
from foredraft.draft.correctors.sampler import SlotSampler
from foredraft.draft.correctors.unary import Uncorrected
from foredraft.errors import DrafterError

__all__ = [
    "CORRECTORS",
    "Corrected",
    "Corrector",
    "FirstOrder",
    "Sizes",
    "SlotSampler",
    "make_corrector",
    "makes_trees",
]

CORRECTORS: dict[str, type[Any]] = {
    "none": Uncorrected,
    "markov": Markov,
    "gated": Gated,
    "rnn": Rnn,
    "gru": Gru,
    "bilinear": Bilinear,
    "lattice": LatticeTransformer,
    "chain": ChainCorrector,
}
"""Classes of `Corrector`; their keyword arguments are the options that a configuration may give."""


def makes_trees(name: str) -> bool:
    """Whether trees can be drafted with a corrector: its candidates must form a chain, whose best tree is known."""
    return issubclass(CORRECTORS[name], FirstOrder)


def make_corrector(
    name: str, sizes: Sizes, options: Mapping[str, Any], *, confidence: Mapping[str, Any] | None = None
) -> Corrector:
    """A corrector with fresh weights.

    Args:
        options: of the corrector, by the names of its class.
        confidence: options of a confidence head; None for no head.

    Raises:
        DrafterError: an unknown name or option.
    """
    if name not in CORRECTORS:
        raise DrafterError(f"corrector: unknown value {name!r}; allowed: {', '.join(CORRECTORS)}")
    try:
        corrector: Corrector = CORRECTORS[name](sizes, **options)
    except TypeError as error:
        raise DrafterError(f"corrector {name}: {str(error).split('__init__() ')[-1]}") from error
    if name == "lattice" and corrector.num_candidates is None:
        raise DrafterError("corrector lattice: num_candidates must be given, it scores candidates only")
    if confidence is not None:
        corrector.confidence_head = ConfidenceHead(
            sizes.hidden_size, corrector.predecessor_size, sizes.num_slots, **confidence
        )
    return corrector
