"""The fallback: transformers' own models over the paged cache, against the same models run plainly."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny import Session, save_tiny

from foredraft.config import EngineConfig
from foredraft.errors import ModelError
from foredraft.models.hf import HFModel
from foredraft.models.load import load_model

CASES = {
    "gpt2": {"n_embd": 36, "n_layer": 3, "n_head": 6, "n_positions": 96},
    "mixtral": {"num_local_experts": 4, "sliding_window": None, "intermediate_size": 52},
    "phi": {"head_dim": 8, "num_key_value_heads": 6, "partial_rotary_factor": 0.5, "hidden_size": 48},
    "gemma2": {"sliding_window": 5, "final_logit_softcapping": 5.0},
    "gpt_neox": {"rotary_pct": 0.5, "hidden_size": 48},
}
IDS = torch.randint(3, 101, (29,), generator=torch.Generator().manual_seed(5)).tolist()
OTHER = torch.randint(3, 101, (11,), generator=torch.Generator().manual_seed(6)).tolist()


def load(path, **settings) -> HFModel:
    config = EngineConfig(str(path), dtype="float32", device="cpu", skip_tokenizer_init=True, **settings)
    model = load_model(config).model
    assert isinstance(model, HFModel)
    return model


@pytest.mark.parametrize("family", CASES)
def test_logits_equal_the_model_run_plainly(family, tmp_path):
    reference = save_tiny(tmp_path, family, **CASES[family])
    model = load(tmp_path)
    with torch.inference_mode():
        a = reference(torch.tensor([IDS])).logits[0]
        b = reference(torch.tensor([OTHER])).logits[0]
    assert a.std() > 0.1
    for chunk in (29, 1, 7):
        assert (Session(model).logits(IDS, chunk) - a).abs().max() < 1e-3, f"chunks of {chunk}"
    session = Session(model)
    session.run({"a": IDS[:9]})
    session.run({"b": OTHER[:4], "a": IDS[9:10]})
    last = session.run({"a": IDS[10:], "b": OTHER[4:]}).logits
    assert (last - torch.cat([a[10:], b[4:]])).abs().max() < 1e-3


def test_features_and_the_rows_asked_for(tmp_path):
    reference = save_tiny(tmp_path, "gpt2", **CASES["gpt2"])
    model = load(tmp_path)
    last = []
    reference.transformer.h[-1].register_forward_hook(
        lambda _m, _i, out: last.append(out[0] if isinstance(out, tuple) else out)
    )
    with torch.inference_mode():
        states = reference(torch.tensor([IDS]), output_hidden_states=True).hidden_states
    session = Session(model)
    session.run({"a": IDS[:20]})
    batch = replace(session.batch({"a": IDS[20:], "b": OTHER}), logits_indices=torch.tensor([8, 0]))
    output = model.forward(batch, session.cache, (2, 0))
    assert output.hidden.shape == (20, 36)
    assert output.logits.shape == (2, 101)
    want = last[0].reshape(states[1].shape)[0, 20:]
    assert (output.features[0][:9] - want).abs().max() < 1e-4
    assert (output.features[1][:9] - states[1][0, 20:]).abs().max() < 1e-4
    assert (output.hidden[:9] - states[-1][0, 20:]).abs().max() < 1e-4


def test_sizes(tmp_path):
    save_tiny(tmp_path, "mixtral", **CASES["mixtral"])
    model = load(tmp_path)
    config = model.config
    assert (config.architecture, config.num_layers, config.num_kv_heads, config.head_dim) == ("mixtral", 3, 2, 10)
    assert (config.vocab_size, config.max_model_len, config.eos_token_ids) == (101, 96, (2,))
    assert model.kv_bytes_per_token == 3 * 2 * 2 * 10 * 4
    assert model.new_cache(4, 16).k.shape[:3] == (3, 4, 2)


def test_models_without_plain_keys_and_values_are_refused_by_name(tmp_path):
    save_tiny(tmp_path / "mamba", "mamba")
    with pytest.raises(ModelError, match="MambaForCausalLM .* one key and one value per token and layer"):
        load(tmp_path / "mamba")


def test_damaged_weights_are_refused(tmp_path):
    save_tiny(tmp_path, "gpt2", **CASES["gpt2"])
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-7])
    with pytest.raises(ModelError, match="transformers cannot load it"):
        load(tmp_path)


def test_draft_trees_are_refused(tmp_path):
    save_tiny(tmp_path, "gpt2", **CASES["gpt2"])
    session = Session(load(tmp_path))
    batch = replace(session.batch({"a": IDS[:3]}), tree_mask=torch.ones(3, 3, dtype=torch.bool))
    with pytest.raises(ModelError, match="draft trees"):
        session.model.forward(batch, session.cache)
