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

TOPICS = """
tea|coffee|bread baking|home gardening|composting|houseplants|bees|whales|volcanoes|the water cycle|glaciers|coral reefs
the moon|black holes|Mars|the Roman Empire|the Silk Road|the printing press|the steam engine|railways|bridges|lighthouses
photography|watercolour painting|jazz|the violin|choirs|folk dance|theatre|poetry|detective novels|fairy tales|chess
board games|football|swimming|marathon running|cycling|yoga|meditation|sleep|stress|first aid|nutrition|vegetarian cooking
pasta|soups|spices|chocolate|cheese|saving money|household budgets|taxes|insurance|buying a used car|moving house
job interviews|writing a CV|remote work|teamwork|public speaking|time management|leadership|negotiation|small businesses
customer service|marketing|online shops|electric cars|solar power|wind turbines|batteries|recycling|plastic waste
climate change|forests|rivers|weather forecasts|earthquakes|maps|time zones|calendars|languages|translation|sign language
handwriting|libraries|museums|schools|homework|exams|mathematics|fractions|probability|statistics|geometry|computers
spreadsheets|databases|passwords|encryption|the internet|search engines|robots|machine learning|neural networks|satellites
telescopes|microscopes|vaccines|the heart|the brain|eyesight|teeth|dogs|cats|horses|birds|butterflies|dinosaurs|camping
hiking|trains|airports|hotels|weddings|birthdays|friendship|families|neighbours|voting|courts|newspapers|radio|podcasts
film making|cartoons|fashion|sewing|woodworking|pottery|knitting|tools|bicycles repairs|plumbing|paint|kitchens|gardens
""".replace("\n", "|").strip("|").split("|")

PLACES = (
    "Lisbon|Kyoto|Nairobi|Oslo|Cusco|Montreal|Hanoi|Marrakesh|Prague|Wellington|Jaipur|Edinburgh|Havana|Reykjavik|"
    "Cape Town|Seoul|Vienna|Zanzibar|Patagonia|the Alps|the Scottish islands|the Sahara"
).split("|")

PEOPLE = (
    "a teacher|a nurse|a student|a retired engineer|a farmer|a baker|a librarian|a software developer|a young parent|"
    "a ten-year-old|a manager|a tourist|a musician|an athlete|a shop owner|a beginner"
).split("|")

CHAT = (
    "What is {topic}?|Tell me about {topic}.|Explain {topic} to {person}.|Why does {topic} matter?|"
    "What should {person} know about {topic}?|How did {topic} change over the last hundred years?|"
    "What are common mistakes people make with {topic}?|Can you give me some advice about {topic}?|"
    "What are the advantages and disadvantages of {topic}?|How would {person} get started with {topic}?|"
    "Write a short story about {topic} and {person}.|Write a poem about {topic}.|"
    "Write a blog post about {topic} with an engaging opening.|Write an email in which {person} asks about {topic}.|"
    "Imagine you are {person}. Describe your day with {topic}.|Compare {topic} and {other}.|"
    "What do {topic} and {other} have in common?|Describe {place} to {person} who has never been there.|"
    "Plan a three-day trip to {place} for {person}.|Write a dialogue between {person} and {person2} about {topic}.|"
    "Draft an outline of an article on {topic} and {other}.|Give a short speech about {topic}.|"
    "What questions would {person} ask an expert on {topic}?|How can {topic} help {person}?|"
    "Act as {person} and give your opinion on {topic}.|Is it worth learning about {topic}? Argue for and against."
).split("|")

