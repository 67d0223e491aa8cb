"""A measured ladder as a page in Markdown."""

from collections.abc import Sequence

from sojourn.metrics.compare.ladder import WAITS, Ladder, Step, sentence
from sojourn.metrics.ledger import ACCOUNTS, UNACCOUNTED

SHOWN_SHARE = 0.01  # of the time of a token, on some rung: smaller accounts are one column


def page(ladder: Ladder, found: Sequence[Step]) -> str:
    """The page; `sojourn dev ladder --docs FILE` writes it."""
    scenario, hardware = ladder.plan["scenario"], ladder.hardware
    engine = scenario["engine"] | ladder.plan["overrides"]
    cpu = f"{hardware['cores']} cores ({hardware['cpu']})"
    gpus = [str(gpu.get("name", gpu) if isinstance(gpu, dict) else gpu) for gpu in hardware.get("gpus") or []]
    last = found[-1] if found else None
    repeats = max((step.repeats for step in found), default=0)
    order = "Each rung was run once" if repeats == 1 else f"All rungs were run once, then again: {repeats} repeats"
    parts = [
        "# The ladder",
        "This page answers: what does each technique of a serving engine give, and which account of the ledger pays "
        "it? `sojourn dev ladder` measured it and wrote this page.",
        f"Command: `{ladder.command}`. Machine: {gpus[0] if ladder.device == 'cuda' and gpus else cpu}, torch "
        f"{ladder.versions.get('torch', 'unknown')}, {ladder.date[:10]}. Model: {engine.get('model')}. "
        f"Scenario `{scenario['name']}`: {scenario['description'][0].lower()}{scenario['description'][1:]}.",
        "Each rung changes one setting of the rung below, and each run has a server of its own. "
        f"{order}. A figure is the median, a spread the lowest and the highest repeat.",
        "## What each rung gave",
        _table(found),
        _whole(found) if last is not None else "",
        "The multiplier is of tokens per second, against the rung below in the same repeat. *Article* is what the "
        "article on serving techniques states for a large model on a GPU.",
        "## Why it differs here",
        "\n".join(f"- **{step.rung.name}**: {sentence(step)}" for step in found[1:]),
        "## Which account shrank",
        "Milliseconds by output token, from the intended send to the last byte, mean of the served requests. In a "
        "closed loop the whole is the open requests divided by the tokens per second.",
        _accounts(found),
        f"The columns {' and '.join(WAITS)} are waits for a place. They shrink with everything before them.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _table(found: Sequence[Step]) -> str:
    lines = [
        "| rung | setting | tokens/s | × below | spread | article | good req/s | kept | TTFT p50, ms | TPOT p50, ms |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for step in found:
        setting = ", ".join(f"`{name}={value}`" for name, value in step.rung.on.items())
        spread = "–" if step.lowest is None else f"{step.lowest:.2f} – {step.highest:.2f}"
        cells = (
            step.rung.name, setting, _number(step.tokens_per_s), _number(step.multiplier), spread,
            _number(step.rung.published), _number(step.goodput_rps),
            "–" if step.attainment is None else f"{step.attainment:.0%}", _number(step.ttft_p50_ms),
            _number(step.tpot_p50_ms),
        )  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _whole(found: Sequence[Step]) -> str:
    first, last = found[0], found[-1]
    if not first.tokens_per_s or not last.tokens_per_s or len(found) < 2:
        return ""
    published = 1.0
    for step in found:
        published *= step.rung.published or 1.0
    return (
        f"All rungs together: {last.tokens_per_s / first.tokens_per_s:.1f} times the tokens per second of "
        f"{first.rung.name}. The article's multipliers give {published:.1f}."
    )


def _accounts(found: Sequence[Step]) -> str:
    shown = [
        name
        for name in (*(info.name for info in ACCOUNTS), UNACCOUNTED)
        if any(step.accounts_ms.get(name, 0.0) >= SHOWN_SHARE * sum(step.accounts_ms.values()) for step in found)
    ]
    lines = [f"| rung | all | {' | '.join(shown)} | others |", f"|---|{'---:|' * (len(shown) + 2)}"]
    for step in found:
        whole = sum(step.accounts_ms.values())
        values = [step.accounts_ms.get(name, 0.0) for name in shown]
        cells = [f"{value:.2f}" for value in (whole, *values, whole - sum(values))]
        lines.append(f"| {step.rung.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
