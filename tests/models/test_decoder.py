"""The decoder against transformers, on random models of every family in odd shapes."""

from __future__ import annotations

import inspect

import pytest
import torch
from tiny import Session, save_tiny
from torch import Tensor

from foredraft.config import EngineConfig
from foredraft.errors import ModelError
from foredraft.models import native
from foredraft.models.batch import ragged_batch
from foredraft.models.decoder import Decoder, ForwardOutput, truncated
from foredraft.models.load import load_model

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 24}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 24,
}
CASES = {
    "llama": ("llama", {}),
    "llama tied, biases": ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama one kv head, head_dim from sizes": ("llama", {"num_key_value_heads": 1, "head_dim": None}),
    "llama as many kv heads": ("llama", {"num_key_value_heads": 6}),
    "llama linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5}}),
    "llama dynamic": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
    ),
    "llama llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama yarn": ("llama", {"rope_parameters": YARN}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral window": ("mistral", {"sliding_window": 7}),
    "qwen2": ("qwen2", {}),
    "qwen2 tied, some layers slide": (
        "qwen2",
        {
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 1,
        },
    ),
    "qwen2 yarn": ("qwen2", {"rope_parameters": YARN}),
    "qwen3": ("qwen3", {}),
    "qwen3 biases, layer types": (
        "qwen3",
        {
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}
IDS = torch.randint(0, 101, (41,), generator=torch.Generator().manual_seed(5)).tolist()
OTHER = torch.randint(0, 101, (17,), generator=torch.Generator().manual_seed(6)).tolist()


def load(directory, **settings) -> Decoder:
    config = EngineConfig(
        **{
            "model": str(directory),
            "dtype": "float32",
            "device": "cpu",
            "skip_tokenizer_init": True,
            **settings,
        }
    )
    model = load_model(config).model
    assert isinstance(model, Decoder)
    return model


def transformers_logits(reference, ids: list[int]) -> Tensor:
    with torch.inference_mode():
        return reference(torch.tensor([ids])).logits[0]


def difference(a: Tensor, b: Tensor) -> float:
    return (a.float() - b.float()).abs().max().item()


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers_however_the_text_is_fed(case, tmp_path):
    family, overrides = CASES[case]
    reference = save_tiny(tmp_path, family, **overrides)
    model = load(tmp_path)
    want = transformers_logits(reference, IDS)
    assert want.std() > 0.5  # logits that all lie at 0 would agree with anything
    for chunk in (len(IDS), 1, 7, 13):
        assert difference(Session(model).logits(IDS, chunk), want) < 1e-3, f"chunks of {chunk}"


@pytest.mark.parametrize("case", ["llama", "mistral window", "qwen3 biases, layer types"])
def test_ragged_requests_in_one_batch_do_not_mix(case, tmp_path):
    family, overrides = CASES[case]
    reference = save_tiny(tmp_path, family, **overrides)
    session = Session(load(tmp_path))
    a, b = transformers_logits(reference, IDS), transformers_logits(reference, OTHER)
    first = session.run({"a": IDS[:9]}).logits
    second = session.run({"b": OTHER[:4], "a": IDS[9:10]}).logits
    third = session.run({"a": IDS[10:31], "b": OTHER[4:17]}).logits
    assert difference(first, a[:9]) < 1e-3
    assert difference(second, torch.cat([b[:4], a[9:10]])) < 1e-3
    assert difference(third, torch.cat([a[10:31], b[4:17]])) < 1e-3


def test_features_are_transformers_hidden_states(tmp_path):
    reference = save_tiny(tmp_path, "qwen3")
    model = load(tmp_path)
    last: list[Tensor] = []
    reference.model.layers[-1].register_forward_hook(lambda _m, _i, out: last.append(out))
    with torch.inference_mode():
        states = reference(torch.tensor([IDS]), output_hidden_states=True).hidden_states
    session = Session(model)
    parts = [session.run({"a": IDS[:20]}, (2, 0)), session.run({"a": IDS[20:]}, (2, 0))]
    for index, want in enumerate((last[0], states[1])):
        got = torch.cat([part.features[index] for part in parts])
        assert difference(got, want.reshape(got.shape)) < 1e-4
    assert difference(torch.cat([part.hidden for part in parts]), states[-1][0]) < 1e-4
    assert session.run({"b": OTHER}).features == ()


def test_only_the_rows_asked_for_get_logits(tmp_path):
    save_tiny(tmp_path, "llama")
    model = load(tmp_path)
    session = Session(model)
    batch = session.batch({"a": IDS[:8], "b": OTHER[:3]})
    batch = type(batch)(**{**vars(batch), "logits_indices": torch.tensor([7, 2])})
    output = model.forward(batch, session.cache)
    assert output.hidden.shape == (11, 36)
    assert output.logits.shape == (2, 101)
    whole = Session(model).logits(IDS[:8], 8)
    torch.testing.assert_close(output.logits, whole[[7, 2]], rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_bfloat16_stays_near_float32(family, tmp_path):
    reference = save_tiny(tmp_path, family, initializer_range=0.1)
    model = load(tmp_path, dtype="bfloat16")
    want = transformers_logits(reference, IDS)
    got = Session(model).logits(IDS, 7)
    assert got.dtype == torch.float32
    assert difference(got, want) < 0.05 * want.abs().max().item()
    assert difference(got, want) > 0  # it is not float32 in disguise
    assert model.kv_bytes_per_token == 2 * 3 * 2 * 10 * 2
    in_float32 = load(tmp_path).weight_bytes
    inputs = [
        model.config.hidden_size,
        model.config.num_heads * model.config.head_dim,
        model.layers[0].down.in_features,
    ]
    # Tiles hold 32 inputs, so odd sizes are padded.
    padding = max(-(-size // 32) * 32 / size for size in inputs) if native.has_amx() else 1.0
    assert in_float32 / 2 <= model.weight_bytes < in_float32 * 0.52 * padding  # norms stay in float32 on the CPU


FUSED = {
    "llama": ("llama", {}),
    "llama tied, biases": CASES["llama tied, biases"],
    "llama seven heads": (
        "llama",
        {"hidden_size": 35, "num_attention_heads": 7, "num_key_value_heads": 1, "head_dim": 14},
    ),
    "llama odd widths": (
        "llama",
        {"hidden_size": 45, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 131},
    ),
    "mistral window": CASES["mistral window"],
    "qwen2 tied, some layers slide": CASES["qwen2 tied, some layers slide"],
    "qwen3 biases, layer types": CASES["qwen3 biases, layer types"],
}


@pytest.mark.skipif(not native.available(), reason=native.why_not)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", FUSED)
def test_layer_by_layer_gives_the_bits_of_the_fused_layers(case: str, dtype: str, tmp_path) -> None:
    """Prompts, single tokens, drafts and a tree, in company and alone, with all that a forward gives."""
    family, overrides = FUSED[case]
    save_tiny(tmp_path, family, **overrides)
    model = load(tmp_path, dtype=dtype)
    assert model._fused is not None
    fused = forwards(Session(model))
    model.use_attention(model._attention)
    assert model._fused is None
    for one, other in zip(fused, forwards(Session(model)), strict=True):
        assert torch.equal(one.logits, other.logits)
        assert torch.equal(one.hidden, other.hidden)
        assert all(torch.equal(*pair) for pair in zip(one.features, other.features, strict=True))


def forwards(session: Session) -> list[ForwardOutput]:
    """Of requests a, b and c, the last one of a tree of two drafts after a."""
    steps = ({"a": IDS[:19]}, {"b": OTHER[:1], "a": IDS[19:20]}, {"a": IDS[20:27], "b": OTHER[1:14], "c": IDS[:1]})
    outputs = [session.run(step, (0, 2)) for step in steps]
    start, table = session.lengths["a"], session.tables["a"]
    assert start + 3 <= len(table) * session.block_size
    device = session.model.device
    tree = ragged_batch([IDS[27:30]], [start], [table], [3], block_size=5, device=device, trees=[[-1, -1]])
    return [*outputs, session.model.forward(tree, session.cache, (0, 2))]


def test_dynamic_rope_past_the_trained_length_equals_transformers_token_by_token(tmp_path):
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 3.0}
    reference = save_tiny(tmp_path, "llama", max_position_embeddings=16, rope_parameters=rope)
    from transformers import DynamicCache

    argument = "cache" if "cache" in inspect.signature(reference.forward).parameters else "past_key_values"
    past, rows = DynamicCache(), []
    with torch.inference_mode():
        for token in IDS:
            rows.append(reference(torch.tensor([[token]]), use_cache=True, **{argument: past}).logits[0])
    model = load(tmp_path)
    assert model.config.max_model_len == 48
    for chunk in (1, 41, 6):
        assert difference(Session(model).logits(IDS, chunk), torch.cat(rows)) < 1e-3


def test_truncated_shares_weights_and_equals_the_first_layers(tmp_path):
    reference = save_tiny(tmp_path, "llama")
    model = load(tmp_path)
    short = truncated(model, 2)
    reference.model.layers = reference.model.layers[:2]
    assert difference(Session(short).logits(IDS, 10), transformers_logits(reference, IDS)) < 1e-3
    assert short.config.num_layers == 2
    assert short.head is model.head
    assert short.layers[1] is model.layers[1]
    assert short.kv_bytes_per_token * 3 == model.kv_bytes_per_token * 2
    for count in (0, 4):
        with pytest.raises(ModelError, match=f"cannot keep {count} layers"):
            truncated(model, count)
