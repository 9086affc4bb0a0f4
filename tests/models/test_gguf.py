"""GGUF: the demo model against transformers, and small files written here with the gguf package."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
import transformers
from tiny import Session, save_demo_layers

from foredraft.config import EngineConfig
from foredraft.errors import ModelError
from foredraft.models.decoder import Decoder
from foredraft.models.demo import demo_path
from foredraft.models.gguf import open_gguf
from foredraft.models.gguf_file import GGUFFile
from foredraft.models.load import LoadedModel, load_model

TEXT = (
    "The sea was calm that morning, and Anna counted 12 boats on the horizon. She wrote the number down, closed "
    "her notebook and walked back to the village, where the baker had just opened his shop. He sold bread, honey "
    "and small round cakes that nobody else in the whole valley knew how to make, and sang."
)


@pytest.fixture(scope="module")
def demo() -> LoadedModel:
    return load_model(EngineConfig("demo", dtype="float32", device="cpu"))


@pytest.fixture(scope="module")
def reference():
    path = demo_path()
    return transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()


def test_the_demo_model_equals_transformers_over_64_tokens_of_text(demo, reference):
    ids = demo.tokenizer.encode(TEXT)[:64]
    assert len(ids) == 64
    with torch.inference_mode():
        output = reference(torch.tensor([ids]), output_hidden_states=True)
    want = output.logits[0]
    for chunk in (64, 1, 11):
        got = Session(demo.model, block_size=16).logits(ids, chunk)
        assert (got - want).abs().max().item() < 1e-3, f"chunks of {chunk}"
        assert torch.equal(got.argmax(-1), want.argmax(-1))
    features = Session(demo.model, block_size=16).run({"a": ids}, (0, 14, 28)).features
    for index, layer in enumerate((0, 14, 28)):
        scale = output.hidden_states[layer + 1].abs().max().item()
        assert (features[index] - output.hidden_states[layer + 1][0]).abs().max().item() < 1e-5 * scale


def test_a_directory_of_the_demo_models_first_layers_equals_them(demo, tmp_path):
    short = load_model(EngineConfig(str(save_demo_layers(tmp_path, 3)), dtype="float32", device="cpu"))
    assert isinstance(short.model, Decoder)
    ids = demo.tokenizer.encode(TEXT)[:20]
    with torch.inference_mode():
        reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
        want = reference(torch.tensor([ids])).logits[0]
    assert (Session(short.model).logits(ids, 7) - want).abs().max().item() < 1e-3
    assert short.tokenizer.first_differences(demo.tokenizer) == []
    assert short.tokenizer.encode(TEXT + " 12345") == demo.tokenizer.encode(TEXT + " 12345")
    assert short.eos_token_ids == demo.eos_token_ids == (2,)
    assert short.chat_template == demo.chat_template


def test_metadata_and_offsets_agree_with_the_gguf_package():
    file, reference = GGUFFile(demo_path()), gguf.GGUFReader(demo_path())
    for key, entry in reference.fields.items():
        if not key.startswith("GGUF."):
            assert file.metadata[key] == entry.contents(), key
    assert [tensor.name for tensor in reference.tensors] == list(file.tensors)
    for tensor in (reference.tensors[0], reference.tensors[1], reference.tensors[5], reference.tensors[-1]):
        want = torch.tensor(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        assert torch.equal(file.read(tensor.name), want)
        assert torch.equal(file.read(tensor.name, torch.bfloat16), want.bfloat16())


def interleaved(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of each head from halves (transformers) to pairs (llama.cpp), element by element."""
    size = weight.shape[0] // num_heads
    rows = []
    for head in range(num_heads):
        for i in range(size // 2):
            rows += [head * size + i, head * size + size // 2 + i]
    return weight[rows]


def write_gguf(path, architecture: str, reference, kind=gguf.GGMLQuantizationType.F32, **extra):
    """Writes transformers' model as llama.cpp's converter does; `extra` are metadata below the architecture."""
    config = reference.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    for key, value in extra.items():
        if isinstance(value, np.ndarray):
            writer.add_tensor("rope_freqs.weight", value)
        else:
            add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}[type(value)]
            add(f"{architecture}.{key.replace('__', '.')}", value)
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, architecture.upper()), config.num_hidden_layers)
    for name, tensor in reference.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = tensor.numpy()
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            array = interleaved(array, heads)
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if array.ndim == 1 or kind == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(target, array)
        else:
            writer.add_tensor(target, gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def make(family: str, **overrides):
    torch.manual_seed(1)
    sizes = {
        "vocab_size": 75,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "max_position_embeddings": 64,
        "initializer_range": 0.25,
    }
    config = transformers.AutoConfig.for_model(family, **{**sizes, **overrides})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    return model


def load(path, **settings) -> Decoder:
    config = EngineConfig(str(path), dtype="float32", device="cpu", skip_tokenizer_init=True, **settings)
    model = load_model(config).model
    assert isinstance(model, Decoder)
    return model


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}


