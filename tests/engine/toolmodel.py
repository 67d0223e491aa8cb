"""The bundled model with a template that knows tools. It was not trained on them: only a grammar makes it call."""

import json
from pathlib import Path

from sojourn.engine.config import model_folder

TEMPLATE = """{%- if tools %}
    {{- '<|im_start|>system\\nFunctions:' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\nCall one as <tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<result>' + message.content + '</result><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if thinking is defined and thinking %}{{- '<think>' }}{%- endif %}
{%- endif %}"""


def make_tool_model(folder: Path) -> Path:
    """A checkpoint folder that links to the bundled weights."""
    tiny = model_folder("tiny-model").resolve()
    folder.mkdir()
    for name in ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json"):
        (folder / name).symlink_to(tiny / name)
    described = json.loads((tiny / "tokenizer_config.json").read_text(encoding="utf-8"))
    del described["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(described), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return folder
