"""GGUF models: metadata to a `ModelConfig`, llama.cpp's tensor names and layouts to transformers'.

The metadata is first rewritten as the `config.json` that the model would have had, so that one reader checks
both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from foredraft.errors import ModelError
from foredraft.models.config import ModelConfig, read_model_config
from foredraft.models.gguf_file import GGUFFile
from foredraft.models.rope import yarn_attention_factor
from foredraft.models.weights import Weights

ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""GGUF architectures that the decoder runs; Mistral and SmolLM are `llama` there."""

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GLOBAL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def open_gguf(file: GGUFFile) -> tuple[ModelConfig, Weights]:
    """The configuration and the weights, under transformers' names, of a GGUF model.

    Raises:
        ModelError: an architecture, rope scaling or quantisation that is not supported, or metadata that is
            missing.
    """
    architecture = str(file.metadata.get("general.architecture"))
    if architecture not in ARCHITECTURES:
        raise ModelError(
            f"{file.path}: GGUF architecture {architecture!r} is not supported (known: "
            f"{', '.join(ARCHITECTURES)}); load the model's original directory instead"
        )
    if file.metadata.get(f"{architecture}.expert_count", 0):
        raise ModelError(f"{file.path}: mixture-of-experts GGUF models are not supported; load the original directory")
    config = replace(
        read_model_config(config_from_metadata(file), str(file.path)),
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_down.bias" in file.tensors,
    )
    divisors = file.tensors.get("rope_freqs.weight")
    if divisors is not None:
        assert config.rope is not None
        if divisors.shape != (config.rope.rotary_dim // 2,):
            raise ModelError(
                f"{file.path}: rope_freqs.weight has shape {list(divisors.shape)}, expected "
                f"[{config.rope.rotary_dim // 2}]"
            )
        values = tuple(file.read("rope_freqs.weight").tolist())
        config = replace(config, rope=replace(config.rope, divisors=values))
    return config, _weights(file, config)


def config_from_metadata(file: GGUFFile) -> dict[str, Any]:
    """The `config.json` that the GGUF's metadata and tensors amount to."""
    metadata, tensors = file.metadata, file.tensors
    architecture = metadata["general.architecture"]

    def need(key: str) -> Any:
        try:
            return metadata[f"{architecture}.{key}"]
        except KeyError:
            raise ModelError(f"{file.path}: the metadata lacks {architecture}.{key}") from None

    if "token_embd.weight" not in tensors:
        raise ModelError(f"{file.path}: missing tensors: token_embd.weight")
    heads, hidden_size = need("attention.head_count"), need("embedding_length")
    head_dim = metadata.get(f"{architecture}.attention.key_length") or hidden_size // heads
    if metadata.get(f"{architecture}.attention.value_length", head_dim) != head_dim:
        raise ModelError(f"{file.path}: heads whose keys and values differ in length are not supported")
    rotary_dim = metadata.get(f"{architecture}.rope.dimension_count", head_dim)
    window = metadata.get(f"{architecture}.attention.sliding_window")
    return {
        "model_type": "mistral" if architecture == "llama" and window else architecture,
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": need("feed_forward_length"),
        "num_hidden_layers": need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.get(f"{architecture}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": need("context_length"),
        "rms_norm_eps": need("attention.layer_norm_rms_epsilon"),
        "sliding_window": window,
        "use_sliding_window": bool(window),
        "max_window_layers": 0,
        "tie_word_embeddings": "output.weight" not in tensors,
        "rope_theta": metadata.get(f"{architecture}.rope.freq_base", 10_000.0),
        "partial_rotary_factor": rotary_dim / head_dim,
        "rope_parameters": _rope(metadata, architecture, str(file.path)),
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": [
            metadata[key]
            for key in (
                "tokenizer.ggml.eos_token_id",
                "tokenizer.ggml.eot_token_id",
                "tokenizer.ggml.eom_token_id",
            )
            if key in metadata
        ],
    }


def _rope(metadata: Mapping[str, Any], architecture: str, where: str) -> dict[str, Any]:
    """`rope_parameters` without theta, from `rope.scaling.*` or the older `rope.scale_linear`."""
    prefix = f"{architecture}.rope."
    kind = metadata.get(prefix + "scaling.type", "linear" if prefix + "scale_linear" in metadata else "none")
    factor = metadata.get(prefix + "scaling.factor", metadata.get(prefix + "scale_linear", 1.0))
    if kind == "none" or (kind == "linear" and factor in (0, 1)):
        return {"rope_type": "default"}
    if kind not in ("linear", "yarn"):
        raise ModelError(f"{where}: {prefix}scaling.type {kind!r} is not supported; known: none, linear, yarn")
    params: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        params["original_max_position_embeddings"] = metadata.get(prefix + "scaling.original_context_length")
        params["beta_fast"] = metadata.get(prefix + "scaling.yarn_beta_fast")
        params["beta_slow"] = metadata.get(prefix + "scaling.yarn_beta_slow")
        extra = metadata.get(prefix + "scaling.attn_factor", 1.0)
        params["attention_factor"] = extra * yarn_attention_factor(factor)
    return params


def _weights(file: GGUFFile, config: ModelConfig) -> Weights:
    """The file's tensors under transformers' names, with llama's queries and keys in transformers' order."""
    names = {}
    for name in file.tensors:
        if name != "rope_freqs.weight":
            names[_transformers_name(name)] = name
    # Only the llama architecture is stored for interleaved rotation; qwen's already rotates halves.
    interleaved = file.metadata["general.architecture"] == "llama"
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}

    def fill(name: str, out: Tensor) -> None:
        projection = name.split(".")[-2] if "." in name else ""
        if interleaved and projection in heads and "self_attn" in name:
            out.copy_(rotate_half_order(file.read(names[name], out.dtype), heads[projection]))
        else:
            file.fill(names[name], out)

    shapes = {name: file.tensors[original].shape for name, original in names.items()}
    return Weights(str(file.path), shapes, fill)


def rotate_half_order(tensor: Tensor, num_heads: int) -> Tensor:
    """Rows [rows, ...] of a query or key projection, from llama.cpp's interleaved pairs to halves."""
    rows = tensor.shape[0]
    pairs = tensor.reshape(num_heads, rows // num_heads // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)


def _transformers_name(name: str) -> str:
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER_NAMES:
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{parts[3]}"
    if len(parts) == 2 and parts[0] in _GLOBAL_NAMES:
        return f"{_GLOBAL_NAMES[parts[0]]}.{parts[1]}"
    return name
