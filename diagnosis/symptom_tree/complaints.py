"""The six complaints in the words of users, the causes of each, and a search by words."""

import re
from dataclasses import dataclass
from difflib import SequenceMatcher

from sojourn.diagnosis.cause import Cause
from sojourn.diagnosis.causes import CAUSES
from sojourn.diagnosis.symptoms import BY_KEY
from sojourn.metrics.errors import InputError

CLOSE_ENOUGH = 0.6  # of a word or a phrase: below it, difflib finds what nobody meant


@dataclass(frozen=True, slots=True)
class Complaint:
    """One of the six symptoms as a user says it."""

    symptom: str  # key of symptoms.SYMPTOMS
    words: str
    aliases: tuple[str, ...]

    @property
    def title(self) -> str:
        return BY_KEY[self.symptom].title

    def causes(self, lifecycle: str) -> list[Cause]:
        """Those in one lifecycle, the most frequent first."""
        own = [each for each in CAUSES.values() if self.symptom in each.complaints and each.lifecycles[0] == lifecycle]
        return sorted(own, key=lambda each: each.complaints[self.symptom])


COMPLAINTS = (
    Complaint("high_ttft", "My first token is slow",
              ("ttft", "time to first token", "slow to start", "the answer begins late", "long wait before the answer",
               "slow first token", "queue")),
    Complaint("high_itl", "The text stutters",
              ("itl", "tpot", "inter-token latency", "time per output token", "tokens come slowly", "slow stream",
               "pauses in the text", "stutter", "slow answer")),
    Complaint("low_device_utilisation", "The GPU idles",
              ("low utilisation", "low utilization", "idle gpu", "device idles", "gpu not busy", "gpu usage is low",
               "cpu idles")),
    Complaint("vram_fills_quickly", "Memory fills quickly",
              ("vram", "kv cache full", "out of memory", "preemptions", "memory full", "oom", "kv blocks")),
    Complaint("product_latency_poor", "Benchmark good, product slow",
              ("good benchmark, poor product latency", "slower in production", "benchmark good product slow",
               "production is slow")),
    Complaint("devices_do_not_help", "More devices do not help",
              ("more gpus do not help", "no speedup", "does not scale", "scaling is poor", "more threads do not help")),
)  # fmt: skip
BY_SYMPTOM = {complaint.symptom: complaint for complaint in COMPLAINTS}


def find_complaint(text: str) -> Complaint:
    """The complaint of a symptom's key, title or words, spelled nearly right. Raises InputError with all."""
    wanted = _plain(text)
    scores = {each.symptom: max(_likeness(wanted, phrase) for phrase in _phrases(each)) for each in COMPLAINTS}
    best, second = sorted(scores.values(), reverse=True)[:2]
    if not wanted or best < CLOSE_ENOUGH or best == second:
        known = "; ".join(f"{each.symptom} (“{each.words}”)" for each in COMPLAINTS)
        raise InputError(f"{text!r} names none of the six symptoms; choose one of: {known}")
    return BY_SYMPTOM[max(scores, key=scores.__getitem__)]


def _phrases(complaint: Complaint) -> tuple[str, ...]:
    return tuple(map(_plain, (complaint.symptom, complaint.words, complaint.title, *complaint.aliases)))


def _plain(text: str) -> str:
    """Lower case words without what carries no meaning."""
    words = re.findall(r"[a-z0-9]+", text.lower())
    return " ".join(word for word in words if word not in ("my", "the", "is", "a", "of", "do", "so", "very", "too"))


def _likeness(wanted: str, phrase: str) -> float:
    """0 to 1: of the whole phrases, or the share of the wanted words that have a like one in the phrase."""
    if not wanted or not phrase:
        return 0.0
    whole = SequenceMatcher(None, wanted, phrase).ratio()
    words = wanted.split()
    found = sum(max(SequenceMatcher(None, word, other).ratio() for other in phrase.split()) >= 0.75 for word in words)
    coverage = found / max(len(words), len(phrase.split()))
    return max(whole, coverage)
