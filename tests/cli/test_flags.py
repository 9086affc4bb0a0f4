"""The choices that flags offer, which are written out so that the command line starts without torch."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from foredraft.cli import flags, train
from foredraft.config import DTYPES, METHODS, VERIFICATIONS, SpeculativeConfig
from foredraft.draft.correctors import CORRECTORS
from foredraft.errors import ConfigError
from foredraft.train.losses import LOSSES
from foredraft.train.objective import WEIGHTS, Objective


@pytest.mark.parametrize(
    ("offered", "known"),
    [
        (flags.Dtype, DTYPES),
        (flags.Method, METHODS),
        (flags.Verification, VERIFICATIONS),
        (train.Corrector, CORRECTORS),
        (train.Loss, LOSSES),
        (train.Weights, WEIGHTS),
    ],
)
def test_flags_offer_what_there_is(offered: Any, known: Any) -> None:
    assert set(get_args(offered)) == set(known)


def test_an_unknown_objective_is_refused_with_what_there_is() -> None:
    with pytest.raises(ConfigError, match="loss: unknown value 'mse'; allowed: ce, tv, nla, lk, dspark"):
        Objective(loss="mse")
    with pytest.raises(ConfigError, match="weights: unknown value 'even'; allowed: exponential, dpace"):
        Objective(weights="even")


def test_lookup_sizes_reach_the_drafter_that_looks_up() -> None:
    assert SpeculativeConfig("ngram").lookup_sizes == (2, 4)
    chosen = SpeculativeConfig(prompt_lookup_min=1, prompt_lookup_max=6)
    assert chosen.resolved("elsewhere").lookup_sizes == (1, 6)
    mixture = chosen.resolved("demo")
    assert [each.lookup_sizes for each in mixture.drafters if each.method == "ngram"] == [(1, 6)]
    assert mixture.resolved("demo") == mixture
    assert SpeculativeConfig().resolved("demo").methods == ("block", "ngram")
