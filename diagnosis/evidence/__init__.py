"""What is known of a run: one of four kinds, and what a kind holds of another."""

from dataclasses import fields
from typing import TypeVar

from sojourn.diagnosis.evidence.accounts import Accounts, Work
from sojourn.diagnosis.evidence.client import Arrivals, Client, declared_classes, tightest
from sojourn.diagnosis.evidence.means import Means
from sojourn.diagnosis.evidence.read import read_evidence
from sojourn.diagnosis.evidence.records import Records
from sojourn.diagnosis.step_facts import StepFacts
from sojourn.interop.sources.view import ServerView

__all__ = (
    "Accounts", "Arrivals", "Client", "Means", "Records", "Work", "as_kind", "declared_classes", "is_joined",
    "read_evidence", "steps_of", "tightest", "view_of",
)  # fmt: skip
Kind = TypeVar("Kind", bound=Client)


def as_kind(kind: type[Kind], facts: Client) -> Kind:
    """The part of an evidence that another kind has."""
    return kind(**{each.name: getattr(facts, each.name) for each in fields(kind)})


def is_joined(facts: Client) -> bool:
    """Whether the server recorded requests that were served."""
    return isinstance(facts, Records) and facts.joined > 0


def steps_of(facts: Client) -> StepFacts | None:
    return facts.steps if isinstance(facts, Records) else None


def view_of(facts: Client) -> ServerView | None:
    """What the server's own metrics show, where no request is joined with a record of the server."""
    return facts.server if isinstance(facts, Means | Accounts) else None