INSTRUCT = (
    "List {n} facts about {topic}.|Give {n} tips on {topic}.|Name {n} things that you need for {topic}.|"
    "Write a product description about {topic}.|Write a headline for an article about {topic}.|"
    "Summarize the main ideas of {topic} in two sentences.|Explain the term {topic} in simple words.|"
    "Suggest {n} titles for a book about {topic}.|Create a checklist for {topic}.|Create a quiz with {n} questions on {topic}.|"
    "Write a haiku about {topic}.|Write {n} sentences that use the words {topic} and {other}.|"
    "Describe the steps involved in {topic}.|Generate {n} ideas for a project about {topic}.|"
    "Write a thank-you note from {person} about {topic}.|Make a table that compares {topic} and {other}.|"
    "Classify these as indoors or outdoors: {topic}, {other}.|Which is older, {topic} or {other}? Explain.|"
    "Write a tweet about {topic}.|Rewrite this sentence politely: You know nothing about {topic}.|"
    "Turn this into a question: {topic} is important for {person}.|Give a definition and an example of {topic}.|"
    "Identify the main challenge of {topic} for {person} and propose a solution.|"
    "Edit this sentence so that it is correct: {person} have learn about {topic} yesterday.|"
    "Provide a recipe or method related to {topic}.|Write a conclusion for an essay about {topic}.|"
    "Explain in a paragraph how {topic} influences {other}.|What is the best way to learn {topic}?|"
    "Suggest a gift for {person} who likes {topic}."
).split("|")

NAMES = "Mia|Omar|Lena|Ravi|Chloe|Kenji|Sara|Tomas|Amara|Felix|Ingrid|Pablo|Yuki|Nadia|George|Elif".split("|")
THINGS = "apples|books|marbles|stickers|pencils|cookies|tickets|plants|coins|eggs|cups|photos|bricks|shirts".split("|")

MATH = (
    "{name} has {a} {things} and buys {b} more. Then {name} gives {c} to {name2}. How many {things} are left?|"
    "{name} packs {things} into boxes of {c}. How many boxes are needed for {ac} {things}?|"
    "A shop sells {things} for ${c} each. {name} buys {a} of them and pays with ${big}. How much change does {name} get?|"
    "{name} reads {a} pages a day for {c} days, and {name2} reads {b} pages a day for {d} days. Who reads more, and by how "
    "many pages?|"
    "{name} is {a} years old. {name2} is {c} years older. In {d} years, what will be the sum of their ages?|"
    "A train covers {big} miles in {c} hours. At the same speed, how far does it go in {d} hours?|"
    "{name} earns ${a} an hour and works {c} hours a day, {d} days a week. How much does {name} earn in a week?|"
    "There are {ac} {things} in a room. {name} takes a fraction 1/{c} of them. How many remain?|"
    "{name} saves ${b} every week. After {d} weeks, {name} spends ${c}. How much money is left?|"
    "The ratio of {things} that {name} and {name2} own is {c}:{d}. Together they own {total}. How many does {name} own?|"
    "A garden is {a} metres long and {c} metres wide. {name} walks around it {d} times. How far does {name} walk?|"
    "A recipe needs {c} cups of flour for {d} people. How many cups are needed for {d3} people?|"
    "{name} runs {c} miles on Monday, twice as far on Tuesday, and {d} miles less than Tuesday on Wednesday. What is the "
    "total?|Of {big} {things}, {percent}% are broken. {name} sells the others for ${c} each. What is the income?"
).split("|")

