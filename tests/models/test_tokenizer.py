"""Tokenizers: the demo's against transformers', GGUF ones built here against rules worked here, chat templates."""

from __future__ import annotations

import json
import random
import string

import gguf
import pytest
import transformers
from tiny import save_demo_layers
from tokenizers import pre_tokenizers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from foredraft.errors import ModelError, RequestError
from foredraft.models.demo import demo_path
from foredraft.models.gguf_file import GGUFFile
from foredraft.models.gguf_tokenizer import tokenizer_from_gguf
from foredraft.models.tokenizer import Tokenizer, tokenizer_from_directory

TEXTS = [
    "",
    " ",
    "Hello, world! It's 12345.678 o'clock; they'll come.",
    "def f(x: int) -> str:\n\treturn f'{x:>8}'  # comment\n\n\nclass A:\r\n    pass\n",
    "日本語のテキストと中文，以及한국어 문장。",
    "👩‍👩‍👧 emoji 😀🏳️‍🌈 and flags 🇩🇪🇫🇷",
    "naïve café Ünïcode ½ ² Ⅷ ٣٤ e\u0301",
    "  leading and trailing   \t\n ",
    '<html><body id="x">1&nbsp;2</body></html>',
    "\x00\x07 control \u200b zero \ufeff",
    "<|im_start|>user\nhi there<|im_end|>\n<|endoftext|>",
]
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "How many is 2 + 2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "Sure?"},
]


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    return tokenizer_from_gguf(GGUFFile(demo_path()))


@pytest.fixture(scope="module")
def reference():
    """transformers' conversion of the demo's vocabulary, which lacks SmolLM's splitting of digits."""
    path = demo_path()
    converted = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    converted.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return converted


@pytest.mark.parametrize("text", TEXTS)
def test_the_demo_tokenizer_equals_transformers_and_round_trips(demo, reference, text):
    ids = demo.encode(text)
    assert ids == reference.encode(text, add_special_tokens=False)
    assert demo.decode(ids, skip_special_tokens=False) == text
    assert b"".join(demo.id_to_bytes(i) for i in ids) == text.encode()
    assert all(demo.vocab()[demo.id_to_token(i)] == i for i in ids)


def test_digits_stand_alone(demo):
    assert [demo.decode([i]) for i in demo.encode("in 2024")] == ["in", " ", "2", "0", "2", "4"]


def test_the_demo_special_tokens(demo):
    assert (demo.bos_token_id, demo.eos_token_id, demo.vocab_size) == (1, 2, 49152)
    assert demo.special_ids == frozenset(range(17))
    assert demo.decode([1, 4093, 2]) == demo.decode([4093])
    assert demo.id_to_bytes(2) == b"<|im_end|>"
    assert (demo.id_to_bytes(10**6), demo.id_to_token(10**6)) == (b"", None)


def test_chats_render_as_the_metadata_say(demo, reference):
    assert demo.apply_chat_template(MESSAGES) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHow many is 2 + 2?<|im_end|>\n"
        "<|im_start|>assistant\n4<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"
    )
    for options in ({"add_generation_prompt": True}, {"add_generation_prompt": False}):
        text = demo.apply_chat_template(MESSAGES[1:], **options)
        assert text == reference.apply_chat_template(MESSAGES[1:], tokenize=False, **options)
        assert demo.apply_chat_template(MESSAGES[1:], tokenize=True, **options) == demo.encode(text)


