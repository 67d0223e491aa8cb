"""Which template a checkpoint has: the one that transformers' tokenizer finds in the same files."""

import json
import shutil

import pytest

from sojourn.engine.config import model_folder
from sojourn.engine.token.checkpoint import read_json
from sojourn.engine.token.text.template import ChatTemplate, TemplateError
from sojourn.engine.token.text.template_sources import special_tokens, template_sources
from sojourn.metrics.errors import ModelError

TINY = model_folder("tiny-model")
CHAT = [{"role": "user", "content": "a"}]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}]
NAMED = [{"name": "default", "template": "list"}, {"name": "tool_use", "template": "list, {{ tools | length }}"}]
FILES = {
    "a text": {"tokenizer_config.json": {"chat_template": "text"}},
    "a list": {"tokenizer_config.json": {"chat_template": NAMED}},
    "a list without a default": {"tokenizer_config.json": {"chat_template": NAMED[1:]}},
    "a list without one for tools": {"tokenizer_config.json": {"chat_template": NAMED[:1]}},
    "a list with others": {"tokenizer_config.json": {"chat_template": [*NAMED, {"name": "rag", "template": "r"}]}},
    "a file": {"chat_template.jinja": "file", "tokenizer_config.json": {}},
    "a file beside a text": {"chat_template.jinja": "file", "tokenizer_config.json": {"chat_template": "text"}},
    "a file beside a list": {"chat_template.jinja": "file", "tokenizer_config.json": {"chat_template": NAMED}},
    "a file, and one for tools": {
        "chat_template.jinja": "file", "additional_chat_templates/tool_use.jinja": "tools", "tokenizer_config.json": {}
    },
    "only one for tools": {"additional_chat_templates/tool_use.jinja": "tools", "tokenizer_config.json": {}},
    "a file with newlines of Windows": {"chat_template.jinja": "a\r\nb\r\n", "tokenizer_config.json": {}},
    "none": {"tokenizer_config.json": {}},
}  # fmt: skip


def write(folder, files: dict[str, object]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name).write_text(text, encoding="utf-8", newline="")


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
@pytest.mark.parametrize("files", FILES.values(), ids=FILES)
def test_the_template_is_the_one_that_transformers_takes(tmp_path, files, tools):
    from transformers import PreTrainedTokenizerFast

    shutil.copy(TINY / "tokenizer.json", tmp_path)
    write(tmp_path, files)
    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
        expected = tokenizer.apply_chat_template(CHAT, tools=tools, tokenize=False)
    except ValueError:
        expected = None
    try:
        said = ChatTemplate(tmp_path).render(CHAT, tools=tools, add_generation_prompt=False)
    except TemplateError as error:
        said = None
        assert "no chat template" in str(error)
    assert said == expected


def test_a_processors_template_is_taken_where_the_tokenizer_has_none(tmp_path):
    write(tmp_path, {"chat_template.json": {"chat_template": "processor"}, "tokenizer_config.json": {}})
    assert template_sources(tmp_path) == {"default": "processor"}
    write(tmp_path, {"tokenizer_config.json": {"chat_template": "tokenizer"}})
    assert template_sources(tmp_path) == {"default": "tokenizer"}


@pytest.mark.parametrize("wrong", [5, [1], [{"template": "a"}], [{"name": "default"}], {"default": 1}, True])
def test_a_template_of_another_form_is_refused_by_the_name_of_its_file(tmp_path, wrong):
    write(tmp_path, {"tokenizer_config.json": {"chat_template": wrong}})
    with pytest.raises(ModelError, match=r"`chat_template` of .*tokenizer_config.json must be a text, or a list"):
        ChatTemplate(tmp_path)


def test_a_file_that_is_no_text_is_refused_by_its_name(tmp_path):
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe{{ x }}")
    with pytest.raises(ModelError, match=r"chat_template\.jinja cannot be read"):
        ChatTemplate(tmp_path)


def test_tokens_come_from_the_configuration_and_else_from_the_map(tmp_path):
    config = {"bos_token": {"content": "<s>"}, "eos_token": None, "extra_special_tokens": {"image_token": "<image>"}}
    write(tmp_path, {"tokenizer_config.json": config})
    write(tmp_path, {"special_tokens_map.json": {"bos_token": "<old>", "eos_token": {"content": "</s>"}}})
    assert special_tokens(tmp_path) == {"bos_token": "<s>", "eos_token": "</s>", "image_token": "<image>"}


def test_templates_of_a_gguf_file_are_found_by_name(tmp_path):
    import gguf

    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_chat_template([{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}])
    for write_part in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write_part()
    writer.close()
    assert read_json(path, "tokenizer_config.json")["chat_template"] == {"default": "plain", "tool_use": "tools"}
    template = ChatTemplate(path)
    assert [template.render(CHAT, tools=tools) for tools in (None, TOOLS)] == ["plain", "tools"]
