"""A server whose model says what the prompt tells it to, over a real engine, scheduler and drafter.

A prompt holds a script between U+0001 and U+0002; the answer is the script, byte by byte, then the end of text. What a
grammar forbids is left out by the usual masks. Without a script the model babbles from a random table.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from tests.engine.fake import FakeModel, fake_engine
from torch import Tensor

from foredraft.config import EngineConfig, SpeculativeConfig
from foredraft.draft.ngram import NgramDrafter
from foredraft.models.decoder import ForwardOutput
from foredraft.models.tokenizer import Tokenizer
from foredraft.serve.app import make_state
from foredraft.serve.run import Server, bind
from foredraft.serve.settings import ServerSettings
from foredraft.serve.state import ServerState

BEGIN, END, EOS = 1, 2, 256
ASSISTANT = b"<assistant>"
CONTEXT = 4096
HIDDEN = 8
MODEL = "scripted"
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{{ '\\n' }}"
    "{% endfor %}"
    "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def script(text: str) -> str:
    """A prompt that makes the model say `text`."""
    return f"say \x01{text}\x02"


class ByteText:
    """Token id = byte; 256 ends a text."""

    chat_template: Any = TEMPLATE
    special_ids = frozenset({EOS})
    special_tokens: dict[str, str] = {}  # noqa: RUF012
    eos_token_id = EOS

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(Tokenizer.encode(self, text))  # type: ignore[arg-type]

    @property
    def backend(self) -> Any:
        def encode(text: str, add_special_tokens: bool) -> Any:
            return SimpleNamespace(ids=list(text.encode()))

        return SimpleNamespace(encode=encode)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        pieces = bytearray()
        for token in ids:
            pieces += bytes([token]) if token < EOS else b"" if skip_special_tokens else b"</s>"
        return pieces.decode(errors="replace")

    def id_to_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < EOS else b"</s>"

    def id_to_token(self, token: int) -> str:
        return repr(self.id_to_bytes(token))

    def apply_chat_template(self, messages: Any, **options: Any) -> Any:
        return Tokenizer.apply_chat_template(self, messages, **options)  # type: ignore[arg-type]

    def _template(self, with_tools: bool) -> str:
        return Tokenizer._template(self, with_tools)  # type: ignore[arg-type]


class ScriptedModel(FakeModel):
    """Says what it is told."""

    def __init__(self, max_model_len: int = CONTEXT) -> None:
        self.fast = False
        self.config = SimpleNamespace(vocab_size=EOS + 1, max_model_len=max_model_len, hidden_size=HIDDEN)
        self.num_forwards = 0
        self.tokens_per_forward = []
        self.nan_after = None
        self.babble = torch.randn(EOS + 1, EOS + 1, generator=torch.Generator().manual_seed(5))
        self.babble[:, EOS] = -30.0
        self.delay = 0.0

    def next_logits(self, history: Sequence[int]) -> Tensor:
        text = bytes(token if token < EOS else 0 for token in history)
        end = text.rfind(END)
        begin = text.rfind(BEGIN, 0, max(end, 0))
        logits = self.babble[history[-1]].clone()
        if begin >= 0:
            opening = text.find(ASSISTANT, end)
            start = end + 1 if opening < 0 else opening + len(ASSISTANT)
            place = begin + 1 + len(text) - start
            logits[text[place] if place < end else EOS] = 50.0
        if history[-1] == self.nan_after:
            logits[:] = float("nan")
        return logits

    def forward(self, batch, cache, feature_layers=()) -> ForwardOutput:
        if self.delay:
            threading.Event().wait(self.delay)
        output = super().forward(batch, cache, feature_layers)
        hidden = torch.stack([batch.input_ids * power % 17 - 8.0 for power in range(1, HIDDEN + 1)], -1).float()
        return ForwardOutput(hidden, output.features, output.logits)


class ScriptedLLM:
    """As much of `LLM` as the server uses."""

    def __init__(self, **options: Any) -> None:
        self.model = ScriptedModel()
        self.tokenizer = ByteText()
        self.engine, self._factory = fake_engine(
            self.model,
            NgramDrafter(1, 3),
            gamma=4,
            num_blocks=options.pop("num_blocks", 1200),
            block_size=16,
            max_num_seqs=options.get("max_num_seqs", 8),
            max_num_batched_tokens=512,
            tokenizer=self.tokenizer,
            eos_token_ids=[EOS],
        )
        self.config = EngineConfig(
            model=MODEL, max_num_batched_tokens=512, speculative=SpeculativeConfig(method="ngram"), **options
        )
        self.drafter_name = "ngram"
        self.max_model_len = CONTEXT
        self.max_token_chars = 4

    def assemble(self, prompt, params, gamma=None, priority=0):
        return self._factory.assemble(prompt, params, gamma, priority=priority)

    def rendered(self, messages, **options):
        return self._factory.rendered(messages, **options)


class RunningServer:
    """A server on a free port of this machine, on a thread of its own."""

    def __init__(self, settings: dict[str, Any] | None = None, **options: Any) -> None:
        self.llm = ScriptedLLM(**options)
        chosen = ServerSettings(port=0, **{"shutdown_timeout": 5.0, **(settings or {})})
        self.state: ServerState = make_state(self.llm, chosen, "9.9")  # type: ignore[arg-type]
        self._socket = bind(chosen)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self.server = Server(self.state)
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def num_used_blocks(self) -> int:
        return self.llm.engine.scheduler.pool.num_used

    def __enter__(self) -> RunningServer:
        self._thread.start()
        while not self.server.started:
            assert self._thread.is_alive(), "the server did not start"
            threading.Event().wait(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self.server.should_exit = True
        self._thread.join(20)
        assert not self._thread.is_alive(), "the server did not end"

    def wait_until_idle(self) -> None:
        """Waits until no request runs and all blocks are free."""
        for _ in range(500):
            if not self.llm.engine.scheduler.has_unfinished and self.num_used_blocks == 0:
                return
            threading.Event().wait(0.01)
        raise AssertionError(f"{self.num_used_blocks} blocks are still in use")

    def _run(self) -> None:
        asyncio.run(self.server.serve(sockets=[self._socket]))