def test_templates_get_variables_and_tools_and_run_in_a_sandbox(demo):
    def render(template: str, **options: object) -> object:
        return demo.apply_chat_template(MESSAGES[:1], chat_template=template, **options)

    assert render("{{ bos_token }}{{ mood }}{{ tools[0].name }}", mood="calm", tools=[{"name": "add"}]) == (
        "<|im_start|>calmadd"
    )
    with pytest.raises(RequestError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")
    for template in ("{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{% if %}", "{{ 1 + messages }}"):
        with pytest.raises(RequestError, match="the chat template cannot render"):
            render(template)


def test_a_template_chosen_by_name_and_a_model_without_one(demo):
    named = Tokenizer(demo.backend, chat_template={"default": "plain", "tool_use": "with tools"})
    assert named.apply_chat_template(MESSAGES) == "plain"
    assert named.apply_chat_template(MESSAGES, tools=[{"name": "add"}]) == "with tools"
    with pytest.raises(RequestError, match="no chat template"):
        Tokenizer(demo.backend).apply_chat_template(MESSAGES)


def test_text_that_is_no_unicode_is_the_requests_fault(demo):
    with pytest.raises(RequestError, match="cannot be encoded"):
        demo.encode("a\ud800b")


def test_a_directory_gives_the_same_tokenizer_without_its_truncation(demo, tmp_path):
    save_demo_layers(tmp_path, 1)
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    content["truncation"] = {"max_length": 4, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    path.write_text(json.dumps(content))
    loaded = tokenizer_from_directory(tmp_path)
    for text in TEXTS:
        assert loaded.encode(text) == demo.encode(text)
    assert loaded.first_differences(demo) == []
    assert loaded.special_ids == demo.special_ids
    assert loaded.apply_chat_template(MESSAGES) == demo.apply_chat_template(MESSAGES)
    path.write_text("{")
    with pytest.raises(ModelError, match="its tokenizer cannot be loaded"):
        tokenizer_from_directory(tmp_path)
    path.unlink()
    with pytest.raises(ModelError, match="no tokenizer .*skip_tokenizer_init"):
        tokenizer_from_directory(tmp_path)


def write_vocabulary(path, model: str, tokens: list[str], types=None, scores=None, merges=None, **metadata) -> GGUFFile:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(types or [1] * len(tokens))
    if scores:
        writer.add_token_scores(scores)
    if merges is not None:
        writer.add_token_merges(merges)
    for key, value in metadata.items():
        add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32}[type(value)]
        add(f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return GGUFFile(path)


def byte_level(path, merges=(), extra=(), types=(), **metadata) -> Tokenizer:
    tokens = [*bytes_to_unicode().values(), *(merge.replace(" ", "") for merge in merges), *extra]
    kinds = [1] * (len(tokens) - len(extra)) + list(types)
    return tokenizer_from_gguf(write_vocabulary(path, "gpt2", tokens, kinds, merges=list(merges), **metadata))


PIECES = {  # "I'LL pay 12345 now!!\n\n  ok", split by hand with each rule
    "gpt-2": ["I", "'", "LL", " pay", " 12345", " now", "!!", "\n\n ", " ok"],
    "smollm": ["I", "'", "LL", " pay", " ", "1", "2", "3", "4", "5", " now", "!!", "\n\n ", " ok"],
    "default": ["I", "'", "LL", " pay", " ", "123", "45", " now", "!!", "\n\n ", " ok"],
    "llama-bpe": ["I", "'LL", " pay", " ", "123", "45", " now", "!!\n\n", " ", " ok"],
    "qwen2": ["I", "'LL", " pay", " ", "1", "2", "3", "4", "5", " now", "!!\n\n", " ", " ok"],
    "tekken": ["I", "'LL", " pay", " ", "1", "2", "3", "4", "5", " now", "!!\n\n", " ", " ok"],
}


@pytest.mark.parametrize("name", PIECES)
def test_pre_tokenizers_split_as_their_rules_say(name, tmp_path):
    text = "I'LL pay 12345 now!!\n\n  ok"
    backend = byte_level(tmp_path / "v.gguf", pre=name).backend
    spans = [span for _, span in backend.pre_tokenizer.pre_tokenize_str(text)]
    pieces = [text[begin:end] for begin, end in spans]
    assert "".join(pieces) == text
    assert pieces == PIECES[name]


def test_merges_apply_in_order_and_llama3_takes_whole_words_first(tmp_path):
    merges = ["l o", "o w", "lo w"]
    assert [byte_level(tmp_path / "a.gguf", merges, pre="gpt-2").decode([i]) for i in (256, 257, 258)] == [
        "lo",
        "ow",
        "low",
    ]
    plain = byte_level(tmp_path / "a.gguf", merges, extra=["slow"], types=[1], pre="gpt-2", add_bos_token=False)
    whole = byte_level(tmp_path / "b.gguf", merges, extra=["slow"], types=[1], pre="llama-bpe", add_bos_token=False)
    assert [plain.id_to_token(i) for i in plain.encode("slow")] == ["s", "low"]
    assert [whole.id_to_token(i) for i in whole.encode("slow")] == ["slow"]


def test_special_tokens_are_matched_in_the_text_and_added_when_the_metadata_say_so(tmp_path):
    extra, types = ["<s>", "</s>", "<tool>"], [3, 3, 4]
    ids = {"bos_token_id": 256, "eos_token_id": 257}
    made = byte_level(tmp_path / "a.gguf", extra=extra, types=types, pre="llama-bpe", **ids)
    assert made.encode("a</s>b") == [256, *made.encode("a", False), 257, *made.encode("b", False)]
    assert made.encode("<tool>", add_special_tokens=False) == [258]
    assert made.special_ids == {256, 257}
    assert made.decode([256, 258, 257]) == "<tool>"
    both = byte_level(
        tmp_path / "b.gguf", extra=extra, types=types, pre="gpt-2", add_bos_token=True, add_eos_token=True, **ids
    )
    assert both.encode("") == [256, 257]
    none = byte_level(tmp_path / "c.gguf", extra=extra, types=types, pre="llama-bpe", add_bos_token=False, **ids)
    assert none.encode("") == []


def test_what_is_unknown_or_inconsistent_is_refused_by_name(tmp_path):
    with pytest.raises(ModelError, match="pre-tokenizer 'klingon' is not supported .*smollm"):
        byte_level(tmp_path / "a.gguf", pre="klingon")
    with pytest.raises(ModelError, match="tokenizer 'rwkv' is not supported; known: gpt2, llama"):
        tokenizer_from_gguf(write_vocabulary(tmp_path / "b.gguf", "rwkv", ["a"]))
    with pytest.raises(ModelError, match="1 tokens twice"):
        tokenizer_from_gguf(write_vocabulary(tmp_path / "c.gguf", "gpt2", ["a", "a"], merges=[]))
    with pytest.raises(ModelError, match="the vocabulary is inconsistent"):
        tokenizer_from_gguf(write_vocabulary(tmp_path / "d.gguf", "gpt2", ["a", "b"], merges=["x y"], pre="gpt-2"))
    file = write_vocabulary(tmp_path / "e.gguf", "gpt2", ["a"], merges=[])
    del file.metadata["tokenizer.ggml.tokens"]
    with pytest.raises(ModelError, match="no tokenizer in the metadata"):
        tokenizer_from_gguf(file)


BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def sentencepiece(path, pieces: list[str], scores: list[float], **metadata) -> Tokenizer:
    tokens = ["<unk>", "<s>", "</s>", *BYTES, *pieces]
    types = [2, 3, 3, *[6] * 256, *[1] * len(pieces)]
    file = write_vocabulary(
        path, "llama", tokens, types, [0.0] * 259 + scores, bos_token_id=1, eos_token_id=2, **metadata
    )
    return tokenizer_from_gguf(file)


def greedy_merge(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's BPE as its paper says: join the neighbours whose union scores best, leftmost first."""
    parts = list(text)
    while True:
        best = max(
            ((scores[a + b], -i) for i, (a, b) in enumerate(zip(parts, parts[1:], strict=False)) if a + b in scores),
            default=None,
        )
        if best is None:
            return parts
        i = -best[1]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


def test_sentencepiece_joins_by_score(tmp_path):
    rng = random.Random(4)
    letters = "▁abcd"
    pieces = list(letters)
    while len(pieces) < 60:
        piece = rng.choice(pieces) + rng.choice(pieces)
        if piece not in pieces and len(piece) < 7:
            pieces.append(piece)
    scores = {piece: -float(rank) for rank, piece in enumerate(rng.sample(pieces[5:], len(pieces) - 5))}
    order = [*letters, *scores]
    made = sentencepiece(tmp_path / "v.gguf", order, [-1000.0] * 5 + list(scores.values()), add_bos_token=False)
    for _ in range(200):
        text = "".join(rng.choice("abcd ") for _ in range(rng.randint(1, 30)))
        want = greedy_merge("▁" + text.replace(" ", "▁"), scores)
        assert [made.id_to_token(i) for i in made.encode(text)] == want
        assert made.decode(made.encode(text)) == text


def test_sentencepiece_falls_back_to_bytes_and_adds_bos(tmp_path):
    pieces = ["▁", *string.ascii_lowercase, "▁a"]
    made = sentencepiece(tmp_path / "v.gguf", pieces, [-float(i) for i in range(len(pieces))])
    ids = made.encode("a é😀\n")
    assert ids[:2] == [1, made.vocab()["▁a"]]
    assert made.decode(ids) == "a é😀\n"
    assert b"".join(made.id_to_bytes(i) for i in ids[1:]) == " a é😀\n".encode()
    assert made.id_to_bytes(3 + 0xC3) == b"\xc3"
    bare = sentencepiece(tmp_path / "w.gguf", pieces, [-float(i) for i in range(len(pieces))], add_space_prefix=False)
    assert bare.encode("a") == [1, bare.vocab()["a"]]
    assert bare.decode(bare.encode(" a")) == " a"


def test_first_differences_name_ids_and_both_tokens(tmp_path, demo):
    a = byte_level(tmp_path / "a.gguf", extra=["x1", "x2"], types=[3, 3], pre="gpt-2")
    b = byte_level(tmp_path / "b.gguf", extra=["x1", "y2", "y3"], types=[3, 3, 3], pre="gpt-2")
    assert a.first_differences(a) == []
    assert a.first_differences(b) == [(257, "x2", "y2"), (258, None, "y3")]
    assert len(a.first_differences(demo, limit=3)) == 3
