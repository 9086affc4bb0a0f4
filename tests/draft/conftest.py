"""A tiny random target for drafters that read its features, embedding and head."""

from __future__ import annotations

import pytest
from tests.models.tiny import save_tiny

from foredraft.config import EngineConfig
from foredraft.models.decoder import TargetModel
from foredraft.models.load import load_model


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    directory = tmp_path_factory.mktemp("target")
    save_tiny(directory, "llama", eos_token_id=None)
    config = EngineConfig(str(directory), dtype="float32", device="cpu", skip_tokenizer_init=True)
    return load_model(config).model