FUNCTIONS = """
sum_of_squares(numbers: list) -> int|Return the sum of the squares of the numbers.
count_words(text: str) -> dict|Return how often each word occurs in the text, in lower case.
longest_word(text: str) -> str|Return the longest word of the text; the first one when there are several.
is_leap_year(year: int) -> bool|Return True if the year is a leap year.
celsius_to_fahrenheit(degrees: float) -> float|Convert degrees Celsius to Fahrenheit.
merge_sorted(a: list, b: list) -> list|Merge two sorted lists into one sorted list.
rotate(items: list, k: int) -> list|Rotate the list to the right by k places.
flatten(items: list) -> list|Flatten a list of lists into one list.
transpose(rows: list) -> list|Transpose a matrix given as a list of rows.
binary_search(items: list, target: int) -> int|Return the index of target in a sorted list, or -1.
gcd(a: int, b: int) -> int|Return the greatest common divisor of two integers.
fibonacci(n: int) -> list|Return the first n Fibonacci numbers.
is_anagram(a: str, b: str) -> bool|Return True if the two strings are anagrams of each other.
caesar(text: str, shift: int) -> str|Encrypt the text with a Caesar cipher.
remove_duplicates(items: list) -> list|Remove duplicates from the list and keep the order.
second_largest(numbers: list) -> int|Return the second largest number of the list.
count_vowels(text: str) -> int|Count the vowels in the text.
running_total(numbers: list) -> list|Return the running totals of the numbers.
chunk(items: list, size: int) -> list|Split the list into chunks of the given size.
median(numbers: list) -> float|Return the median of the numbers.
title_case(text: str) -> str|Capitalise the first letter of every word.
parse_query(query: str) -> dict|Parse a URL query string into a dictionary.
validate_email(address: str) -> bool|Return True if the address looks like an email address.
read_lines(path: str) -> list|Read a file and return its lines without line breaks.
group_by_length(words: list) -> dict|Group the words by their length.
invert(mapping: dict) -> dict|Swap the keys and the values of a dictionary.
digits_sum(n: int) -> int|Return the sum of the decimal digits of n.
to_binary(n: int) -> str|Return n in binary as a string.
is_prime(n: int) -> bool|Return True if n is a prime number.
primes_below(n: int) -> list|Return all prime numbers below n.
factorial(n: int) -> int|Return n factorial.
power_set(items: list) -> list|Return all subsets of the items.
balanced(text: str) -> bool|Return True if the brackets in the text are balanced.
compress(text: str) -> str|Run-length encode the text.
common_prefix(words: list) -> str|Return the longest common prefix of the words.
intersection(a: list, b: list) -> list|Return the items that are in both lists.
swap_case(text: str) -> str|Swap upper and lower case of every letter.
moving_average(numbers: list, size: int) -> list|Return the moving averages of the numbers.
""".strip().split("\n")

CODE = (
    "Complete this Python function.\n\n{stub}|Finish the code below.\n\n{stub}|Write a Python function {name} that does "
    "this: {doc}|Write a Python function called {name}. {doc} Include an example.|Write a JavaScript function {name}. {doc}|"
    "Write unit tests for a Python function {name}. {doc}|Implement the following in Python and explain it.\n\n{stub}|"
    "Explain step by step how to write {name} in Python. {doc}|What does this function do, and how would you write it?\n\n"
    "{stub}"
).split("|")


def chat(random_: random.Random, templates: list[str]) -> str:
    person, person2 = random_.sample(PEOPLE, 2)
    topic, other = random_.sample(TOPICS, 2)
    text = random_.choice(templates).format(
        topic=topic,
        other=other,
        person=person,
        person2=person2,
        place=random_.choice(PLACES),
        n=random_.choice(["3", "4", "5", "three", "five", "six", "10"]),
    )
    return text[0].upper() + text[1:]


def math(random_: random.Random) -> str:
    name, name2 = random_.sample(NAMES, 2)
    c, d = random_.randint(2, 9), random_.randint(2, 9)
    return random_.choice(MATH).format(
        name=name,
        name2=name2,
        things=random_.choice(THINGS),
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
    signature, doc = random_.choice(FUNCTIONS).split("|")
    stub = f'def {signature}:\n    """{doc}"""\n'
    return random_.choice(CODE).format(stub=stub, name=signature.split("(")[0], doc=doc)


def prompts(count: int, seed: int = 0) -> list[str]:
    """`count` different prompts: two fifths conversation and as many instructions, the rest problems and code."""
    random_ = random.Random(seed)
    kinds = [lambda r: chat(r, CHAT)] * 4 + [lambda r: chat(r, INSTRUCT)] * 4 + [math, math, code, code]
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
