"""Templates with one fault each, and the finding that says so."""

import json
from pathlib import Path

import pytest

from sojourn.engine.token.text.template_lint import lint_template

MESSAGES = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</>{% endfor %}"
TEMPLATES = {
    "template_time": "{{ strftime_now('%d %b %Y') }}" + MESSAGES,
    "template_system": "{% for m in messages|reverse %}<{{ m['role'] }}>{{ m['content'] }}</>{% endfor %}",
    "template_tools": "{% if tools %}{{ tools|tojson }}{% endif %}" + MESSAGES,
    "template_history": "{% for m in messages %}<{{ '!' if loop.last }}>{{ m['content'] }}</>{% endfor %}",
}


def folder_with(path: Path, template: str) -> Path:
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return path


@pytest.mark.parametrize("key", TEMPLATES)
def test_a_template_that_defeats_the_cache_is_found(tmp_path, key):
    found = {finding.key for finding in lint_template(folder_with(tmp_path, TEMPLATES[key]))}
    assert key in found
    assert found <= {key, "template_history"}, "messages in another order change a history, too"


def test_the_time_is_worse_before_the_system_prompt_than_behind_it(tmp_path):
    first = lint_template(folder_with(tmp_path, TEMPLATES["template_time"]))
    assert first[0].severity == "high" and "each day" in first[0].says and first[0].share > 0.9
    last = lint_template(folder_with(tmp_path, MESSAGES + "{{ strftime_now('%H:%M:%S') }}"))
    assert next(finding for finding in last if finding.key == "template_time").severity == "medium"
    assert "each second" in last[0].says or "each second" in last[1].says


def test_the_bundled_template_and_one_that_is_plain_have_no_fault(tmp_path):
    assert lint_template(Path(__file__).parents[4] / "scenarios" / "tiny-model") == []
    assert lint_template(folder_with(tmp_path, MESSAGES)) == []


def test_a_model_without_a_template_or_one_that_refuses_a_system_prompt_has_no_finding(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert lint_template(tmp_path) == []
    refuses = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + MESSAGES
    assert lint_template(folder_with(tmp_path, refuses)) == []
