"""Every other causal language model, run by transformers behind the decoder's interface.

Exact before fast: request by request, the keys and values of what came before are gathered from the paged
cache into transformers' own, the new tokens run, and their keys and values are written back. Models whose
state is anything else than keys and values per token (recurrent, latent attention) are refused when they are
loaded.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from foredraft.errors import ModelError
from foredraft.kv.cache import KVCache
from foredraft.models.batch import ForwardBatch
from foredraft.models.config import ModelConfig, token_ids
from foredraft.models.decoder import ForwardOutput


class HFModel:
    """A transformers model over our paged KV cache.

    Args:
        model: a causal language model in evaluation mode.
        where: its directory, for messages.

    Raises:
        ModelError: its state is not one key and one value of equal length per token and layer.
    """

    def __init__(self, model: Any, where: str) -> None:
        parameters = inspect.signature(model.forward).parameters
        self._model = model
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self._takes_positions = "position_ids" in parameters
        self._where = where
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        self.config = self._probe()

    @property
    def is_row_invariant(self) -> bool:
        """Whether a token's bits are the same whatever else is in the forward: torch promises no such thing."""
        return False

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights in memory; shared ones count once."""
        return sum(tensor.nbytes for tensor in (*self._model.parameters(), *self._model.buffers()))

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that one token takes in the KV cache, over all layers."""
        return 2 * self._num_cached_layers * self.config.num_kv_heads * self.config.head_dim * self.dtype.itemsize

    def new_cache(self, num_blocks: int, block_size: int) -> KVCache:
        """An empty KV cache of `num_blocks` blocks of `block_size` tokens."""
        return KVCache(
            num_layers=self._num_cached_layers,
            num_blocks=num_blocks,
            block_size=block_size,
            num_kv_heads=self.config.num_kv_heads,
            head_dim=self.config.head_dim,
            dtype=self.dtype,
            device=self.device,
        )

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, cache: KVCache, feature_layers: Sequence[int] = ()) -> ForwardOutput:
        """As `Decoder.forward`.

        Raises:
            ModelError: the batch holds a draft tree, which transformers' models do not take.
        """
        if batch.tree_mask is not None:
            raise ModelError(f"{self._where}: draft trees need a model that foredraft runs itself; use chains")
        starts = batch.query_start_loc.tolist()
        outputs = [
            self._run(batch, cache, row, begin, end, feature_layers)
            for row, (begin, end) in enumerate(pairwise(starts))
        ]
        hidden = torch.cat([output.hidden for output in outputs])
        features = tuple(torch.cat(parts) for parts in zip(*(output.features for output in outputs), strict=True))
        logits = torch.cat([output.logits for output in outputs])
        return ForwardOutput(hidden, features, logits[batch.logits_indices])

    def _run(
        self,
        batch: ForwardBatch,
        cache: KVCache,
        row: int,
        begin: int,
        end: int,
        feature_layers: Sequence[int],
    ) -> ForwardOutput:
        """One request's tokens `begin` to `end` of the batch; logits of all of them."""
        from transformers import DynamicCache

        num_before = int(batch.seq_lens[row]) - (end - begin)
        before = torch.arange(num_before, device=self.device)
        size = cache.block_size
        slots = batch.block_tables[row][before // size] * size + before % size  # [num_before]
        past: Any = DynamicCache()
        if num_before:
            for layer in range(self._num_cached_layers):
                keys, values = cache.read(layer, slots)  # [num_before, Hkv, D]
                past.update(keys.transpose(0, 1)[None], values.transpose(0, 1)[None], layer)
        output, features = self._call(batch.input_ids[begin:end], batch.positions[begin:end], past, feature_layers)
        slots = batch.slot_mapping[begin:end]
        stored = slots >= 0
        for layer, kept in enumerate(past.layers):
            new_keys = kept.keys[0, :, num_before:].transpose(0, 1)  # [end - begin, Hkv, D]
            new_values = kept.values[0, :, num_before:].transpose(0, 1)
            cache.write(layer, slots[stored], new_keys[stored], new_values[stored])
        return ForwardOutput(output.hidden_states[-1][0], features, output.logits[0].float())

    def _call(
        self, input_ids: Tensor, positions: Tensor, past: Any, feature_layers: Sequence[int]
    ) -> tuple[Any, tuple[Tensor, ...]]:
        """Runs transformers' model and takes the layers asked for, the last one before the final norm."""
        arguments: dict[str, Any] = {self._cache_argument: past}
        if self._takes_positions:
            arguments["position_ids"] = positions[None]
        captured: list[Tensor] = []
        last = self.config.num_layers - 1
        hook = None
        if last in feature_layers:
            hook = self._last_layer().register_forward_hook(lambda _module, _inputs, out: captured.append(_first(out)))
        try:
            output = self._model(input_ids[None], use_cache=True, output_hidden_states=True, **arguments)
        finally:
            if hook is not None:
                hook.remove()
        layers = [captured[0] if index == last else output.hidden_states[index + 1] for index in feature_layers]
        return output, tuple(layer[0] for layer in layers)

    def _last_layer(self) -> nn.Module:
        """The last decoder layer, for whose output transformers returns the normalised one only."""
        for module in self._model.modules():
            if isinstance(module, nn.ModuleList) and len(module) == self.config.num_layers:
                return module[-1]
        raise ModelError(
            f"{self._where}: the layers of {type(self._model).__name__} were not found; choose earlier ones"
        )

    @torch.inference_mode()
    def _probe(self) -> ModelConfig:
        """Runs two tokens and reads the sizes off the cache; refuses what is not plain keys and values."""
        from transformers import DynamicCache

        name = type(self._model).__name__
        refusal = (
            f"{self._where}: {name} keeps a state other than one key and one value per token and layer, "
            "which the paged cache cannot hold; recurrent and latent-attention models are not supported"
        )
        past = DynamicCache()
        ids = torch.zeros((1, 2), dtype=torch.int64, device=self.device)
        try:
            self._model(ids, use_cache=True, **{self._cache_argument: past})
        except Exception as error:  # whatever a model of unknown kind raises when handed a plain cache
            raise ModelError(
                f"{self._where}: {name} does not run with one key and one value per token and layer as its state "
                f"({type(error).__name__}: {error}); recurrent and latent-attention models are not supported"
            ) from error
        layers = getattr(past, "layers", [])
        shapes = {
            tuple(tensor.shape)
            for layer in layers
            for tensor in (getattr(layer, "keys", None), getattr(layer, "values", None))
            if isinstance(tensor, Tensor)
        }
        if len(shapes) != 1 or len(shape := shapes.pop()) != 4 or shape[0] != 1 or shape[2] != 2:
            raise ModelError(refusal)
        self._num_cached_layers = len(layers)
        config = self._model.config.get_text_config(decoder=True)
        return ModelConfig(
            architecture=str(config.model_type),
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_layers=config.num_hidden_layers,
            num_heads=config.num_attention_heads,
            num_kv_heads=shape[1],
            head_dim=shape[3],
            max_model_len=int(getattr(config, "max_position_embeddings", None) or 2**20),
            tie_word_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
            eos_token_ids=token_ids(getattr(config, "eos_token_id", None), "eos_token_id", self._where),
            bos_token_id=getattr(config, "bos_token_id", None),
        )


def load_hf_model(path: Path, *, dtype: torch.dtype, device: torch.device, trust_remote_code: bool = False) -> HFModel:
    """Loads a directory with transformers.

    Raises:
        ModelError: it cannot be read, lacks weights, or its state does not fit the paged cache.
    """
    from transformers import AutoModelForCausalLM

    loader: Any = AutoModelForCausalLM
    try:
        model, info = loader.from_pretrained(
            os.fspath(path),
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
    except Exception as error:  # transformers raises whatever its readers did
        raise ModelError(f"{path}: transformers cannot load it: {error}") from error
    for problem, names in (("missing", info["missing_keys"]), ("of another shape", info["mismatched_keys"])):
        if names:
            raise ModelError(f"{path}: tensors {problem}: {', '.join(sorted(map(str, names))[:5])}")
    return HFModel(model.to(device).eval(), str(path))


def _first(output: Any) -> Tensor:
    first: Tensor = output[0] if isinstance(output, tuple) else output
    return first
