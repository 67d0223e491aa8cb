"""What stands beside the curve of throughput against time per output token: figures, sentences, what is not known."""

from collections.abc import Sequence

from sojourn.loadgen.search.curve import REPLAYED, SIMULATED, Curve, Recommended
from sojourn.metrics.request.objectives import OBJECTIVE_NAMES
from sojourn.metrics.results.tradeoff import crossing_sentence
from sojourn.ui.drawings import Drawing
from sojourn.ui.figures.tradeoff import throughput_against_tpot
from sojourn.ui.markup import fragments
from sojourn.ui.markup.document import document, figure
from sojourn.ui.text import number, percent, prose, safe

DEFINITION = (
    "Goodput is the largest rate at which 90% of the sent requests meet every objective (DistServe). It is "
    "interpolated between the measured rates; the bracket holds it with 95% confidence."
)
TITLE = "Throughput against time per output token"
USER_TITLE = "Throughput per device against tokens per second per user"
CAPTION = (
    "`sweep.json` points. A point is a rate, or a number of sessions; its bars are the range of its repeats. Filled: "
    "90% of the requests met every objective; open: fewer. Green: within the SLO of TPOT (goodput); red: beyond it "
    "(badput). Diamond: goodput. Cross: where the curve meets the SLO of TPOT. Star: what `plan` recommends and "
    "predicts."
)
PREDICTED_CAPTION = (
    "A point is a simulated or replayed load that the server keeps up with; its bar is the 80% interval of its TPOT. "
    "Filled: the objectives hold for {share} of the requests; open: for fewer. Green: within the SLO of TPOT; red: "
    "beyond it. Diamond: the largest load within the objectives. Cross: where the curve meets the SLO of TPOT alone."
)
NO_SLO = (
    "There is no SLO line: the sweep has no TPOT objective for all classes. Give one: the field SLO in the app, or "
    "`sojourn report SWEEP --slo tpot:50`."
)
NO_PRICE = (
    "Tokens per dollar take a price of the machine: `measure.usd_per_hour` in the scenario, the field Price in the "
    "app, or `sojourn report SWEEP --dollars-per-hour 2.5`."
)
NO_POWER = (
    "Tokens per joule take a power sensor on the machine of our engine: an NVIDIA GPU, or the CPU’s energy counters "
    "(RAPL) readable by its user."
)


def drawing(curves: Sequence[Curve], *, per_user: bool) -> Drawing:
    """Curves of one kind: of sweeps and published files, or predicted ones."""
    is_predicted = bool(curves) and curves[0].source in (SIMULATED, REPLAYED)
    said = PREDICTED_CAPTION.format(share=percent(curves[0].required_share)) if is_predicted else CAPTION
    return Drawing(USER_TITLE if per_user else TITLE, throughput_against_tpot(curves, per_user=per_user), said)


def page(title: str, curves: Sequence[Curve]) -> str:
    """Predicted curves as one HTML file, with what is not drawn."""
    both = "".join(figure(drawing(curves, per_user=per_user), "h2") for per_user in (True, False))
    left_out = [f"<b>{safe(curve.label)}</b>. Not drawn: {safe('; '.join(curve.left_out))}."
                for curve in curves if curve.left_out]  # fmt: skip
    return document(title, both + fragments.wrap("".join(f'<p class="sj-small">{each}</p>' for each in left_out)))


def table(curves: Sequence[Curve]) -> str:
    """A row for each configuration: the goodput, what it gives per device, dollar and joule."""
    head = ["configuration", "goodput (req/s)", "95% bracket", "output tok/s", "per device", "per user"]
    head += ["TPOT SLO alone: tok/s", "million tok per $", "tok per J"]
    rows = []
    for curve in curves:
        found = curve.goodput
        tokens = found.tokens_per_s
        per_device = tokens / curve.devices if tokens is not None and curve.devices else None
        per_user = 1000 / found.tpot_ms if found.tpot_ms else None
        at_least = "≥ " if found.at_edge and found.rate_rps is not None else ""
        low, high = ("?" if each is None else f"{each:g}" for each in (found.low_rps, found.high_rps))
        met, per_usd = curve.crossing, curve.tokens_per_usd
        is_open = met is not None and met.tokens_per_s is not None and not met.is_reached
        rows.append([
            curve.label, f"{at_least}{number(found.rate_rps)}", f"{low} to {high}", number(tokens),
            number(per_device), number(per_user),
            f"{'≥ ' if is_open else ''}{number(met.tokens_per_s if met is not None else None)}",
            number(per_usd / 1e6 if per_usd is not None else None), number(curve.tokens_per_joule),
        ])  # fmt: skip
    return fragments.table(head, rows, right=tuple(range(1, len(head))))


def sentences(curves: Sequence[Curve], unlike: Sequence[str]) -> str:
    """What the table rests on, and what is not known."""
    warning = f"The sweeps also differ in {', '.join(unlike)}: not only the settings move the curves."
    warnings = f'<div class="sj-warning">{safe(warning)}</div>' if unlike else ""
    found = [prose(DEFINITION), *map(_of_curve, curves), *_not_known(curves)]
    return fragments.wrap(warnings + "".join(f'<p class="sj-small">{each}</p>' for each in found))


def _of_curve(curve: Curve) -> str:
    said = [f"<b>{safe(curve.label)}</b>: {safe(curve.goodput.sentence)}."]
    if curve.crossing is not None and curve.points:
        said.append(safe(_capitalised(crossing_sentence(curve.crossing, curve.quantile))) + ".")
    if curve.goodput.missed and "tpot_ms" not in curve.goodput.missed:
        names = " and ".join(OBJECTIVE_NAMES[name] for name in curve.goodput.missed)
        said.append(f"Above the goodput the {safe(names)} fails first.")
    if curve.left_out:
        said.append(f"Not drawn: {safe('; '.join(curve.left_out))}.")
    return " ".join([*said, *(safe(_recommendation(each, curve.quantile)) for each in curve.recommended)])


def _not_known(curves: Sequence[Curve]) -> list[str]:
    """A sentence for each figure that is missing, with what would give it."""
    unknown = ", ".join(curve.label for curve in curves if curve.devices is None)
    said = {
        NO_SLO: any(curve.slo_ms is None for curve in curves),
        f"Devices are not reported by the server of {unknown}: give their number, as the field Devices in the app, or "
        "`sojourn report SWEEP --devices 1`.": bool(unknown),
        NO_PRICE: any(curve.usd_per_hour is None for curve in curves),
        NO_POWER: not all(curve.joules_per_token for curve in curves),
    }
    return [prose(sentence) for sentence, is_missing in said.items() if is_missing]


def _recommendation(found: Recommended, quantile: str) -> str:
    slo = "" if found.slo_tpot_ms is None else f" for a TPOT of {found.slo_tpot_ms:g} ms"
    between = f"80% interval {number(found.tpot_ms.low)} to {number(found.tpot_ms.high, 'ms')}"
    return (
        f"The plan of {found.run}{slo} recommends {found.label}. Its replays predict "
        f"{number(found.tokens_per_s)} output tokens/s at {number(found.rate_rps)} requests/s, with a TPOT "
        f"{quantile} of {number(found.tpot_ms.median, 'ms')} ({between}); nothing of it is measured."
        + (f" The replays are not trusted: {'; '.join(found.doubts)}." if found.doubts else "")
    )


def _capitalised(text: str) -> str:
    return text[0].upper() + text[1:]
