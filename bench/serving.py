"""What the server costs: the engine's tokens per second with it in front, against the bare `AsyncEngine`.

Run: .venv/bin/python -m bench.serving [--streams 16] [--rounds 5] [--no-speculation] [--json PATH]

One process holds the engine and the server. Rounds alternate: the same prompts are streamed once straight from the
engine and once over HTTP to a client, which is a process of its own so that its work is not the server's. Beside the
wall clock, which other work on the machine disturbs, the process's CPU seconds per token are compared.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import httpx2

from foredraft import LLM, SamplingParams, SpeculativeConfig, __version__
from foredraft.serve.app import make_state
from foredraft.serve.run import Server, bind
from foredraft.serve.settings import ServerSettings
from foredraft.serve.state import ServerState


@dataclass(frozen=True)
class Round:
    """One pass over the prompts."""

    tokens: int
    seconds: float
    cpu_seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def cpu_per_token(self) -> float:
        return self.cpu_seconds / self.tokens


def prompts(count: int) -> list[str]:
    return [f"{number}. A story of {number + 2} friends and a river:" for number in range(count)]


async def measured(state: ServerState, work: Any) -> Round:
    """Tokens, seconds and CPU seconds of `work`, with nothing reused from before."""
    await state.engine.between_steps(state.llm.reset_prefix_cache)
    tokens, wall, cpu = state.metrics.num_generated, perf_counter(), process_time()
    await work
    return Round(state.metrics.num_generated - tokens, perf_counter() - wall, process_time() - cpu)


async def bare(state: ServerState, texts: list[str], max_tokens: int) -> None:
    """Streams straight from the engine."""

    async def read(text: str) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        async for _ in state.engine.generate(text, params):
            pass

    await asyncio.gather(*map(read, texts))


async def compare(llm: LLM, streams: int, rounds: int, max_tokens: int, progress: Any) -> dict[str, list[Round]]:
    """Rounds of both kinds, the first of each thrown away."""
    settings = ServerSettings(port=0)
    state = make_state(llm, settings, __version__)
    listening = bind(settings)
    server = Server(state)
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    while not server.started:
        await asyncio.sleep(0.01)
    url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1/completions"
    arguments = ["-m", "bench.serving", "--client", url, "--streams", str(streams), "--max-tokens", str(max_tokens)]
    pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
    client = await asyncio.create_subprocess_exec(sys.executable, *arguments, **pipes)
    assert client.stdin is not None
    assert client.stdout is not None
    await client.stdout.readline()

    async def served() -> None:
        client.stdin.write(b"go\n")
        if await client.stdout.readline() != b"done\n":
            raise SystemExit("the client failed")

    found: dict[str, list[Round]] = {"bare": [], "served": []}
    for number in range(rounds + 1):
        kinds = [("bare", lambda: bare(state, prompts(streams), max_tokens)), ("served", served)]
        for name, work in kinds if number % 2 else reversed(kinds):
            result = await measured(state, work())
            if number:
                found[name].append(result)
            progress()
    client.stdin.close()
    await client.wait()
    server.should_exit = True
    with suppress(asyncio.CancelledError):
        await serving
    return found


async def be_client(url: str, streams: int, max_tokens: int) -> None:
    """Streams all prompts whenever a line comes in, as cheaply as can be."""
    async with httpx2.AsyncClient(timeout=600) as http:

        async def read(text: str) -> None:
            body = {"prompt": text, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
            async with http.stream("POST", url, json=body) as response:
                response.raise_for_status()
                async for _ in response.aiter_raw():
                    pass

        print("ready", flush=True)
        while await asyncio.to_thread(sys.stdin.readline):
            await asyncio.gather(*map(read, prompts(streams)))
            print("done", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--no-speculation", action="store_true")
    parser.add_argument("--json", type=Path, metavar="PATH")
    parser.add_argument("--client", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.client:
        asyncio.run(be_client(given.client, given.streams, given.max_tokens))
        return 0
    from rich.console import Console
    from rich.progress import Progress

    llm = LLM(given.model, speculative=None if given.no_speculation else SpeculativeConfig())
    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("rounds", total=2 * given.rounds + 2)
        advance = lambda: bar.advance(task)  # noqa: E731
        found = asyncio.run(compare(llm, given.streams, given.rounds, given.max_tokens, advance))
    speed = {name: median(each.tokens_per_second for each in rounds) for name, rounds in found.items()}
    cpu = {name: median(each.cpu_per_token for each in rounds) for name, rounds in found.items()}
    for name in found:
        spread = [each.cpu_per_token for each in found[name]]
        print(
            f"{name:>6}: {speed[name]:8.1f} tokens/s, {1e3 * cpu[name]:.3f} ms of CPU per token "
            f"({1e3 * min(spread):.3f} to {1e3 * max(spread):.3f})"
        )
    loss, more = 1 - speed["served"] / speed["bare"], cpu["served"] / cpu["bare"] - 1
    print(f"the server costs {loss:.1%} of the tokens/s and adds {more:.1%} of CPU time per token")
    if given.json is not None:
        figures = {name: [asdict(each) for each in rounds] for name, rounds in found.items()}
        given.json.write_text(json.dumps({**figures, "loss": loss, "more_cpu": more}, indent=2), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
