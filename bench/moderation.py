"""What a check of words costs: `python -m bench.moderation` prints µs for each token of an output and each character.

The texts are random words, and none of them is in the list. An output comes in parts of four characters.
"""

import random
import string
import time

from sojourn.engine.server.gateway.moderation.expressions import Expression
from sojourn.engine.server.gateway.moderation.list_filter import ListFilter, ListRule
from sojourn.engine.server.gateway.moderation.scanner import matches
from sojourn.engine.server.gateway.moderation.words import WordList

NUM_WORDS = 10_000
TOKEN_CHARACTERS = 4
REPEATS = 5


def words(rng: random.Random, number: int) -> list[str]:
    return ["".join(rng.choices(string.ascii_lowercase, k=rng.randint(3, 10))) for _ in range(number)]


def best_seconds(work) -> float:
    """The fastest of some runs: what else the machine does only makes it slower."""
    seconds = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def main() -> None:
    rng = random.Random(0)
    listed = words(rng, NUM_WORDS)
    known = set(listed)
    text = " ".join(word for word in words(rng, 30_000) if word not in known)
    foreign = text.replace("e", "é")
    begin = time.perf_counter()
    lists = {
        f"{NUM_WORDS:,} words": WordList({"bad": listed}),
        "one expression": Expression(r"\b(?:\d{4}[ -]?){3}\d{4}\b", "number", 19),
    }
    print(f"lists are built in {(time.perf_counter() - begin) * 1e3:.0f} ms")
    for name, one in lists.items():
        for kind, prompt in (("ASCII", text), ("accents", foreign)):
            per_character = best_seconds(lambda one=one, prompt=prompt: sum(1 for _ in matches(one, prompt)))
            parts = [prompt[at : at + TOKEN_CHARACTERS] for at in range(0, len(prompt), TOKEN_CHARACTERS)]

            def stream(one=one, parts=parts) -> None:
                output = ListFilter([ListRule(one, "block")])
                for part in parts:
                    output.push(part)

            per_token = best_seconds(stream) / len(parts)
            micros = 1e6 * per_character / len(prompt)
            print(f"{name}, {kind}: {micros:.4f} µs a prompt character, {1e6 * per_token:.2f} µs a token")


if __name__ == "__main__":
    main()
