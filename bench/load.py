"""How the server bears a crowd, part of which means harm.

Run: .venv/bin/python -m bench.load [--seconds 180] [--clients 64] [--json PATH] [-- FLAGS OF foredraft serve]

Starts `foredraft serve` and asks it, while nobody else does, for the greedy answers to a set of prompts. Then many
clients at once stream the same prompts; some leave in the middle, some read slowly, and some send what no server should
trip over (`bench.hostile`). At the end every block must be free again, and a SIGTERM in the middle of a last burst must
let its answers finish. Exits 1 when the server does anything wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any

import httpx2
import psutil
from bench.hostile import attack

COMMAND = "import sys; from foredraft.cli.main import main; sys.exit(main())"
DEMO_FLAGS = ("--dtype", "float32", "--kv-cache-memory", str(256 * 2**20))
"""Float32, so that greedy answers do not depend on company; a small cache, so that it is soon full and memory flat."""
SUBJECTS = ("a river", "two cats", "the sea", "old maps", "a clock", "winter", "bread", "a train")
SHARES = {"leaves": 0.2, "reads slowly": 0.1, "harms": 0.15}
MEMORY_SAMPLE_SECONDS = 0.5


class ServerProcess:
    """A running `foredraft serve` on a free port; its log is kept."""

    def __init__(self, flags: Sequence[str]) -> None:
        arguments = [sys.executable, "-c", COMMAND, "serve", *flags, "--port", "0", "--shutdown-timeout", "300"]
        self.process = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True, env=dict(os.environ))
        self.log, self.url = "", ""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log += line
            if found := re.search(r"serving .* on (http://\S+)", line):
                self.url = found[1]
                break
        if not self.url:
            raise SystemExit(f"the server did not start:\n{self.log}")
        threading.Thread(target=self._follow, daemon=True).start()
        self._status = psutil.Process(self.process.pid)

    def _follow(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log += line

    @property
    def resident_bytes(self) -> int:
        return int(self._status.memory_info().rss)

    @property
    def cpu_seconds(self) -> float:
        times = self._status.cpu_times()
        return float(times.user + times.system)

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        lines = httpx2.get(self.url + "/metrics", timeout=120).text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if re.match(re.escape(name) + r"[ {]", line))


@dataclass(frozen=True)
class Question:
    """A request for a greedy answer."""

    path: str
    body: dict[str, Any]

    @property
    def key(self) -> str:
        return json.dumps([self.path, self.body])


def questions(max_tokens: int) -> list[Question]:
    """Completions and chats, long and short."""
    asked = []
    for number, subject in enumerate(SUBJECTS):
        text = f"Tell me about {subject}. " * (1 + 4 * (number % 3))
        more = {"max_tokens": max_tokens + 5 * (number % 4), "temperature": 0.0}
        asked.append(Question("/v1/completions", {"prompt": text, **more}))
        asked.append(Question("/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **more}))
    return asked


@dataclass
class Report:
    """What a run found."""

    seconds: float = 0.0
    clients: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)
    statuses: dict[str, int] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    generated_tokens: int = 0
    preemptions: int = 0
    resident_mib_after_warm_up: float = 0.0
    resident_mib_at_end: float = 0.0
    resident_mib_peak: float = 0.0
    memory_growth: float = 0.0
    blocks_in_use_at_end: float = 0.0
    finished_while_draining: int = 0
    exit_status: int | None = None


class Crowd:
    """The clients, and what they saw.

    Args:
        answers: by `Question.key`, what an unloaded server says.
    """

    def __init__(self, url: str, asked: Sequence[Question], answers: dict[str, str]) -> None:
        self.url = url
        self.asked = asked
        self.answers = answers
        self.outcomes: Counter[str] = Counter()
        self.statuses: Counter[str] = Counter()
        self.faults: list[str] = []

    async def client(self, seed: int, deadline: float) -> None:
        """Asks one thing after the other until the deadline."""
        chance = random.Random(seed)
        async with httpx2.AsyncClient(base_url=self.url, timeout=600) as http:
            while monotonic() < deadline:
                draw = chance.random()
                try:
                    if draw < SHARES["harms"]:
                        await self._harm(http, chance)
                        continue
                    draw -= SHARES["harms"]
                    leaves = chance.randrange(1, 12) if draw < SHARES["leaves"] else None
                    slow = SHARES["leaves"] <= draw < SHARES["leaves"] + SHARES["reads slowly"]
                    await self.ask(http, chance.choice(self.asked), leaves, 0.1 if slow else 0.0)
                except httpx2.HTTPError as error:
                    self.faults.append(f"the connection failed: {type(error).__name__}: {error}")
                    await asyncio.sleep(1)

    async def _harm(self, http: httpx2.AsyncClient, chance: random.Random) -> None:
        name, allowed, status = await attack(http, chance)
        self.statuses[f"{name}: {status}"] += 1
        self.outcomes["attacks"] += 1
        if status not in allowed:
            self.faults.append(f"{name}: answered {status}, not one of {sorted(allowed)}")

    async def ask(
        self,
        http: httpx2.AsyncClient,
        question: Question,
        leave_after: int | None = None,
        pause: float = 0.0,
        on_first: Callable[[], None] = lambda: None,
    ) -> bool:
        """Streams one answer; whether it came whole and right. Leaves after so many events when told to."""
        text, done, count = "", False, 0
        async with http.stream("POST", question.path, json={**question.body, "stream": True}) as response:
            if response.status_code == 429:
                self.outcomes["asked to come again"] += 1
                await asyncio.sleep(0.5)
                return False
            if response.status_code != 200:
                self.faults.append(f"a good request: {response.status_code} {(await response.aread())[:200]!r}")
                return False
            async for line in response.aiter_lines():
                if not line.startswith("data: "):
                    continue
                count += 1
                on_first()
                if line == "data: [DONE]":
                    done = True
                    break
                event = json.loads(line[6:])
                if "error" in event:
                    self.faults.append(f"a good request: {event['error']['message']}")
                    return False
                for choice in event["choices"]:
                    text += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
                if leave_after is not None and count >= leave_after:
                    self.outcomes["left"] += 1
                    return False
                if pause:
                    await asyncio.sleep(pause)
        right = text == self.answers[question.key]
        if not done:
            self.faults.append("a stream ended without [DONE]")
        elif not right:
            self.faults.append(f"a wrong answer: {text!r}, not {self.answers[question.key]!r}")
        else:
            self.outcomes["right, read slowly" if pause else "right"] += 1
        return done and right


def unloaded_answers(url: str, asked: Sequence[Question]) -> dict[str, str]:
    """What the server says when nobody else asks."""
    answers = {}
    for question in asked:
        choice = (
            httpx2.post(url + question.path, json=question.body, timeout=600).raise_for_status().json()["choices"][0]
        )
        answers[question.key] = choice["text"] if "text" in choice else choice["message"]["content"]
    return answers


def run(
    flags: Sequence[str],
    *,
    seconds: float,
    warm_up: float,
    clients: int,
    max_tokens: int = 24,
    progress: Callable[[float], None] = lambda done: None,
) -> Report:
    """One server, one crowd.

    Args:
        seconds: of load after `warm_up` seconds of the same.
        progress: told the share of the time that is over.
    """
    server = ServerProcess(flags)
    try:
        asked = questions(max_tokens)
        crowd = Crowd(server.url, asked, unloaded_answers(server.url, asked))
        report = Report(seconds, clients)
        asyncio.run(_load(server, crowd, report, warm_up, progress))
        _settle(server, report, crowd)
        asyncio.run(_drain(server, crowd, report))
        report.outcomes, report.statuses = dict(crowd.outcomes), dict(sorted(crowd.statuses.items()))
        report.faults = crowd.faults
        if "Traceback" in server.log:
            told = server.log[server.log.index("Traceback") :][:2000]
            report.faults.append(f"the server's log has a traceback:\n{told}")
        return report
    finally:
        server.process.kill()
        server.process.wait()


async def _load(
    server: ServerProcess, crowd: Crowd, report: Report, warm_up: float, progress: Callable[[float], None]
) -> None:
    begin = monotonic()
    deadline = begin + warm_up + report.seconds
    running = [asyncio.create_task(crowd.client(seed, deadline)) for seed in range(report.clients)]
    samples: list[tuple[float, int]] = []
    while not all(task.done() for task in running):
        await asyncio.sleep(MEMORY_SAMPLE_SECONDS)
        now = monotonic()
        if begin + warm_up < now < deadline:
            samples.append((now, server.resident_bytes))
        progress(min(1.0, (now - begin) / (warm_up + report.seconds)))
    await asyncio.gather(*running)
    sizes = [size / 2**20 for _, size in samples]
    part = max(1, len(sizes) // 5)
    report.resident_mib_after_warm_up, report.resident_mib_at_end = median(sizes[:part]), median(sizes[-part:])
    report.resident_mib_peak = max(sizes)
    report.memory_growth = report.resident_mib_at_end / report.resident_mib_after_warm_up - 1


def _settle(server: ServerProcess, report: Report, crowd: Crowd) -> None:
    """Waits until nothing runs, then counts."""
    deadline = monotonic() + 120
    while monotonic() < deadline and server.metric("vllm:num_requests_running") + server.metric(
        "vllm:num_requests_waiting"
    ):
        threading.Event().wait(0.2)
    report.blocks_in_use_at_end = server.metric("vllm:kv_cache_usage_perc")
    report.generated_tokens = int(server.metric("vllm:generation_tokens_total"))
    report.preemptions = int(server.metric("vllm:num_preemptions_total"))
    if report.blocks_in_use_at_end:
        crowd.faults.append(f"{report.blocks_in_use_at_end:.1%} of the blocks are still in use")
    if httpx2.get(server.url + "/health", timeout=120).status_code != 200:
        crowd.faults.append("the server is not healthy any more")


async def _drain(server: ServerProcess, crowd: Crowd, report: Report) -> None:
    """A burst, SIGTERM once all of it has begun, and what becomes of it."""
    begun: set[int] = set()

    def first(number: int) -> Callable[[], None]:
        return lambda: begun.add(number)

    async with httpx2.AsyncClient(base_url=server.url, timeout=600) as http:
        count = min(16, report.clients)
        burst = [
            asyncio.create_task(crowd.ask(http, crowd.asked[number % len(crowd.asked)], on_first=first(number)))
            for number in range(count)
        ]
        while len(begun) < count and not all(task.done() for task in burst):
            await asyncio.sleep(0.005)
        server.process.send_signal(signal.SIGTERM)
        report.finished_while_draining = sum(await asyncio.gather(*burst))
    if report.finished_while_draining != count:
        crowd.faults.append(f"{count - report.finished_while_draining} of {count} answers were lost in the drain")
    try:
        report.exit_status = await asyncio.to_thread(server.process.wait, 120)
    except subprocess.TimeoutExpired:
        crowd.faults.append("the server did not end after SIGTERM")
    if report.exit_status != 0:
        crowd.faults.append(f"exit status {report.exit_status}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--warm-up", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--json", type=Path, metavar="PATH")
    parser.add_argument("flags", nargs="*", metavar="FLAG", help=f"of the server; {' '.join(DEMO_FLAGS)}")
    given = parser.parse_args()
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("load", total=1.0)
        report = run(
            given.flags or DEMO_FLAGS,
            seconds=given.seconds,
            warm_up=given.warm_up,
            clients=given.clients,
            max_tokens=given.max_tokens,
            progress=lambda done: bar.update(task, completed=done),
        )
    table = Table("figure", "value")
    for name, value in asdict(report).items():
        if isinstance(value, dict):
            for key, count in value.items():
                table.add_row(f"  {key}", str(count))
        elif name != "faults":
            table.add_row(name.replace("_", " "), f"{value:.4g}" if isinstance(value, float) else str(value))
    table.add_row("faults", str(len(report.faults)))
    Console(width=100).print(table)
    for fault, count in Counter(report.faults).most_common(20):
        print(f"{count} x {fault}")
    if given.json is not None:
        given.json.write_text(json.dumps(asdict(report), indent=2), encoding="utf-8")
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main())
