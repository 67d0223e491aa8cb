"""The moderation file: what it may say, and the sentence for what it may not."""

import re
from pathlib import Path

import pytest

from sojourn.engine.server.gateway.moderation.file import load
from sojourn.engine.server.gateway.moderation.profile import Events
from sojourn.metrics.errors import InputError

CHECKS = "checks:\n  list: {kind: words, category: hate, words: [zorro]}\n"
PROFILE = "profiles:\n  standard:\n    input: [{check: list}]\n"


def loaded(folder: Path, text: str):
    path = folder / "moderation.yaml"
    path.write_text(text)
    return load(path, Events())


def test_the_file_of_the_documentation_is_a_good_one(tmp_path):
    (text,) = re.findall(r"```yaml\n(.*?)```", Path("docs/moderation.md").read_text(encoding="utf-8"), re.DOTALL)
    profiles, default, moderators = loaded(tmp_path, text)
    profile = profiles[default]
    assert [moderator.name for moderator in moderators] == ["slurs", "card_numbers", "service"]
    assert [(rule.moderator.name, rule.action) for rule in profile.output_rules] == [
        ("slurs", "block"), ("card_numbers", "redact"),
    ]  # fmt: skip
    assert moderators[1].verdict("pay with 4111 1111 1111 1111 now").spans[0].begin == 9


def test_words_of_files_stand_beside_it(tmp_path):
    (tmp_path / "words.txt").write_text("# a comment\nfirst one\n\n second \n")
    text = "checks:\n  list: {kind: words, category: c, files: [words.txt]}\n" + PROFILE
    _, default, (listed,) = loaded(tmp_path, text)
    assert default is None and len(listed.verdict("First One, second, a comment").spans) == 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "valid dictionary"),
        ("checks: {", "is no YAML"),
        (CHECKS, "profiles is missing; add it"),
        (CHECKS + "profiles: {}", "profiles is not valid: dictionary should have at least 1 item"),
        (CHECKS + PROFILE.replace("check: list", "check: lists"), "names the check 'lists'"),
        ("default: other\n" + CHECKS + PROFILE, "`default` names the profile 'other'"),
        (CHECKS.replace("words: [zorro]", "words: []") + PROFILE, "checks.list: a word list has 1 to"),
        (CHECKS.replace("words: [zorro]", "files: [none.txt]") + PROFILE, "none.txt cannot be read"),
        (CHECKS.replace("words: [zorro]", "word: [zorro]") + PROFILE, "checks.list.word is not a setting"),
        ("checks:\n  list: {kind: word}\n" + PROFILE, "checks.list.kind is 'word'; it must be one of"),
        ("checks:\n  list: {words: [a]}\n" + PROFILE, "checks.list.kind is missing; add it"),
        ("checks:\n  list: {kind: regex, category: c, patterns: [{pattern: '(a'}]}\n" + PROFILE,
         "no expression of RE2"),
        ("checks:\n  list: {kind: regex, category: c, patterns: [{pattern: a, max_characters: 2001}]}\n" + PROFILE,
         "less than or equal to 2000"),
        ("checks:\n  list: {kind: http, url: 'ftp://x', categories: [c]}\n" + PROFILE, "url is not valid: string"),
        ("checks:\n  list: {kind: http, url: 'http://x', categories: [c], key_variable: NOT_SET_HERE}\n" + PROFILE,
         "NOT_SET_HERE is not set"),
        ("checks:\n  list: {kind: classifier, entry_point: absent}\n" + PROFILE, "no package offers"),
        ("checks:\n  list: {kind: http, url: 'http://x', categories: [c]}\nprofiles:\n  p:\n    output: "
         "[{check: list, action: redact}]\n", "only lists can"),
        (CHECKS + PROFILE + "    window_characters: 39\n", "greater than or equal to 40"),
    ],
)  # fmt: skip
def test_a_fault_is_a_sentence_with_its_place(tmp_path, text, says):
    with pytest.raises(InputError, match=re.escape(says)):
        loaded(tmp_path, text)


@pytest.mark.parametrize(("number", "is_good"), [(100, True), (101, False)])
def test_a_file_may_have_as_many_categories_as_metrics_have_labels_for(tmp_path, number, is_good):
    checks = "".join(f"  c{i}: {{kind: words, category: c{i}, words: [w]}}\n" for i in range(number))
    text = f"checks:\n{checks}profiles: {{p: {{}}}}\n"
    if is_good:
        assert len(loaded(tmp_path, text)[2]) == number
    else:
        with pytest.raises(InputError, match="101 categories"):
            loaded(tmp_path, text)
