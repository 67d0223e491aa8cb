"""How sure a verdict is, in a word and a number, and what its replay says in a sentence."""

from sojourn.diagnosis.verdict import Diagnosis, Finding, explain_finding
from sojourn.ui.markup.fragments import wrap
from sojourn.ui.text import percent, prose, safe

# Lower bounds of calibrated confidence: of verdicts said with 0.8, eight in ten are right.
WORDS = ((0.85, "very likely"), (0.65, "likely"), (0.4, "open"), (0.0, "unlikely"))


def in_words(confidence: float) -> str:
    return next(word for bound, word in WORDS if confidence >= bound)


def sentence(diagnosis: Diagnosis, found: Finding) -> str:
    """Confidence, how much of the excess it explains, and what the fix and its rival would give."""
    parts = []
    if found.confidence > 0:
        word = safe(in_words(found.confidence).capitalize())
        role = "a cause" if found.role == "cause" else "an alternative: its fix adds nothing to that of the causes"
        parts.append(f"<b>{word}</b> ({percent(found.confidence)} confidence) as {role}.")
    if words := explain_finding(found):
        parts.append(f"It explains {prose(words)}.")
    parts += [prose(_predicted(diagnosis, found))]
    html = f"<p>{' '.join(filter(None, parts))}</p>"
    if found.unsafe:
        html += f'<div class="sj-warning">{prose(found.unsafe)}</div>'
    for doubt in (found.prediction.doubts if found.prediction is not None else [])[:2]:
        html += f'<div class="sj-warning">{prose(doubt)}</div>'
    return wrap(html)


def _predicted(diagnosis: Diagnosis, found: Finding) -> str:
    if found.prediction is None:
        why = diagnosis.replay_refused or "no replay can show this fix"
        return f"The gain is an estimate: {why}." if found.gain_is_estimate else ""
    if not found.fix.regains:
        return f"Replayed with the change, {found.fix.gain}."
    fix, now = found.prediction.attainment, diagnosis.goodput[0].attainment
    bounds = f"{percent(fix.low)} to {percent(fix.high)} in eight of ten cases"
    if found.prediction.is_open:
        said = f"How many requests would meet their objectives with the fix cannot be predicted ({bounds}); now "
        said += f"{percent(now)} do."
    else:
        said = f"Replayed with the fix, {percent(fix.median)} of the requests meet their objectives ({bounds}); now "
        said += f"{percent(now)} do."
    if found.rival_prediction is not None:
        rival = found.rival_prediction
        said += " With the fix of the rival it "
        said += "cannot be predicted." if rival.is_open else f"would be {percent(rival.attainment.median)}."
    return said
