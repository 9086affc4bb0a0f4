"""The backbone's two forms against each other, and against a plain transcription of the published
equations."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from tiny import save_tiny

from foredraft.draft.backbone import Backbone, start_from_target
from foredraft.draft.backbone_config import (
    BlockConfig,
    check_length,
    check_target,
    config_for,
    from_json,
    spread_layers,
    to_json,
)
from foredraft.draft.backbone_runner import BackboneRunner
from foredraft.draft.block_model import BlockModel, load_block_model, save_block_model
from foredraft.draft.convolution import CausalConvolution
from foredraft.draft.correctors import SlotSampler
from foredraft.draft.correctors.candidates import top_candidates
from foredraft.errors import DrafterError
from foredraft.models.config import read_model_config
from foredraft.models.rope import RopeConfig
from foredraft.models.weights import open_weights, read_json
from foredraft.sampling.params import SamplingParams
from foredraft.sampling.state import SamplingState

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
ROPE = RopeConfig(kind="default", theta=10_000.0, rotary_dim=10, max_position=96)
CONFIG = BlockConfig(
    vocab_size=31,
    hidden_size=36,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=10,
    intermediate_size=53,
    rope=ROPE,
    target_layers=(0, 2),
    block_size=4,
)
VARIANTS = {
    "anchor_predicts": CONFIG,
    "masks_predict": replace(CONFIG, anchor_predicts=False, block_size=5),
    "head_norms": replace(CONFIG, qk_norm=True, mask_token_id=3),
    "convolution": replace(CONFIG, conv_taps=2, conv_group_size=4, qk_norm=True),
    "static_convolution": replace(CONFIG, conv_taps=3, anchor_predicts=False, block_size=5),
    "carry": replace(CONFIG, carry=True),
    "carry_to_masks": replace(CONFIG, carry=True, anchor_predicts=False, block_size=5, mask_token_id=3),
    "one_layer": replace(CONFIG, num_layers=1, target_layers=(1,), rope=replace(ROPE, rotary_dim=6)),
}


def wild(config: BlockConfig) -> Backbone:
    """A backbone whose every weight matters."""
    backbone = Backbone(config)
    with torch.no_grad():
        for parameter in backbone.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=0.25)
    return backbone.eval()


def reference(backbone: Backbone, features, anchor: int, anchor_embedding, mask_embedding):
    """One block by the equations, head by head and slot by slot."""
    config, weights = backbone.config, dict(backbone.named_parameters())
    size, eps = config.head_dim, config.rms_norm_eps
    group = config.num_heads // config.num_kv_heads

    def norm(x, weight):
        return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight

    def rotate(x, position: int):
        half = config.rope.rotary_dim // 2
        angles = position / config.rope.theta ** (torch.arange(half) / half)
        a, b, rest = x[:half], x[half : 2 * half], x[2 * half :]
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin(), rest])

    def convolve(rows, kernels):
        return [
            sum(kernels[i][tap] * rows[i - tap] for tap in range(config.conv_taps) if i - tap >= 0)
            for i in range(len(rows))
        ]

    def sublayer(at: str, rows, inside):
        if not config.conv_taps:
            return inside(rows)
        base = weights[f"{at}.base_kernel"]
        kernels = []
        for row in rows:
            dynamic = torch.zeros_like(base)
            if config.conv_group_size:
                flat = weights[f"{at}.kernel_projection.weight"] @ row
                groups = config.hidden_size // config.conv_group_size
                dynamic = flat.reshape(2, config.conv_taps, groups).repeat_interleave(config.conv_group_size, -1)
            kernels.append(base + dynamic)
        return convolve(inside(convolve(rows, [k[0] for k in kernels])), [k[1] for k in kernels])

    context = [norm(weights["fc.weight"] @ row, weights["hidden_norm.weight"]) for row in features[:anchor]]
    x = [anchor_embedding] + [mask_embedding] * (config.block_size - 1)
    if config.carry:
        x = [row + weights["carry.weight"] @ context[-1] for row in x]
    for index in range(config.num_layers):
        at = f"layers.{index}"

        def attend(rows, at=at):
            def head(row, name: str, h: int):
                return weights[f"{at}.self_attn.{name}_proj.weight"][h * size : (h + 1) * size] @ row

            def normed(row, name: str):
                return norm(row, weights[f"{at}.self_attn.{name}_norm.weight"]) if config.qk_norm else row

            everything = [*context, *rows]
            outputs = []
            for slot, row in enumerate(rows):
                mixed = []
                for h in range(config.num_heads):
                    query = rotate(normed(head(row, "q", h), "q"), anchor + slot)
                    keys = [rotate(normed(head(r, "k", h // group), "k"), p) for p, r in enumerate(everything)]
                    scores = torch.stack([query @ key for key in keys]) / size**0.5
                    values = torch.stack([head(r, "v", h // group) for r in everything])
                    mixed.append(scores.softmax(-1) @ values)
                outputs.append(weights[f"{at}.self_attn.o_proj.weight"] @ torch.cat(mixed))
            return outputs

        def mlp(rows, at=at):
            gate, up = weights[f"{at}.mlp.gate_proj.weight"], weights[f"{at}.mlp.up_proj.weight"]
            down = weights[f"{at}.mlp.down_proj.weight"]
            return [down @ ((gate @ row) * torch.sigmoid(gate @ row) * (up @ row)) for row in rows]

        normed_rows = [norm(row, weights[f"{at}.input_layernorm.weight"]) for row in x]
        x = [a + b for a, b in zip(x, sublayer(f"{at}.attention_conv", normed_rows, attend), strict=True)]
        normed_rows = [norm(row, weights[f"{at}.post_attention_layernorm.weight"]) for row in x]
        x = [a + b for a, b in zip(x, sublayer(f"{at}.mlp_conv", normed_rows, mlp), strict=True)]
    rows = [norm(row, weights["norm.weight"]) for row in x]
    return torch.stack(rows[0 if config.anchor_predicts else 1 :])


def batch_of(config: BlockConfig, length: int = 11):
    features = torch.randn(2, length, len(config.target_layers) * config.hidden_size)
    anchors = torch.tensor([[1, 4, 9], [11, 7, 2]])
    mask = torch.randn(config.hidden_size) if config.mask_token_id is not None else None
    return features, anchors, torch.randn(2, 3, config.hidden_size), mask


@pytest.mark.parametrize("name", VARIANTS)
@torch.no_grad()
def test_training_form_follows_the_equations(name: str) -> None:
    backbone = wild(VARIANTS[name])
    features, anchors, embeddings, mask = batch_of(backbone.config)
    hidden = backbone(features, anchors, embeddings, mask)
    assert hidden.shape[2] == 4
    for row in range(2):
        for index in range(3):
            own = mask if mask is not None else backbone.mask_embedding
            expected = reference(backbone, features[row], int(anchors[row, index]), embeddings[row, index], own)
            assert torch.allclose(hidden[row, index], expected, atol=2e-4)


class Blocks:
    """Requests over a runner's paged cache, whose blocks are handed out in scrambled order."""

    def __init__(self, runner: BackboneRunner, block_size: int = 4, num_blocks: int = 40) -> None:
        self.runner, self.block_size = runner, block_size
        self.cache = runner.new_cache(num_blocks, block_size)
        self.cache.k.fill_(float("nan"))  # what was never written must never be read
        self.cache.v.fill_(float("nan"))
        self.free = torch.randperm(num_blocks).tolist()
        self.tables: list[list[int]] = []
        self.last: dict[int, torch.Tensor] = {}

    def add(self, length: int) -> int:
        self.tables.append([self.free.pop() for _ in range(-(-length // self.block_size))])
        return len(self.tables) - 1

    def write(self, request: int, features, start: int) -> None:
        positions = torch.arange(start, start + len(features))
        table = torch.tensor(self.tables[request])
        slots = table[positions // self.block_size] * self.block_size + positions % self.block_size
        context = self.runner.context(features)
        self.last[request] = context[-1]
        self.runner.write_context(context, positions, slots, self.cache)

    def hidden(self, anchors: list[int], counts: list[int], embeddings, mask):
        batch = self.runner.block_batch([5] * len(anchors), anchors, self.tables, counts, self.block_size)
        rows = torch.zeros(len(batch.input_ids), self.runner.config.hidden_size)
        rows[:] = float("nan") if mask is None else mask
        rows[batch.query_start_loc[:-1]] = embeddings
        last = torch.stack([self.last[request] for request in range(len(anchors))])
        return torch.split(self.runner.forward(rows, batch, self.cache, last), counts)


@pytest.mark.parametrize("native", [True, False], ids=["kernels", "torch"])
@pytest.mark.parametrize("name", VARIANTS)
@torch.inference_mode()
def test_inference_form_equals_training_form(name: str, native: bool, monkeypatch) -> None:
    if not native:
        monkeypatch.setattr("foredraft.models.native.available", lambda: False)
    backbone = wild(VARIANTS[name])
    config = backbone.config
    features, _, embeddings, mask = batch_of(config)
    anchors = [11, 6]
    expected = backbone(features, torch.tensor([[11], [6]]), embeddings[:, :1], mask)
    runner = BackboneRunner(backbone, dtype=torch.float32, device=CPU, max_model_len=90)
    blocks = Blocks(runner)
    for row, anchor in enumerate(anchors):
        blocks.add(anchor + config.block_size)
        blocks.write(row, features[row, :3], 0)
        blocks.write(row, features[row, 3:anchor], 3)
    for _ in range(2):  # drafting leaves nothing behind that a second time would see
        found = blocks.hidden(anchors, [4, 4], embeddings[:, 0], mask)
        for row in range(2):
            assert torch.allclose(found[row], expected[row, 0], atol=1e-4)


@pytest.mark.parametrize("name", ["head_norms", "convolution"])
@torch.inference_mode()
def test_bfloat16_is_close(name: str) -> None:
    backbone = wild(VARIANTS[name])
    features, _, embeddings, mask = batch_of(backbone.config)
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        runner = BackboneRunner(backbone, dtype=dtype, device=CPU, max_model_len=90)
        blocks = Blocks(runner)
        blocks.add(16)
        blocks.write(0, features[0], 0)
        found.append(blocks.hidden([11], [4], embeddings[:1, 0], mask)[0].float())
    assert float(torch.cosine_similarity(*found, dim=-1).min()) > 0.98
    assert runner.kv_bytes_per_token == 2 * 2 * 2 * 10 * 2


@torch.inference_mode()
def test_ragged_blocks_do_not_touch_each_other() -> None:
    """Shorter blocks, one with a convolution, equal those of a backbone with that block size."""
    config = VARIANTS["convolution"]
    backbone = wild(config)
    runner = BackboneRunner(backbone, dtype=torch.float32, device=CPU, max_model_len=90)
    blocks = Blocks(runner)
    features, _, embeddings, _ = batch_of(config)
    anchors, counts = [11, 6, 8], [2, 4, 1]
    rows = [features[0], features[1], features[0].flip(0)]
    firsts = torch.stack([embeddings[0, 0], embeddings[1, 0], embeddings[0, 1]])
    for index, anchor in enumerate(anchors):
        blocks.add(anchor + counts[index])
        blocks.write(index, rows[index][:anchor], 0)
    found = blocks.hidden(anchors, counts, firsts, None)
    for index, (anchor, count) in enumerate(zip(anchors, counts, strict=True)):
        short = wild(replace(config, block_size=max(count, 2)))
        short.load_state_dict(backbone.state_dict())
        short.config = replace(config, block_size=count, conv_taps=1) if count == 1 else short.config
        expected = short(rows[index][None], torch.tensor([[anchor]]), firsts[index][None, None])[0, 0]
        assert torch.allclose(found[index], expected, atol=1e-4)


@torch.inference_mode()
def test_rejected_drafts_leave_no_trace() -> None:
    """A block's keys lie where later context goes; after that is written, drafts are those of a fresh
    cache."""
    backbone = wild(CONFIG)
    runner = BackboneRunner(backbone, dtype=torch.float32, device=CPU, max_model_len=90)
    features, _, embeddings, _ = batch_of(CONFIG, 20)
    used, fresh = Blocks(runner), Blocks(runner)
    used.add(24)
    fresh.add(24)
    used.write(0, features[0, :5], 0)
    for anchor, accepted in ((5, 1), (6, 4), (10, 2), (12, 3)):
        used.hidden([anchor], [4], embeddings[0, :1], None)
        used.write(0, features[0, anchor : anchor + accepted], anchor)
    fresh.write(0, features[0, :15], 0)
    one, other = (each.hidden([15], [4], embeddings[0, :1], None)[0] for each in (used, fresh))
    assert torch.equal(one, other)


def test_every_weight_learns_and_the_future_does_not_matter() -> None:
    backbone = wild(replace(VARIANTS["convolution"], carry=True)).train()
    features, anchors, embeddings, _ = batch_of(backbone.config)
    hidden = backbone(features, anchors, embeddings)
    hidden.square().sum().backward()
    for name, parameter in backbone.named_parameters():
        assert parameter.grad is not None, name
        assert float(parameter.grad.abs().sum()) > 0, name
    changed = features.clone()
    changed[0, 4:] += 1.0
    after = backbone(changed, anchors, embeddings)
    assert torch.equal(after[0, :2], hidden[0, :2])  # anchors 1 and 4 see positions before them
    assert not torch.equal(after[0, 2], hidden[0, 2])


def test_fresh_convolutions_and_a_fresh_carry_change_nothing() -> None:
    plain = wild(replace(CONFIG, qk_norm=True))
    convolved = Backbone(replace(VARIANTS["convolution"], carry=True))
    convolved.load_state_dict(plain.state_dict(), strict=False)
    features, anchors, embeddings, _ = batch_of(CONFIG)
    assert torch.equal(plain(features, anchors, embeddings), convolved(features, anchors, embeddings))
    x = torch.randn(3, 5, 36)
    fresh = CausalConvolution(36, 2, 0)
    assert torch.equal(fresh.prepare(x)[0], x)


def test_layers_start_as_the_targets(tmp_path) -> None:
    save_tiny(tmp_path, "llama")
    target = read_model_config(read_json(tmp_path / "config.json"), "config.json")
    weights = open_weights(tmp_path)
    config = config_for(target, num_layers=2, num_draft_tokens=4)
    backbone = Backbone(config)
    start_from_target(backbone, weights, [0, 2])
    for own, theirs in ((0, 0), (1, 2)):
        for name, parameter in backbone.layers[own].named_parameters():
            expected = weights.read(f"model.layers.{theirs}.{name}", torch.float32)
            assert torch.equal(parameter, expected), name
    features = torch.randn(1, 3, len(config.target_layers) * 36)
    context = backbone.context(features)
    mean = features.reshape(3, -1, 36).mean(1)
    expected = mean / mean.pow(2).mean(-1, keepdim=True).sqrt()
    first = weights.read("model.layers.0.input_layernorm.weight", torch.float32)
    assert torch.allclose(context[0], expected * first, atol=1e-4)


@pytest.mark.parametrize("corrector", ["none", "markov", "rnn", "gru", "bilinear", "lattice", "chain"])
def test_saved_models_load_as_they_were(tmp_path, corrector: str) -> None:
    draft_ids = torch.tensor([2, 3, 5, 7, 11, 13, 17, 19])
    config = replace(
        VARIANTS["convolution"],
        corrector=corrector,
        corrector_options={"num_candidates": 4},
        confidence={"with_distribution": True},
        draft_vocab_size=8,
        rope=replace(ROPE, divisors=(1.0, 2.0, 3.0, 4.0, 5.0)),
    )
    model = BlockModel(config, draft_ids)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    model.corrector.confidence_head.temperatures.uniform_(0.5, 2)
    save_block_model(model, tmp_path)
    loaded = load_block_model(tmp_path)
    assert loaded.config == config
    assert torch.equal(loaded.draft_ids, draft_ids)
    assert loaded.tensors().keys() == model.tensors().keys()
    for name, value in model.tensors().items():
        assert torch.equal(loaded.tensors()[name], value), name


def test_published_names() -> None:
    def names(corrector: str) -> set[str]:
        config = replace(VARIANTS["convolution"], corrector=corrector, confidence={"with_distribution": False})
        return set(BlockModel(config).tensors())

    shared = {"fc.weight", "hidden_norm.weight", "norm.weight", "layers.1.self_attn.q_norm.weight"}
    shared |= {"layers.0.attention_conv.base_kernel", "layers.0.mlp_conv.kernel_projection.weight"}
    shared |= {"confidence_head.proj.weight", "confidence_head.proj.bias"}
    markov = {"markov_head.markov_w1.weight", "markov_head.markov_w2.weight"}
    assert names("none") >= shared
    assert names("markov") >= shared | markov
    assert names("gated") >= markov | {"markov_head.gate_proj.weight", "markov_head.gate_proj.bias"}
    assert names("rnn") >= markov | {"markov_head.joint_proj.weight", "markov_head.joint_proj.bias"}
    assert names("gru") >= {
        "prefix_gru.weight_ih_l0",
        "prefix_gru.weight_hh_l0",
        "embed_proj.0.weight",
        "embed_proj.2.weight",
    }
    codebooks = {"candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook"}
    assert names("bilinear") >= codebooks | {"candidate_selector.hidden_projection.weight"}


def test_files_that_do_not_fit_are_named(tmp_path) -> None:
    from safetensors.torch import load_file, save_file

    with pytest.raises(DrafterError, match=r"config\.json is missing"):
        load_block_model(tmp_path)
    save_block_model(BlockModel(CONFIG), tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["norm.bias"] = tensors.pop("norm.weight")
    tensors["fc.weight"] = tensors["fc.weight"][:, :5].contiguous()
    save_file(tensors, file)
    with pytest.raises(DrafterError, match=r"missing: norm\.weight; surplus: norm\.bias; wrong shape: fc\.weight"):
        load_block_model(tmp_path)
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(DrafterError, match="not readable as safetensors"):
        load_block_model(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    for key, value, words in (
        ("architectures", ["LlamaForCausalLM"], "LlamaForCausalLM"),
        ("block_size", 0, "block_size"),
        ("rope", {"theta": 1.0}, "kind"),
    ):
        with pytest.raises(DrafterError, match=words):
            from_json({**raw, key: value}, "config.json")
    del raw["head_dim"]
    with pytest.raises(DrafterError, match="head_dim is missing"):
        from_json(raw, "config.json")


def test_config_survives_json_and_is_checked_against_the_target(tmp_path) -> None:
    config = replace(VARIANTS["masks_predict"], corrector="chain", corrector_options={"rank": 8}, confidence={})
    assert from_json(json.loads(json.dumps(to_json(config))), "config.json") == config
    assert config.num_draft_tokens == 4
    save_tiny(tmp_path, "llama")
    target = read_model_config(read_json(tmp_path / "config.json"), "config.json")
    made = config_for(target, num_layers=1, num_draft_tokens=3, anchor_predicts=False)
    assert (made.block_size, made.num_draft_tokens) == (4, 3)
    check_target(made, target, "drafter")
    check_length(made, 3, "drafter")
    with pytest.raises(DrafterError, match="num_speculative_tokens: 4 is above the 3"):
        check_length(made, 4, "drafter")
    for change, words in (
        ({"vocab_size": 7, "mask_token_id": None}, "vocab_size is 7, the target's 101"),
        ({"hidden_size": 40}, "hidden_size is 40"),
        ({"target_layers": (0, 3)}, "target layer 3"),
    ):
        with pytest.raises(DrafterError, match=words):
            check_target(replace(made, **change), target, "drafter")


def test_feature_layers_are_spread_as_published() -> None:
    assert spread_layers(36, 5) == [1, 9, 17, 25, 33]
    assert spread_layers(30, 3) == [1, 14, 27]
    assert spread_layers(30, 1) == [29]
    assert spread_layers(3, 3) == [0, 1, 2]


@pytest.mark.parametrize("kind", ["DFlashDraftModel", "DFlash2DraftModel"])
@torch.no_grad()
def test_published_implementation_agrees(kind: str) -> None:
    """The `dflash` package, where it is installed, gives the same hidden states and picks the same
    candidates."""
    dflash = pytest.importorskip("dflash.model")
    from transformers import Qwen3Config

    settings = {"mask_token_id": 3, "target_layer_ids": [0, 2], "block_size": 5}
    settings |= {"conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": 6, "selector_top_k": 7}
    published = getattr(dflash, kind)(
        Qwen3Config(
            vocab_size=31,
            hidden_size=36,
            intermediate_size=53,
            num_hidden_layers=2,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=10,
            max_position_embeddings=96,
            num_target_layers=4,
            dflash_config=settings,
            attn_implementation="sdpa",
        )
    ).eval()
    second = kind == "DFlash2DraftModel"
    config = replace(
        CONFIG,
        qk_norm=True,
        mask_token_id=3,
        anchor_predicts=False,
        block_size=5,
        conv_taps=2 if second else 0,
        conv_group_size=4 if second else 0,
        corrector="bilinear" if second else "none",
        corrector_options={"rank": 6, "num_candidates": 7} if second else {},
    )
    model = BlockModel(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    theirs = {name.replace("codebook.weight", "codebook"): value for name, value in published.state_dict().items()}
    assert theirs.keys() == model.tensors().keys()
    for name, value in model.tensors().items():
        theirs[name].copy_(value)
    features, anchors, embeddings, mask = batch_of(config)
    masks = mask.expand(1, 4, -1)
    ours = model.backbone(features, anchors, embeddings, mask)
    for index in range(3):
        anchor = int(anchors[0, index])
        block = torch.cat([embeddings[:1, index : index + 1], masks], 1)
        hidden = published(
            position_ids=torch.arange(anchor + 5)[None],
            noise_embedding=block,
            target_hidden=features[:1, :anchor],
        )
        assert torch.allclose(hidden[0, 1:], ours[0, index], atol=1e-4)
    if second:
        head = torch.randn(31, 36)
        hidden, anchor_ids = ours[0], torch.tensor([4, 9, 30])
        path, candidates, _ = published.candidate_selector.select(hidden, hidden @ head.T, anchor_ids, 0.0)
        top = top_candidates(hidden @ head.T, 7)
        sampler = SlotSampler([SamplingState(SamplingParams(temperature=0.0), [1], vocab_size=31) for _ in range(3)])
        drafts = model.corrector.correct(top.scores, hidden, anchor_ids, sampler, top.token_ids)
        assert torch.equal(drafts.token_ids, path)
        assert torch.equal(top.token_ids.sort(-1).values, candidates.sort(-1).values)
