"""The CPU kernels: right to float32's precision, and the same bits for a row whatever its company."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from foredraft.kv.cache import KVCache
from foredraft.models import native
from foredraft.models.attention import NativeAttention, TorchAttention
from foredraft.models.batch import ForwardBatch, ragged_batch
from foredraft.models.linear import DenseLinear, NativeLinear
from foredraft.models.ops import apply_rope, rms_norm, silu_mul

pytestmark = pytest.mark.skipif(not native.available(), reason=native.why_not)

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_kernels_are_built_wherever_there_is_a_compiler() -> None:
    assert native.available(), native.why_not


def test_openmp_is_torchs_own() -> None:
    """Two OpenMP libraries would fight for the cores."""
    with open("/proc/self/maps") as maps:
        loaded = {line.split()[-1] for line in maps if "libgomp" in line}
    assert len(loaded) == 1


@pytest.fixture(params=[True, False], ids=["amx", "no-amx"])
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the tile unit multiplies; where there is one, its absence is tested, too."""
    if request.param and not native.has_amx():
        pytest.skip("this processor has no tile unit")
    monkeypatch.setattr(native, "has_amx", lambda: request.param)
    return request.param


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("out_features", "in_features"), [(1, 1), (7, 33), (16, 7), (50, 64), (129, 257)])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 5, 7, 13, 16, 17, 32, 33, 64, 200])
def test_linear_equals_float64(dtype, out_features: int, in_features: int, num_rows: int, tiles: bool) -> None:
    weight, bias = random(out_features, in_features).to(dtype), random(out_features, seed=1)
    x, residual = random(num_rows, in_features, seed=2), random(num_rows, out_features, seed=3)
    linear = NativeLinear(weight, bias)
    if tiles and dtype is torch.bfloat16:
        x = x.bfloat16().float()  # what a tile holds; the kernel rounds just so
        unrounded = x * (1 + 2.0**-10)
        assert torch.equal(linear(unrounded, residual), linear(x, residual))
    expected = x.double() @ weight.double().T + bias.double() + residual.double()
    # The forward error bound of a sum of n float32 products: n · 2⁻²⁴ times the sum of their magnitudes.
    magnitude = x.double().abs() @ weight.double().abs().T + bias.double().abs() + residual.double().abs()
    bound = (in_features + 2) * 2.0**-24 * magnitude
    assert ((linear(x, residual).double() - expected).abs() <= bound).all()
    assert ((linear(x).double() - expected + residual.double()).abs() <= bound).all()
    ids = torch.arange(out_features).flip(0)
    assert torch.equal(linear.rows(ids), weight.float()[ids])


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_reads_strided_rows(dtype, tiles: bool) -> None:
    weight, wide = random(20, 12).to(dtype), random(5, 40, seed=1)
    x = wide[:, 8:20].bfloat16().float()
    x = torch.cat([x, x], 1)[:, 12:]
    torch.testing.assert_close(NativeLinear(weight, None)(x), x @ weight.float().T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_any_company(dtype, threads: int, tiles: bool) -> None:
    linear = NativeLinear(random(70, 100).to(dtype), random(70, seed=1))
    x = random(150, 100, seed=2)
    alone = torch.cat([linear(x[i : i + 1]) for i in range(len(x))])
    for count in (2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 150):
        assert torch.equal(linear(x[:count]), alone[:count])
    assert torch.equal(linear(x.flip(0)), alone.flip(0))


def test_float32_accumulation_in_another_order_would_be_seen() -> None:
    """Power: sums of the same terms in another order do differ in bits at these sizes."""
    weight, x = random(70, 100), random(4, 100, seed=2)
    order = torch.randperm(100, generator=torch.Generator().manual_seed(3))
    assert not torch.equal(NativeLinear(weight, None)(x), NativeLinear(weight[:, order], None)(x[:, order]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_that_is_not_a_number_stays_alone(dtype) -> None:
    linear, x = NativeLinear(random(33, 20).to(dtype), None), random(9, 20, seed=1)
    clean = linear(x)
    x[4, 3] = math.nan
    dirty = linear(x)
    assert dirty[4].isnan().all()
    keep = [i for i in range(9) if i != 4]
    assert torch.equal(dirty[keep], clean[keep])


def test_bfloat16_linear_is_exactly_its_widened_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "has_amx", lambda: False)  # tiles round what comes in, too
    weight = random(40, 30).bfloat16()
    x = random(6, 30, seed=1)
    assert torch.equal(NativeLinear(weight, None)(x), NativeLinear(weight.float(), None)(x))


@pytest.mark.parametrize("size", [1, 8, 24, 33, 576])
def test_rms_norm(size: int) -> None:
    x, weight = random(5, size) * 3, random(size, seed=1)
    wide = x.double()
    expected = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    torch.testing.assert_close(rms_norm(x, weight, 1e-5).double(), expected, rtol=1e-5, atol=1e-6)
    heads = random(5, 3 * size, seed=2)[:, : 2 * size].view(5, 2, size)  # a strided slice, as of fused qkv
    by_head = torch.stack([rms_norm(heads[:, h].contiguous(), weight, 1e-5) for h in range(2)], 1)
    assert torch.equal(rms_norm(heads, weight, 1e-5), by_head)


@pytest.mark.parametrize("width", [1, 8, 13, 1536])
def test_silu_mul(width: int) -> None:
    x = random(6, 2 * width) * 8
    gate, up = x.double().chunk(2, -1)
    torch.testing.assert_close(silu_mul(x).double(), gate / (1 + (-gate).exp()) * up, rtol=2e-6, atol=1e-6)
    extreme = torch.tensor([[-200.0, 200.0, 1.0, 1.0]])
    torch.testing.assert_close(silu_mul(extreme), torch.tensor([[0.0, 200.0]]), rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize(("size", "half"), [(16, 8), (24, 12), (64, 32), (64, 16), (10, 5)])
def test_rope(size: int, half: int) -> None:
    q, k = random(4, 3, size), random(4, 1, size, seed=1)
    angle = random(4, half, seed=2)
    expected = []
    for x in (q, k):
        a, b, rest = x[..., :half].double(), x[..., half : 2 * half].double(), x[..., 2 * half :].double()
        c, s = angle.double().cos()[:, None], angle.double().sin()[:, None]
        expected.append(torch.cat([a * c - b * s, b * c + a * s, rest], -1))
    for got, right in zip(apply_rope(q, k, angle.cos(), angle.sin()), expected, strict=True):
        torch.testing.assert_close(got.double(), right, rtol=1e-5, atol=1e-6)


# ---- attention


def filled_cache(heads: int, size: int, block_size: int, dtype, num_blocks: int = 40) -> KVCache:
    """A cache whose unused slots hold NaN: nothing may read them."""
    cache = KVCache(1, num_blocks, block_size, heads, size, dtype, CPU)
    cache.k.fill_(math.nan)
    cache.v.fill_(math.nan)
    return cache


def attend(attention, batch: ForwardBatch, cache: KVCache, qkv, window: int | None = None) -> Tensor:
    q, k, v = qkv
    return attention(0, q, k, v, batch, cache, scale=q.shape[-1] ** -0.5, sliding_window=window)


def scattered(lengths: list[int], block_size: int) -> list[list[int]]:
    order = torch.randperm(40, generator=torch.Generator().manual_seed(9)).tolist()
    return [[order.pop() for _ in range(-(-length // block_size))] for length in lengths]


def projections(num_tokens: int, heads: int, kv_heads: int, size: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    return (
        random(num_tokens, heads, size, seed=seed),
        random(num_tokens, kv_heads, size, seed=seed + 1),
        random(num_tokens, kv_heads, size, seed=seed + 2),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 5, 17])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "block_size"), [(9, 3, 64, 16), (4, 1, 24, 8), (3, 3, 10, 5), (8, 2, 128, 16)]
)
def test_attention_equals_torchs(dtype, window, heads: int, kv_heads: int, size: int, block_size: int) -> None:
    prefixes, queries = [0, 37, 20, 3], [33, 1, 8, 2]
    tables = scattered([a + b for a, b in zip(prefixes, queries, strict=True)], block_size)
    results = []
    for attention in (NativeAttention(dtype), TorchAttention()):
        cache = filled_cache(kv_heads, size, block_size, dtype)
        for counts, starts, seed in ((prefixes, [0] * 4, 10), (queries, prefixes, 20)):
            kept = [i for i, count in enumerate(counts) if count]
            batch = ragged_batch(
                [[0] * counts[i] for i in kept],
                [starts[i] for i in kept],
                [tables[i] for i in kept],
                [0] * len(kept),
                block_size=block_size,
                device=CPU,
            )
            mixed = attend(attention, batch, cache, projections(sum(counts), heads, kv_heads, size, seed), window)
        results.append(mixed)
    assert not results[0].isnan().any()
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize(("size", "block_size"), [(64, 16), (10, 16), (24, 5), (33, 8)])
def test_a_query_has_the_same_bits_in_any_company(dtype, window, size: int, block_size: int, threads: int) -> None:
    """One request's 45 tokens: all at once, one by one, in chunks, and beside another request."""
    heads, kv_heads, total = 9, 3, 45
    q, k, v = projections(total, heads, kv_heads, size, 1)
    other = projections(6, heads, kv_heads, size, 50)
    tables = scattered([total, 6], block_size)
    outputs = []
    for chunk, mate in ((total, False), (1, False), (7, False), (8, True), (9, False)):
        cache = filled_cache(kv_heads, size, block_size, dtype)
        attention, parts = NativeAttention(dtype), []
        for start in range(0, total, chunk):
            n = min(chunk, total - start)
            tokens, starts, used = [[0] * n], [start], tables[:1]
            qkv = tuple(x[start : start + n] for x in (q, k, v))
            if mate:
                tokens, starts, used = [[0] * 6, *tokens], [0, *starts], [tables[1], tables[0]]
                qkv = tuple(torch.cat(pair) for pair in zip(other, qkv, strict=True))
            batch = ragged_batch(tokens, starts, used, [0] * len(tokens), block_size=block_size, device=CPU)
            parts.append(attend(attention, batch, cache, qkv, window)[-n:])
        outputs.append(torch.cat(parts))
    for output in outputs[1:]:
        assert torch.equal(output, outputs[0])


def tree_batch(
    parents: list[int], prefix: int, table: list[int], block_size: int
) -> tuple[ForwardBatch, list[list[int]]]:
    """An anchor and its tree as one query; also each node's path, anchor first."""
    paths = [[0]]
    for node, parent in enumerate(parents, start=1):
        paths.append([*paths[parent], node])
    chain = ragged_batch([[0] * len(paths)], [prefix], [table], [0], block_size=block_size, device=CPU)
    mask = torch.zeros(len(paths), len(paths), dtype=torch.bool)
    for node, path in enumerate(paths):
        mask[node, path] = True
    depths = torch.tensor([prefix + len(path) - 1 for path in paths])
    return (
        ForwardBatch(
            chain.input_ids,
            depths,
            chain.slot_mapping,
            chain.query_start_loc,
            chain.seq_lens,
            chain.block_tables,
            chain.logits_indices,
            mask,
        ),
        paths,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("prefix", [0, 5, 31])
@pytest.mark.parametrize("size", [32, 10])
def test_a_branch_of_a_tree_has_the_bits_of_its_chain(dtype, window, size: int, prefix: int) -> None:
    heads, kv_heads, block_size = 6, 2, 8
    table = scattered([48], block_size)[0]
    batch, paths = tree_batch([0, 0, 1, 1, 2, 3, 6], prefix, table, block_size)
    past = projections(prefix, heads, kv_heads, size, 5)
    nodes = projections(len(paths), heads, kv_heads, size, 9)

    def start(attention) -> KVCache:
        cache = filled_cache(kv_heads, size, block_size, dtype)
        if prefix:
            first = ragged_batch([[0] * prefix], [0], [table], [0], block_size=block_size, device=CPU)
            attend(attention, first, cache, past, window)
        return cache

    native_attention = NativeAttention(dtype)
    as_tree = attend(native_attention, batch, start(native_attention), nodes, window)
    by_torch = attend(TorchAttention(), batch, start(TorchAttention()), nodes, window)
    torch.testing.assert_close(as_tree, by_torch, rtol=1e-4, atol=1e-5)
    for node, path in enumerate(paths):
        chain = ragged_batch([[0] * len(path)], [prefix], [table], [0], block_size=block_size, device=CPU)
        qkv = tuple(x[path] for x in nodes)
        as_chain = attend(native_attention, chain, start(native_attention), qkv, window)
        assert torch.equal(as_tree[node], as_chain[-1])


def test_slots_are_copied_as_if_all_at_once() -> None:
    cache = KVCache(2, 6, 4, 2, 3, torch.float32, CPU)
    slots = torch.arange(24)
    for layer in range(2):
        cache.write(layer, slots, random(24, 2, 3, seed=layer), random(24, 2, 3, seed=layer + 5))
    before = [cache.read(layer, slots) for layer in range(2)]
    source, destination = torch.tensor([3, 9, 4]), torch.tensor([9, 4, 20])
    cache.copy_slots(source, destination)
    for layer in range(2):
        for old, new in zip(before[layer], cache.read(layer, slots), strict=True):
            expected = old.clone()
            expected[destination] = old[source]
            assert torch.equal(new, expected)


def test_dense_and_native_linear_agree() -> None:
    weight, x = random(30, 20), random(4, 20, seed=1)
    torch.testing.assert_close(NativeLinear(weight, None)(x), DenseLinear(weight, None)(x), rtol=1e-5, atol=1e-5)
