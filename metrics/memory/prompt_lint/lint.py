"""The lint of prompts: what they share, where they part, and what their text costs in tokens. Pure.

It takes prompts in the order in which they are sent and assumes that each is in the cache before the next one comes.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from sojourn.metrics.memory.known_prompts import TOKEN_BYTES, KnownPrompts, packed_tokens, salted, shared_tokens
from sojourn.metrics.memory.prompt_lint.finding import MEDIUM, Finding, severity_of
from sojourn.metrics.memory.prompt_lint.text_kinds import kind_of, pieces
from sojourn.metrics.memory.prompt_repeats import PromptRepeats

CAUGHT = 0.9  # of what blocks of one token would catch
# A tokenizer that knows a text has three or more bytes of it in a token; one that does not, has one or two.
USUAL_BYTES, FEW_BYTES = 3.0, 2.0
Count = Callable[[str], int]  # tokens of a text


@dataclass(frozen=True, slots=True)
class LintedPrompt:
    klass: str
    text: str
    token_ids: Sequence[int]


class TextCost(msgspec.Struct, frozen=True):
    """What one kind of text costs."""

    kind: str
    characters: int
    tokens: int
    bytes: int | None  # of UTF-8; None where only the characters are known

    @property
    def characters_per_token(self) -> float:
        return self.characters / self.tokens


class ClassReport(msgspec.Struct, frozen=True, kw_only=True):
    """The prompts of one class, or of all. Shares are of their tokens."""

    klass: str
    requests: int
    prompt_tokens: int
    common_prefix_tokens: int | None  # that all of them begin with; None where it cannot be known
    shared_share: float | None  # as a prefix of an earlier prompt, to the token
    infinite_share: (
        float | None
    )  # as a prefix of an earlier prompt, in whole blocks: what a cache that never evicts would hit
    movable_share: float | None  # in common behind something that differs
    caught: dict[int, float] = {}  # block size → share that whole blocks would catch
    texts: list[TextCost] = []

    @property
    def characters_per_token(self) -> float | None:
        tokens = sum(text.tokens for text in self.texts)
        return sum(text.characters for text in self.texts) / tokens if tokens else None


class LintReport(msgspec.Struct, frozen=True, kw_only=True):
    target: str
    block_size: int
    classes: list[ClassReport]
    findings: list[Finding]
    notes: list[str] = []  # what could not be known, and what was assumed


def lint_prompts(
    prompts: Sequence[LintedPrompt], block_size: int, count: Count | None = None
) -> tuple[list[ClassReport], list[Finding]]:
    """Per class, in order of first appearance. `count` measures pieces of text; without it nothing is said of texts."""
    known, repeats = KnownPrompts(), PromptRepeats()
    shared: dict[str, list[int]] = defaultdict(list)
    movable: Counter[str] = Counter()
    lengths: dict[str, list[int]] = defaultdict(list)
    common: dict[str, bytes] = {}
    for number, prompt in enumerate(prompts):
        packed = packed_tokens(prompt.token_ids)
        entry = salted(b"", packed)
        longest, _ = known.longest_shared(entry)
        known.add(entry, str(number))
        movable[prompt.klass] += repeats.add(np.array(prompt.token_ids, np.int64), shared_tokens=longest)[1]
        shared[prompt.klass].append(min(longest, max(0, len(prompt.token_ids) - 1)))
        lengths[prompt.klass].append(len(prompt.token_ids))
        before = common.get(prompt.klass, packed)
        common[prompt.klass] = before[: TOKEN_BYTES * shared_tokens(before, packed)]
    reports, findings = [], []
    for klass, sizes in lengths.items():
        total = max(1, sum(sizes))
        found = np.array(shared[klass])
        texts = _texts([prompt.text for prompt in prompts if prompt.klass == klass], count) if count else []
        report = ClassReport(
            klass=klass, requests=len(sizes), prompt_tokens=sum(sizes),
            common_prefix_tokens=len(common[klass]) // TOKEN_BYTES if len(sizes) > 1 else None,
            shared_share=float(found.sum() / total), infinite_share=_caught(found, block_size) / total,
            movable_share=movable[klass] / total,
            caught={size: _caught(found, size) / total for size in sorted({*_SIZES, block_size})}, texts=texts,
        )  # fmt: skip
        reports.append(report)
        findings += [*share_findings(report, block_size), *text_findings(report)]
        if count:
            findings += _json_findings(report, [prompt.text for prompt in prompts if prompt.klass == klass], count)
    return reports, findings


_SIZES = (1, 2, 4, 8, 16, 32, 64)


def share_findings(report: ClassReport, block_size: int, ns_per_token: float | None = None) -> list[Finding]:
    """A wrong order of the prompt, and blocks that are too large. `ns_per_token`: of prefill, where it is known."""

    def cost(share: float) -> dict[str, float | int | None]:
        tokens = round(share * report.prompt_tokens)
        return {"tokens": tokens, "share": share, "prefill_ms": tokens * ns_per_token / 1e6 if ns_per_token else None}

    found, subject = [], f"class {report.klass or '(none)'}"
    moved = report.movable_share or 0.0
    if severity := severity_of(moved):
        found.append(Finding(
            severity=severity, key="prompt_order", subject=subject, **cost(moved),
            says=f"{moved:.0%} of the prompt tokens are in common with earlier prompts, behind something that differs: "
            "no prefix cache finds them",
            fix="begin the prompt with what all requests share, and put dates, ids and the question behind it",
        ))  # fmt: skip
    best = max(report.caught.values(), default=0.0)
    fits = max((size for size, share in report.caught.items() if share >= CAUGHT * best), default=block_size)
    lost = report.caught.get(fits, 0.0) - report.caught.get(block_size, 0.0)
    if fits < block_size and lost >= MEDIUM and (severity := severity_of(lost)):  # small blocks cost time, too
        found.append(Finding(
            severity=severity, key="sub_block", subject=subject, **cost(lost),
            says=f"{lost:.0%} of the prompt tokens are a shared prefix that fills no block of {block_size} tokens",
            fix=f"block_size={fits} catches them, or a shared part that is longer by some tokens",
        ))  # fmt: skip
    return found


def text_findings(report: ClassReport) -> list[Finding]:
    """Kinds of text that the tokenizer cuts into pieces of a byte or two."""
    found = []
    for text in report.texts:
        if text.bytes is None:
            continue
        spared = text.tokens - text.bytes / USUAL_BYTES
        share = spared / max(1, report.prompt_tokens)
        if text.bytes / text.tokens < FEW_BYTES and (severity := severity_of(share)):
            found.append(Finding(
                severity=severity, key="dense_text", subject=f"class {report.klass or '(none)'}", tokens=round(spared),
                share=share,
                says=f"{text.kind} has {text.characters_per_token:.1f} characters a token: this tokenizer was not made "
                "for it",
                fix="a model whose tokenizer knows this text; of long numbers and ids, send fewer or shorter ones",
            ))  # fmt: skip
    return found


def _caught(shared: np.ndarray, size: int) -> float:
    return float((shared // size * size).sum())


def _texts(texts: Sequence[str], count: Count) -> list[TextCost]:
    """By kind, most tokens first. A text that several prompts have is measured once and counted for each."""
    kinds: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for piece, times in Counter(piece for text in texts for piece in pieces(text)).items():
        sums = kinds[kind_of(piece)]
        for place, number in enumerate((len(piece), count(piece), len(piece.encode()))):
            sums[place] += times * number
    costs = [TextCost(kind, characters, tokens, size) for kind, (characters, tokens, size) in kinds.items() if tokens]
    return sorted(costs, key=lambda cost: -cost.tokens)


def _json_findings(report: ClassReport, texts: Sequence[str], count: Count) -> list[Finding]:
    """JSON with blanks and line ends that a model does not need."""
    spared = 0
    for paragraph, times in Counter(part for text in texts for part in text.split("\n\n")).items():
        if paragraph.strip()[:1] in ("{", "["):
            try:
                short = json.dumps(json.loads(paragraph), ensure_ascii=False, separators=(",", ":"))
            except ValueError:
                continue
            spared += times * max(0, count(paragraph) - count(short))
    share = spared / max(1, report.prompt_tokens)
    severity = severity_of(share)
    if severity is None:
        return []
    return [Finding(
        severity=severity, key="json_blanks", subject=f"class {report.klass or '(none)'}", tokens=spared, share=share,
        says=f"{share:.0%} of the prompt tokens are blanks and line ends in JSON",
        fix='write it without them: json.dumps(value, separators=(",", ":"))',
    )]  # fmt: skip
