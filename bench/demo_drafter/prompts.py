"""Writes the prompts that the shipped drafter is trained on: our own words, combined by a seeded generator.

Run: .venv/bin/python bench/demo_drafter/prompts.py PROMPTS.jsonl [--count 4000]

Kinds follow what the demo model is asked in practice: conversation, instructions, word problems and code. No public
set went in, so nothing here can leak from an evaluation.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

WORDS = json.loads(Path(__file__).with_name("words.json").read_text(encoding="utf-8"))
"""What is combined: topics, places, people, and the sentences that they go into."""


def chat(random_: random.Random, templates: list[str]) -> str:
    person, person2 = random_.sample(WORDS["people"], 2)
    topic, other = random_.sample(WORDS["topics"], 2)
    text = random_.choice(templates).format(
        topic=topic,
        other=other,
        person=person,
        person2=person2,
        place=random_.choice(WORDS["places"]),
        n=random_.choice(["3", "4", "5", "three", "five", "six", "10"]),
    )
    return text[0].upper() + text[1:]


def math(random_: random.Random) -> str:
    name, name2 = random_.sample(WORDS["names"], 2)
    c, d = random_.randint(2, 9), random_.randint(2, 9)
    return random_.choice(WORDS["math"]).format(
        name=name,
        name2=name2,
        things=random_.choice(WORDS["things"]),
        a=random_.randint(10, 60),
        b=random_.randint(5, 40),
        c=c,
        d=d,
        ac=c * random_.randint(4, 30),
        d3=d * 3,
        total=(c + d) * random_.randint(3, 12),
        big=random_.choice([100, 120, 180, 200, 240, 300, 500]),
        percent=random_.choice([5, 10, 20, 25, 40, 50]),
    )


def code(random_: random.Random) -> str:
    signature, doc = random_.choice(WORDS["functions"])
    stub = f'def {signature}:\n    """{doc}"""\n'
    return random_.choice(WORDS["code"]).format(stub=stub, name=signature.split("(")[0], doc=doc)


def prompts(count: int, seed: int = 0) -> list[str]:
    """`count` different prompts: two fifths conversation and as many instructions, the rest problems and code."""
    random_ = random.Random(seed)
    kinds = (
        [lambda r: chat(r, WORDS["chat"])] * 4 + [lambda r: chat(r, WORDS["instruct"])] * 4 + [math, math, code, code]
    )
    found: dict[str, None] = {}
    while len(found) < count:
        found[random_.choice(kinds)(random_)] = None
    return list(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--count", type=int, default=4000)
    arguments = parser.parse_args()
    lines = [json.dumps({"prompt": prompt}, ensure_ascii=False) for prompt in prompts(arguments.count)]
    arguments.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{len(lines)} prompts in {arguments.out}")


if __name__ == "__main__":
    main()
