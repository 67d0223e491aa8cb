"""The moderation file: its checks and profiles, in YAML, read as a whole or not at all."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from sojourn.engine.server.gateway.moderation.classifier import ClassifierModerator
from sojourn.engine.server.gateway.moderation.expressions import MAX_MATCH_CHARACTERS, Expression
from sojourn.engine.server.gateway.moderation.http_endpoint import HttpModerator
from sojourn.engine.server.gateway.moderation.lists import ListModerator
from sojourn.engine.server.gateway.moderation.profile import Events, Profile, Role, Rule
from sojourn.engine.server.gateway.moderation.verdict import Moderator
from sojourn.engine.server.gateway.moderation.words import WordList
from sojourn.engine.server.settings_files import first_fault, read_yaml
from sojourn.metrics.errors import InputError

MAX_CATEGORIES = 100  # of a file: each is a label of a metric
MAX_EXPRESSIONS = 1000  # of one check
Category = Annotated[str, Field(min_length=1, max_length=64)]
Thresholds = dict[Category, Annotated[float, Field(ge=0, le=1)]]
Timeout = Annotated[float, Field(gt=0, le=60)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class WordsCheck(_Strict):
    """Words and phrases. A file has one in each line; empty lines and lines that begin with `#` are left out."""

    kind: Literal["words"]
    category: Category
    words: list[str] = []
    files: list[Path] = []
    whole_words: bool = True
    ignore_diacritics: bool = False

    def build(self, name: str, folder: Path) -> Moderator:
        words = [*self.words, *(word for file in self.files for word in _lines(folder / file))]
        by_category = {self.category: words}
        listed = WordList(by_category, whole_words=self.whole_words, ignore_diacritics=self.ignore_diacritics)
        return ListModerator(name, [listed])


class ExpressionEntry(_Strict):
    pattern: str = Field(min_length=1, max_length=2000)
    max_characters: int = Field(64, ge=1, le=MAX_MATCH_CHARACTERS)


class RegexCheck(_Strict):
    """Expressions in RE2's syntax, which has neither look-around nor references back."""

    kind: Literal["regex"]
    category: Category
    patterns: list[ExpressionEntry] = Field(min_length=1, max_length=MAX_EXPRESSIONS)

    def build(self, name: str, folder: Path) -> Moderator:
        return ListModerator(
            name, [Expression(entry.pattern, self.category, entry.max_characters) for entry in self.patterns]
        )


class HttpCheck(_Strict):
    """An endpoint of OpenAI's shape. `key_variable` names the environment variable that holds its key."""

    kind: Literal["http"]
    url: str = Field(pattern=r"^https?://[^\s]+$")
    categories: list[Category] = Field(min_length=1)
    model: str | None = None
    key_variable: str | None = None
    timeout_seconds: Timeout = 2.0
    retries: int = Field(1, ge=0, le=5)
    max_connections: int = Field(32, ge=1, le=1000)
    max_part_characters: int = Field(20_000, ge=100, le=1_000_000)
    thresholds: Thresholds = {}
    on_failure: Literal["refuse", "allow"] = "refuse"

    def build(self, name: str, folder: Path) -> Moderator:
        key = None if self.key_variable is None else os.environ.get(self.key_variable)
        if self.key_variable is not None and not key:
            raise InputError(f"the environment variable {self.key_variable} is not set; it should hold the key")
        return HttpModerator(
            name,
            self.url,
            key=key,
            allows_on_failure=self.on_failure == "allow",
            **self.model_dump(exclude={"kind", "url", "key_variable", "on_failure"}),
        )


class ClassifierCheck(_Strict):
    """A classifier by its entry point in the group `sojourn.moderators`."""

    kind: Literal["classifier"]
    entry_point: str
    settings: dict[str, Any] = {}
    default_threshold: float = Field(0.5, ge=0, le=1)
    thresholds: Thresholds = {}
    timeout_seconds: Timeout = 2.0
    workers: int = Field(1, ge=1, le=64)
    run_in: Literal["thread", "process"] = "thread"
    on_failure: Literal["refuse", "allow"] = "refuse"

    def build(self, name: str, folder: Path) -> Moderator:
        return ClassifierModerator(
            name, allows_on_failure=self.on_failure == "allow", **self.model_dump(exclude={"kind", "on_failure"})
        )


