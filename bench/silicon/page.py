"""docs/results/silicon.md: what the judged estimates are worth, as a page."""

from collections import Counter
from collections.abc import Iterable, Sequence

from bench.silicon import figures
from bench.silicon.figures import BOUND, Errors, Pair, errors, tpot
from bench.silicon.judged import Estimated
from bench.silicon.peers import Peer, Steps
from bench.silicon.rows import Measured
from sojourn.replay.device.known_errors import keys_of

DEVICES = ("h100_sxm", "h200_sxm", "b200_sxm", "b300_sxm", "gb200")
Refusals = Sequence[tuple[str, str, str]]  # model, device, reason


def page(
    measured: Sequence[Measured], unusable: Refusals, kernels: Sequence[Estimated], roofline: Sequence[Estimated],
    without: Refusals, host_ns: dict[str, float], peer: Peer | None, steps: Sequence[Steps], head: str,
) -> str:  # fmt: skip
    parts = [
        head, _summary(kernels, roofline), _goals(kernels, host_ns), _cells(kernels, roofline),
        _ratios(kernels, roofline),
        _answers(kernels, roofline), _refused(measured, unusable, without), _peers(kernels, roofline, peer, steps),
        _data(kernels),
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return "\n".join(lines + [f"| {' | '.join(map(str, row))} |" for row in rows])


def _of(rows: Sequence[Estimated], **wanted: object) -> list[Estimated]:
    return [
        each for each in rows
        if all(getattr(each.measured.deployment, name) == value for name, value in wanted.items())
    ]  # fmt: skip


def _same(roofline: Sequence[Estimated], rows: Sequence[Estimated]) -> list[Estimated]:
    places = {each.measured.place for each in rows}
    return [each for each in roofline if each.measured.place in places]


def _share(value: float) -> str:
    return "–" if value != value else f"{100 * value:.0f} %"


def _summary(kernels: Sequence[Estimated], roofline: Sequence[Estimated]) -> str:
    rows = []
    for name, value in [("", ""), *(("device", each) for each in DEVICES),
                        *(("backend", each) for each in ("vllm", "sglang", "trtllm"))]:  # fmt: skip
        found = _of(kernels, **{name: value}) if name else list(kernels)
        answers = figures.concurrency_answers(found)
        rows.append((
            value or "all", len(found), tpot(found).text(), figures.e2e(found).text(), figures.ttft(found).text(),
            tpot(_same(roofline, found)).text(), _share(answers.useful),
        ))  # fmt: skip
    return (
        "## In all\n\nErrors are *median / p90 / bias* of estimated / measured − 1, in per cent; the bias is the "
        "median with its sign. The roofline column is TPOT at the makers' peak rates, of a step with all decodes and "
        'its share of prompts. The last column is the share of answers to "how many at a time within this TPOT?" '
        f"that are within {BOUND:g} times.\n\n"
        + _table(("", "n", "TPOT", "E2E", "TTFT", "roofline, TPOT", "useful answers"), rows)
        + "\n\nTTFT stands here for completeness: the file does not say how its clients sent, nor whether it is a "
        "mean or "
        "a median. It is judged where the arrival process is declared, by `sojourn verify`."
    )


def _goals(kernels: Sequence[Estimated], host_ns: dict[str, float]) -> str:
    h100 = _of(kernels, device="h100_sxm")
    pairs = figures.pairs(kernels)
    h200 = _pair_errors(pairs, "device", "h100_sxm", "h200_sxm")
    doubled = errors(each.ratio - 1 for each in pairs if each.kind == "tensor_parallel")
    point, alike = figures.one_point(kernels), figures.one_point(kernels, same_lengths=True)
    answers = figures.concurrency_answers(h100)
    inside, count = figures.coverage(kernels, keys_of)
    of_ratios, num_ratios = figures.ratio_coverage(pairs)
    held = tpot(h100), figures.e2e(h100)
    rows = [
        ("TPOT ratio H100 to H200", h200.n, h200.text(), "median ≤ 3, p90 ≤ 10",
         _met(h200.median <= 0.03, h200.p90 <= 0.1)),
        ("TPOT ratio, twice the GPUs", doubled.n, doubled.text(), "median ≤ 6", _met(doubled.median <= 0.06)),
        ("TPOT, H100", held[0].n, held[0].text(), "median ≤ 9, p90 ≤ 25, bias within ±3", _within(held[0])),
        ("E2E, H100", held[1].n, held[1].text(), "median ≤ 9, p90 ≤ 25, bias within ±3", _within(held[1])),
        *((f"TPOT, one point measured: {title}", each.n, each.text(), "median ≤ 6, p90 ≤ 20",
           _met(each.median <= 0.06, each.p90 <= 0.2)) for title, each in (
            ("other concurrencies, H100", figures.one_point(h100, same_lengths=True)),
            ("other concurrencies", alike), ("any other load of the deployment", point))),
        ("concurrency within a TPOT, H100", answers.n,
         f"{_share(answers.useful)} within {BOUND:g} times, {_share(answers.promises)} promise more than that too much",
         "≥ 75 %, ≤ 10 %", _met(answers.useful >= 0.75, answers.promises <= 0.1)),
        ("80 % intervals, other half", count, f"{_share(inside)} inside", "75 to 85 %", _met(0.75 <= inside <= 0.85)),
        ("80 % intervals of ratios, other half", num_ratios, f"{_share(of_ratios)} inside", "75 to 85 %",
         _met(0.75 <= of_ratios <= 0.85)),
    ]  # fmt: skip
    times = ", ".join(f"{name} {ns / 1e6:.2f} ms" for name, ns in sorted(host_ns.items()))
    return (
        "## Against the goals\n\n"
        + _table(("question", "n", "found", "goal", "met"), rows)
        + f"\n\nHost time of a step, fitted on one half of the deployments on H100: {times}. "
        + _halves(h100)
        + " Deployments, not rows, are divided, so that none is in both halves."
    )


def _halves(h100: Sequence[Estimated]) -> str:
    said = [tpot(each for each in h100 if figures.half_of(each.measured.deployment) == half) for half in (0, 1)]
    return f"TPOT on H100 of the half that it was fitted on: {said[0].text()}; of the other: {said[1].text()}."


def _met(*each: bool) -> str:
    return "yes" if all(each) else "in part" if any(each) else "no"


def _within(said: Errors) -> str:
    return _met(said.median <= 0.09, said.p90 <= 0.25, abs(said.bias) <= 0.03)


def _cells(kernels: Sequence[Estimated], roofline: Sequence[Estimated]) -> str:
    rows = []
    for key, found in sorted(figures.grouped(kernels, figures.cell_of).items()):
        said, answers = tpot(found), figures.concurrency_answers(found)
        rows.append((
            *key, said.n, said.text(), figures.e2e(found).text(), tpot(_same(roofline, found)).text(),
            _share(answers.useful),
        ))  # fmt: skip
    return (
        "## By cell\n\nA cell with a p90 above 40 % is a doubt (`!`) in the answers of `replay`, `plan` and `size`; "
        "its "
        "interval is as wide as the cell says.\n\n"
        + _table(
            ("model", "device", "backend", "weights", "n", "TPOT", "E2E", "roofline, TPOT", "useful answers"), rows
        )
    )


def _pair_errors(pairs: Sequence[Pair], kind: str, first: str, second: str) -> Errors:
    return errors(
        each.ratio - 1 for each in pairs if (each.kind, each.first, each.second) == (kind, first, second)
    )  # fmt: skip


def _ratios(kernels: Sequence[Estimated], roofline: Sequence[Estimated]) -> str:
    pairs, peaks = figures.pairs(kernels), figures.pairs(_same(roofline, kernels))
    kinds = sorted({(each.kind, each.first, each.second) for each in pairs})
    rows = [
        (kind.replace("_", " "), f"{first} → {second}", said.n, said.text(), _pair_errors(peaks, *key).text())
        for key in kinds
        for kind, first, second in [key]
        if (said := _pair_errors(pairs, *key)).n >= figures.FEWEST
    ]
    return (
        "## Ratios\n\nTwo deployments that differ in one thing, at the same load: the estimated ratio of their "
        "TPOTs over "
        "the measured one. `sojourn replay RUN --set device=…` and `plan --device` rest on these.\n\n"
        + _table(("what differs", "", "pairs", "kernels", "roofline"), rows)
    )


def _answers(kernels: Sequence[Estimated], roofline: Sequence[Estimated]) -> str:
    rows = []
    for device in DEVICES:
        found = _of(kernels, device=device)
        one, peak = figures.concurrency_answers(found), figures.concurrency_answers(_same(roofline, found))
        point = figures.one_point(found)
        rows.append((
            device, one.n, _share(one.useful), _share(one.promises), _share(peak.useful), _share(peak.promises),
            point.n, point.text(),
        ))  # fmt: skip
    return (
        "## Answers to objectives, and one measured point\n\nA bound is 10 to 100 ms of TPOT, and the "
        f"answer is how many requests at a time keep it. *Too much*: more than {BOUND:g} times what is true. One "
        "measured point: the deployment's middle load corrects all its others.\n\n"
        + _table(("device", "answers", "useful", "too much", "roofline useful", "too much", "other loads",
                  "TPOT with one point"), rows)
    )  # fmt: skip


def _refused(measured: Sequence[Measured], unusable: Refusals, without: Refusals) -> str:
    total = len(measured) + len(unusable)
    reasons = Counter(reason for _, _, reason in unusable)
    said = Counter((model, device, reason) for model, device, reason in without)
    rows = [("–", "–", reason, count) for reason, count in reasons.most_common()]
    rows += [(*key, count) for key, count in said.most_common()]
    return (
        f"## Refused\n\nOf {total:,} rows {len(unusable):,} are not of one server that can be described, and "
        f"{len(without):,} are outside of the tables.\n\n" + _table(("model", "device", "why", "rows"), rows)
    )


def _peers(
    kernels: Sequence[Estimated], roofline: Sequence[Estimated], peer: Peer | None, steps: Sequence[Steps]
) -> str:  # fmt: skip
    lines = ["## Beside others"]
    if peer is None:
        lines.append("servcalc was not installed for this page (`--servcalc PYTHON`).")
    else:
        ours = [each for each in kernels if each.measured.place in peer.places]
        lines.append(
            f"servcalc 0.1.0, a roofline with bands for one GPU, answers {peer.errors.n:,} rows and refuses "
            f"{peer.refused:,} that have one GPU: TPOT {peer.errors.text()}. On the same rows measured kernels say "
            f"{tpot(ours).text()} ({len(ours):,} rows), the roofline {tpot(_same(roofline, ours)).text()}."
        )
    if steps:
        rows = [(f"{each.degree} × a100_sxm", each.steps, each.plain.text(), f"{each.factor:.2f}",
                 each.with_factor.text()) for each in steps]  # fmt: skip
        lines.append(
            "LatencyPrism's recording of a 70B model in vLLM 0.10 on A100s, step by step. It does not state its "
            "devices. "
            "One factor, taken at a batch of 32, stands for what differs between versions and hosts:\n\n"
            + _table(("as", "decode steps", "as estimated", "factor", "with the factor"), rows)
        )
    return "\n\n".join(lines)


def _data(kernels: Sequence[Estimated]) -> str:
    count, spread = figures.repeated(kernels)
    return (
        "## The data\n\nThe file is `silicon_sample.csv` of the package; its rows come from InferenceX and from "
        "NVIDIA. "
        "Its makers tuned with it: `vllm_backend.py` says that its closed formulas of TTFT and TPOT were calibrated "
        "on all "
        "vLLM rows, and their own tests compare each change with this file. Times of kernels are measured apart, "
        "and only these are used here, under Sojourn's scheduler; the host time above is all that is fitted. "
        f"{count:,} points were measured more than once: the largest over the smallest is {spread:.2f} at the 90th "
        "percentile, so no estimate can do much better than that. The servers of the rows are older than the tables."
    )
