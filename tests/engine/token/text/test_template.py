"""Chat templates: the text that transformers makes of them, within bounds. The templates are ours; constructs are not."""
# ruff: noqa: E501

import json
import re
import shutil
from datetime import datetime

import pytest

from sojourn.engine.config import model_folder
from sojourn.engine.token.text.template import ChatTemplate, OutputTooLong, TemplateError
from sojourn.metrics.errors import ModelError

TINY = model_folder("tiny-model")

# Each written for the constructs that one family's published templates need.
LLAMA = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}{%- set date_string = strftime_now("%Y") %}{%- else %}{%- set date_string = "?" %}{%- endif %}
{%- endif %}
{%- if tools_in_user_message is not defined %}{%- set tools_in_user_message = true %}{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|head|>system<|/head|>" + ("Environment: ipython\\n" if tools is not none else "") + "Year " ~ date_string ~ "\\n" }}
{{- system_message }}
{%- if tools_in_user_message and not tools is none %}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|head|>' + message['role'] + '<|/head|>' + message['content'] | trim + '<|eot|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}{{- raise_exception("one call at a time") }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", ' + '"parameters": ' + (call.arguments | tojson) + "}" }}
    {%- else %}
        {{- "<|head|>ipython<|/head|>" }}
        {%- if message.content is mapping or message.content is iterable and message.content is not string %}
            {{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|head|>assistant<|/head|>' }}{%- endif %}
"""
QWEN = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n<tools>" }}{%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}{{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(multi_step=true, last_query=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step and message.role == "user" and message.content is string and not(message.content.startswith('<r>') and message.content.endswith('</r>')) %}
        {%- set ns.multi_step = false %}{%- set ns.last_query = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content %}{%- set thought = '' %}
        {%- if message.reasoning_content is string %}{%- set thought = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query and (loop.last or (not loop.last and thought)) %}
            {{- '<|im_start|>assistant\\n<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}{{- '<|im_start|>assistant\\n' + content }}{%- endif %}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}{{- '\\n' }}{%- endif %}
                {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
                {{- '<tool_call>\\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}
                {%- if tool_call.arguments is string %}{{- tool_call.arguments }}{%- else %}{{- tool_call.arguments | tojson }}{%- endif %}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<r>\\n' }}{{- message.content }}{{- '\\n</r>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""
MISTRAL = """{%- if messages[0]["role"] == "system" %}{%- set system = messages[0]["content"] %}{%- set rest = messages[1:] %}
{%- else %}{%- set rest = messages %}{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- set user_messages = rest | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace() %}{%- set ns.index = 0 %}
{%- for message in rest %}
    {%- if not (message.role == "tool" or (message.tool_calls is defined and message.tool_calls is not none)) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}{{- raise_exception("roles must alternate") }}{%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in rest %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}{{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}{{- '"' + key + '": "' + val + '"' }}{%- else %}{{- '"' + key + '": ' + val|tojson }}{%- endif %}
                    {%- if not loop.last %}{{- ", " }}{%- endif %}
                {%- endfor %}{{- "}}" }}{%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" }}{%- endif %}
            {%- endfor %}{{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system is defined %}{{- "[INST] " + system + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}{{- "[INST] " + message["content"] + "[/INST]" }}{%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function|tojson %}{{- out[:-1] }}
            {%- if not tool_call.id is defined or tool_call.id|length < 2 %}{{- raise_exception("ids") }}{%- endif %}
            {{- ', "id": "' + tool_call.id + '"}' }}{%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" + eos_token }}{%- endif %}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}{{- " " + message["content"]|trim + eos_token }}
    {%- elif message["role"] == "tool" %}
        {%- if message.content is defined and message.content.content is defined %}{%- set content = message.content.content %}
        {%- else %}{%- set content = message.content %}{%- endif %}
        {{- '[TOOL_RESULTS] {"content": ' + content|string + "}[/TOOL_RESULTS]" }}
    {%- else %}{{- raise_exception("unknown role: " + message["role"]) }}{%- endif %}
{%- endfor %}"""
OTHERS = """{% macro turn(role, text='-', end=true) %}<{{ role }}>{{ text }}{{ '</' ~ role ~ '>' if end else '' }}{% endmacro %}
{% for message in messages %}
  {% if message.role == 'system' %}
    {% continue %}
  {% endif %}
{{ turn(message.role, message['content'].strip(), end=not loop.last) }}
{% if message.role == 'assistant' %}{% generation %}{{ message.content | upper }}{% endgeneration %}{% endif %}
  {% set parts = message.content.split(' ') %}
{{ parts | length }} {{ parts | map('length') | list }} {{ parts | first }} {{ parts[-1] }} {{ loop.index }}/{{ loop.length }}
{% endfor %}
{% for key, value in {'a': [1, none, true], 'b': 'é"<'} | dictsort %}{{ key }}={{ value | tojson }};{% endfor %}
{{ messages | map(attribute='role') | join('+') }} {{ (messages | rejectattr('role', 'equalto', 'user') | list | length) // 2 }}
{{ 'yes' if 'x' not in messages[0] and messages[0].get('name', 'none') == 'none' else 'no' }}"""
TEMPLATES = {"llama": LLAMA, "qwen": QWEN, "mistral": MISTRAL, "others": OTHERS}

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "it's <b>“é”</b>"}},
    "required": [],
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": f"does {name}", "parameters": PARAMETERS}}
    for name in ("look", "see")
]
CALL = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "look", "arguments": '{"city": "Graz <é>", "n": [1]}'},
}
CHATS = {
    "user": [{"role": "user", "content": "Hi there"}],
    "system": [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "a <b> 'c' \"d\"\n"}],
    "turns": [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\ntwo"},
        {"role": "user", "content": "three"},
    ],
    "calls": [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "sunny", "tool_call_id": "abcdefghi"},
    ],
    "final": [{"role": "user", "content": "go"}, {"role": "assistant", "content": "I begin "}],
}


@pytest.fixture
def template_of(tmp_path):
    """A template's source → it, in a checkpoint's folder."""

    def make(source: str | None, **files: str) -> ChatTemplate:
        config = json.loads((TINY / "tokenizer_config.json").read_text())
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": source}))
        for name, text in files.items():
            (tmp_path / f"{name}.jinja").write_text(text)
        return ChatTemplate(tmp_path, clock=lambda: datetime(2026, 3, 4))

    return make


@pytest.fixture(scope="module")
def transformers_says():
    """What transformers' apply_chat_template makes of the same."""
    from transformers import PreTrainedTokenizerFast

    special = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "pad_token": "<|pad|>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(TINY / "tokenizer.json"), **special)

    def say(source: str, messages: list[dict], **options) -> str:
        messages = json.loads(json.dumps(messages))
        for call in (call for message in messages for call in message.get("tool_calls", [])):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        return tokenizer.apply_chat_template(messages, chat_template=source, tokenize=False, **options)

    return say


@pytest.mark.parametrize("with_tools", [False, True], ids=["plain", "tools"])
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_renders_what_transformers_renders(template_of, transformers_says, name, chat, with_tools):
    source = TEMPLATES[name].replace('strftime_now("%Y")', 'strftime_now("%%")')  # the two clocks differ
    template, tools = template_of(source), TOOLS if with_tools else None
    for options in ({}, {"add_generation_prompt": True}, {"continue_final_message": True}):
        if "continue_final_message" in options and (chat != "final" or name == "others"):
            continue
        expected = transformers_says(source, CHATS[chat], tools=tools, **options)
        options = {"add_generation_prompt": False} | options
        assert template.render(CHATS[chat], tools=tools, **options) == expected


def test_a_variable_changes_the_prompt_as_in_transformers(template_of, transformers_says):
    template = template_of(QWEN)
    assert template.variables == {"enable_thinking"}
    for thinking in (False, True):
        expected = transformers_says(QWEN, CHATS["user"], add_generation_prompt=True, enable_thinking=thinking)
        assert template.render(CHATS["user"], variables={"enable_thinking": thinking}) == expected


def test_no_request_can_set_what_the_server_gives_the_template(template_of):
    source = "{{ messages[0].content }}{{ tools }}{{ bos_token }}{{ tokenize }}{{ raise_exception }}{{ mine }}{{ documents }}"
    assert template_of(source).variables == {"mine"}


def test_the_date_comes_from_the_clock(template_of):
    assert "Year 2026\n" in template_of(LLAMA).render(CHATS["user"])


def test_a_template_of_its_own_for_tools_is_used_for_tools_only(template_of):
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools | length }} tools"}]
    template = template_of(named)
    assert template.render(CHATS["user"]) == "plain" and template.knows_tools
    assert template.render(CHATS["user"], tools=TOOLS) == "2 tools"


def test_a_file_beside_the_tokenizer_goes_before_its_entry(template_of):
    assert template_of("old", chat_template="new").render(CHATS["user"]) == "new"


def test_deepseek_gets_arguments_as_text_and_others_as_objects(template_of):
    written = "{% for call in messages[1].tool_calls or [] %}{{ call.function.arguments + '' }}{% endfor %}"
    deepseek = template_of(written + "{# {{ tools }} <｜tool▁call▁begin｜> #}")
    assert deepseek.render(CHATS["calls"]) == CALL["function"]["arguments"]
    with pytest.raises(TemplateError, match="refuses"):
        template_of(written).render(CHATS["calls"])


def test_developer_is_the_system_to_a_template_that_does_not_know_the_word(template_of):
    roles, chat = (
        "{% for message in messages %}{{ message.role }} {% endfor %}",
        [{"role": "developer", "content": "a"}],
    )
    for source, role in ((roles, "system "), (roles + "{# developer #}", "developer ")):
        template = template_of(source)
        assert template.render([template.adapted(message) for message in chat]) == role


@pytest.mark.parametrize(
    ("shown", "content"),
    [("{{ message.content + '' if message.tool_calls else '' }}", ""), ("{{ message.content }}", None)],
    ids=["fails without", "needs none"],
)
def test_calls_have_a_content_where_the_template_cannot_do_without(template_of, shown, content):
    source = "{% for message in messages %}" + shown + "{{ message.tool_calls }}{% endfor %}{{ tools }}"
    assert template_of(source).adapted(CHATS["calls"][1] | {"content": None})["content"] == content


def test_what_the_template_refuses_is_said_in_its_words(template_of):
    with pytest.raises(TemplateError, match="roles must alternate"):
        template_of(MISTRAL).render([{"role": "assistant", "content": "x"}])


def test_a_template_that_refuses_every_small_chat_is_named_at_load(template_of, caplog):
    template_of("{{ raise_exception('not today') }}")
    assert "refuses all small chats: not today" in caplog.text
    caplog.clear()
    template_of("{% if messages|length < 2 %}{{ raise_exception('more') }}{% endif %}{{ messages[0].content }}")
    assert not caplog.text


def test_a_model_without_a_template_says_so(tmp_path):
    shutil.copy(TINY / "tokenizer.json", tmp_path)
    with pytest.raises(TemplateError, match="no chat template"):
        ChatTemplate(tmp_path).render(CHATS["user"])


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
        "{{ 'x' * 100000000 }}",
        "{% set ns = namespace(s='0123456789') %}{% for i in range(20) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}",
        "{% for a in range(90000) %}{{ '0123456789abcdef' }}{% endfor %}",
        "{% for message in messages %}",
        "{{ unclosed",
        "{% include 'etc' %}{% for a in range(100000) %}{% for b in range(9999) %}{% endfor %}{% endfor %}{{ 1",
    ],
)
def test_a_hostile_template_is_refused_when_it_is_loaded(template_of, source):
    with pytest.raises(ModelError, match="chat template"):
        template_of(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.x }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ self.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ dict.__class__.x }}",
        "{{ lipsum.__globals__ }}",
        "{{ namespace(__class__=1) }}",
        "{{ messages.sort }}",
        "{{ raise_exception.__globals__ }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ messages.append(1) }}",
        "{{ ''|attr('__class__')|attr('x') }}",
    ],
)
def test_a_template_reaches_nothing_of_python(template_of, source):
    """An attribute of Python's own is undefined: a template that goes on from it is refused."""
    try:
        text = template_of(source).render(CHATS["user"])
    except (TemplateError, ModelError) as error:
        assert re.search("unsafe|underscore|immutable|undefined", str(error))
    else:
        assert text == ""


def test_messages_cannot_make_a_prompt_longer_than_its_bound(template_of):
    doubling = "{% for message in messages %}{% for other in messages %}{{ other.content }}{% endfor %}{% endfor %}"
    messages = [{"role": "user", "content": "x" * 1000}] * 30
    assert len(template_of(doubling).render(messages, max_characters=900_000)) == 900_000
    with pytest.raises(OutputTooLong):
        template_of(doubling).render(messages, max_characters=899_999)