Check = Annotated[WordsCheck | RegexCheck | HttpCheck | ClassifierCheck, Field(discriminator="kind")]


class InputRule(_Strict):
    check: str
    action: Literal["block", "flag"] = "block"


class OutputRule(_Strict):
    check: str
    action: Literal["block", "redact", "flag"] = "block"
    replacement: str = Field("[removed]", max_length=200)


class ProfileEntry(_Strict):
    message: str = Field("this request is against the content policy of the server", min_length=1, max_length=1000)
    roles: Literal["all"] | Annotated[list[Role], Field(min_length=1)] = "all"
    input: list[InputRule] = []
    output: list[OutputRule] = []
    stream: Literal["hold", "release"] = "hold"
    window_characters: int = Field(400, ge=40, le=20_000)


class ModerationFile(_Strict):
    default: str | None = None  # the profile of calls whose tier names none
    checks: dict[str, Check]
    profiles: dict[str, ProfileEntry] = Field(min_length=1)

    @model_validator(mode="after")
    def _names_exist(self) -> "ModerationFile":
        if self.default is not None and self.default not in self.profiles:
            raise ValueError(f"`default` names the profile {self.default!r}, which is none of `profiles`")
        for name, profile in self.profiles.items():
            for rule in (*profile.input, *profile.output):
                check = self.checks.get(rule.check)
                if check is None:
                    raise ValueError(f"the profile {name!r} names the check {rule.check!r}, which is none of `checks`")
                if rule.action == "redact" and check.kind not in ("words", "regex"):
                    raise ValueError(
                        f"the profile {name!r} redacts by {rule.check!r}, but only lists can; block or flag"
                    )
        return self


def load(path: Path, events: Events) -> tuple[dict[str, Profile], str | None, list[Moderator]]:
    """Profiles by name, the name of the default one, and the moderators, for their end.

    Raises InputError, with the file and the place of its first fault.
    """
    file = parse(path)
    moderators: dict[str, Moderator] = {}
    for name, check in file.checks.items():
        try:
            moderators[name] = check.build(name, path.parent)
        except InputError as error:
            raise InputError(f"{path}: checks.{name}: {error}") from None
    categories = {category for moderator in moderators.values() for category in moderator.categories}
    if len(categories) > MAX_CATEGORIES:
        raise InputError(f"{path}: {len(categories)} categories are more than {MAX_CATEGORIES}; join some")
    profiles = {name: _profile(name, entry, moderators, events) for name, entry in file.profiles.items()}
    return profiles, file.default, list(moderators.values())


def parse(path: Path) -> ModerationFile:
    try:
        return ModerationFile.model_validate(read_yaml(path))
    except ValidationError as invalid:
        raise InputError(f"{path}: {first_fault(invalid, tagged='checks')}") from None


def files_of(path: Path) -> list[Path]:
    """The moderation file and the word files that it names. Raises InputError."""
    checks = parse(path).checks.values()
    return [path, *(path.parent / file for check in checks if isinstance(check, WordsCheck) for file in check.files)]


def _profile(name: str, entry: ProfileEntry, moderators: Mapping[str, Moderator], events: Events) -> Profile:
    inputs = [Rule(moderators[rule.check], rule.action) for rule in entry.input]
    outputs = [Rule(moderators[rule.check], rule.action, rule.replacement) for rule in entry.output]
    return Profile(
        name=name,
        message=entry.message,
        roles=None if entry.roles == "all" else frozenset(entry.roles),
        input_rules=tuple(inputs),
        output_rules=tuple(outputs),
        holds=entry.stream == "hold",
        window_characters=entry.window_characters,
        events=events,
    )


def _lines(file: Path) -> list[str]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file} cannot be read: {error}") from None
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]
