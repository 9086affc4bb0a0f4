"""Stage one: the target answers the training prompts itself, since a drafter must learn the target's own words.

Answers are appended to one file as they finish, so a stop at any moment loses only those that were being written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from foredraft.engine.llm import LLM
from foredraft.engine.prompts import Prompt
from foredraft.errors import RequestError
from foredraft.measure.prompts import encoded
from foredraft.sampling.params import SamplingParams

Progress = Callable[[int, int, int], None]
"""Called with (prompts answered, prompts in all, tokens written since the start)."""


@dataclass(frozen=True)
class Response:
    """A prompt's answer: ids of both, and the temperature that it was sampled at."""

    index: int
    prompt_token_ids: list[int]
    token_ids: list[int]
    temperature: float


def regenerate(
    llm: LLM, prompts: Sequence[str], file: Path, *, max_tokens: int, seed: int, progress: Progress | None = None
) -> list[Response]:
    """Answers the prompts that `file` has no answer to yet; returns all answers by index.

    Every other prompt is answered greedily, the rest at temperature 1, since a drafter is used with both.
    """
    answers = {each.index: each for each in read_responses(file)}
    pending = [index for index in range(len(prompts)) if index not in answers]

    def requests() -> Iterator[tuple[Prompt, SamplingParams]]:
        for index in pending:
            params = SamplingParams(max_tokens=max_tokens, temperature=_temperature(index), seed=seed + index)
            yield encoded(llm, prompts[index]), params

    written = 0
    with file.open("a", encoding="utf-8") as out:
        for place, output in llm.generate_as_finished(requests()):
            if output.error is not None:
                raise RequestError(f"the target cannot answer training prompt {pending[place]}: {output.error}")
            token_ids = output.outputs[0].token_ids
            index = pending[place]
            answers[index] = Response(index, output.prompt_token_ids, token_ids, _temperature(index))
            out.write(json.dumps(asdict(answers[index])) + "\n")
            out.flush()
            written += len(token_ids)
            if progress is not None:
                progress(len(answers), len(prompts), written)
    return [answers[index] for index in sorted(answers)]


def read_responses(file: Path) -> list[Response]:
    """The whole lines of an answer file; a line cut by a kill is dropped from the file, too."""
    if not file.exists():
        return []
    text = file.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        file.write_text(whole, encoding="utf-8")
    return [Response(**json.loads(line)) for line in whole.splitlines()]


def _temperature(index: int) -> float:
    return float(index % 2)