def llama3_divisors() -> np.ndarray:
    """What llama.cpp's converter writes to rope_freqs: how many times slower each frequency turns."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    scaled = LlamaRotaryEmbedding(make("llama", rope_parameters=dict(LLAMA3)).config).inv_freq
    plain = LlamaRotaryEmbedding(make("llama").config).inv_freq
    return (plain / scaled).numpy()


@pytest.mark.parametrize(
    ("architecture", "overrides", "metadata"),
    [
        ("llama", {}, {}),
        ("llama", {"tie_word_embeddings": True, "attention_bias": True}, {}),
        (
            "llama",
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
            {"rope__scaling__type": "linear", "rope__scaling__factor": 2.0},
        ),
        (
            "llama",
            {"rope_parameters": YARN},
            {
                "rope__scaling__type": "yarn",
                "rope__scaling__factor": 4.0,
                "rope__scaling__original_context_length": 16,
            },
        ),
        ("llama", {"rope_parameters": LLAMA3}, {"freqs": "llama3"}),
        ("qwen2", {}, {}),
        ("qwen3", {"tie_word_embeddings": True}, {}),
    ],
)
def test_architectures_and_rope_scalings_equal_transformers(architecture, overrides, metadata, tmp_path):
    reference = make(architecture, **overrides)
    if "freqs" in metadata:
        metadata = {"freqs": llama3_divisors()}
    write_gguf(tmp_path / "m.gguf", architecture, reference, **metadata)
    model = load(tmp_path / "m.gguf")
    ids = torch.randint(0, 75, (40,), generator=torch.Generator().manual_seed(2)).tolist()
    with torch.inference_mode():
        want = reference(torch.tensor([ids])).logits[0]
    assert (Session(model).logits(ids, 9) - want).abs().max().item() < 1e-3


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q5_1"])
def test_quantised_weights_are_what_gguf_dequantises(kind, tmp_path):
    quantisation = gguf.GGMLQuantizationType[kind]
    reference = make("llama", head_dim=16)  # quantised rows are whole blocks of 32
    write_gguf(tmp_path / "m.gguf", "llama", reference, quantisation)
    _, weights = open_gguf(GGUFFile(tmp_path / "m.gguf"))
    original = reference.model.layers[1].mlp.down_proj.weight.detach().numpy()
    want = gguf.quants.dequantize(gguf.quants.quantize(original, quantisation), quantisation)
    got = weights.read("model.layers.1.mlp.down_proj.weight", torch.float32)
    np.testing.assert_array_equal(got.numpy(), want)


def test_errors_say_what_where_and_what_to_do(tmp_path):
    path = tmp_path / "m.gguf"
    write_gguf(path, "llama", make("llama"))
    whole = path.read_bytes()

    for size, message in ((len(whole) - 100, "truncated: tensor .* ends at byte"), (200, "damaged or truncated")):
        path.write_bytes(whole[:size])
        with pytest.raises(ModelError, match=message + ".*download it again"):
            load(path)
    path.write_bytes(b"PK\x03\x04" + whole[4:])
    with pytest.raises(ModelError, match="not a GGUF file"):
        load(path)
    path.write_bytes(whole[:4] + b"\x09" + whole[5:])
    with pytest.raises(ModelError, match="GGUF version 9 is not supported"):
        load(path)
    path.write_bytes(b"")
    with pytest.raises(ModelError, match="cannot be opened as GGUF"):
        load(path)
    path.write_bytes(whole.replace(b"llama.block_count", b"llama.blook_count"))
    with pytest.raises(ModelError, match="the metadata lacks llama.block_count"):
        load(path)
    path.write_bytes(whole.replace(b"blk.1.attn_q.weight", b"blk.1.attn_x.weight"))
    with pytest.raises(ModelError, match="missing tensors: model.layers.1.self_attn.q_proj.weight"):
        load(path)


def test_an_unknown_architecture_or_scaling_is_refused_by_name(tmp_path):
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "gemma2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelError, match="'gemma2' is not supported .*llama, qwen2, qwen3"):
        load(path)
    write_gguf(path, "llama", make("llama"), rope__scaling__type="longrope")
    with pytest.raises(ModelError, match="'longrope' is not supported"):
        load(path)
    write_gguf(path, "llama", make("llama"), expert_count=8)
    with pytest.raises(ModelError, match="mixture-of-experts"):
        load(path)
