"""Published chat templates: each chat gives what transformers makes of it, or both refuse it.

SOJOURN_CHAT_TEMPLATES names a folder of *.jinja files, such as models/templates of llama.cpp or examples of vLLM:

    SOJOURN_CHAT_TEMPLATES=folder pytest -m peer tests/peers/test_public_templates.py
"""

import os
from pathlib import Path

import pytest

from tests.engine.token.text.template_oracle import CHATS, REFUSED, Oracle, Ours, differences

FOLDER = os.environ.get("SOJOURN_CHAT_TEMPLATES")
FILES = sorted(Path(FOLDER).rglob("*.jin*")) if FOLDER else []

pytestmark = [
    pytest.mark.peer,
    pytest.mark.skipif(not FILES, reason="SOJOURN_CHAT_TEMPLATES names no folder with *.jinja files"),
]


@pytest.fixture(scope="module")
def oracle():
    return Oracle()


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_published_template_gives_what_transformers_gives(oracle, tmp_path, file):
    assert not differences(oracle, tmp_path, file.read_text(encoding="utf-8"))


def test_most_published_templates_render_most_chats(oracle, tmp_path):
    """So that agreement is not that of two refusals."""
    said = [Ours(tmp_path, file.read_text(encoding="utf-8")).says(chat, **options)
            for file in FILES for chat, options in CHATS.values()]  # fmt: skip
    rendered = sum(text is not REFUSED for text in said)
    print(f"{rendered:,} of {len(said):,} chats rendered, {len(FILES)} templates")
    assert rendered > len(said) / 2
