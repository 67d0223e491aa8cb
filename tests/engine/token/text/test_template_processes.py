"""A template may loop, take memory or kill its process: its own chat gets a sentence, and nothing else suffers."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from sojourn.engine.token.text import template_processes
from sojourn.engine.token.text.template import ChatTemplate, TemplatesBusy, TooMuchToRender
from sojourn.engine.token.text.template_processes import WORKERS
from sojourn.metrics.errors import ModelError
from tests.test_floors import ROOT

# Work for ever only on a chat that says so, and so pass the load.
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
HOARD = "{% set box = namespace(s='0123456789') %}{% for i in range(40) %}{% set box.s = box.s ~ box.s %}{% endfor %}"
POWER = "{{ (9 ** (9 ** 9 + messages | length)) > 1 }}"  # one step of C code, which no handler of Python breaks


def on_word(work: str) -> str:
    return "{% if messages[0].content == 'go' %}" + work + "{% endif %}{{ messages[0].content }}"


def chat(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


def workers() -> list[psutil.Process]:
    module = "sojourn.engine.token.text.template_worker"
    return [child for child in psutil.Process().children() if module in child.cmdline()]


@pytest.fixture
def template(tmp_path, monkeypatch):
    monkeypatch.setattr("sojourn.engine.token.text.template.CPU_SECONDS", 0.3)

    def make(source: str) -> ChatTemplate:
        (tmp_path / "chat_template.jinja").write_text(source)
        return ChatTemplate(tmp_path)

    return make


@pytest.mark.parametrize("work", [LOOP, HOARD, POWER], ids=["time", "memory", "C code"])
def test_a_rendering_that_does_not_end_is_a_sentence_and_the_next_is_rendered(template, work):
    made = template(on_word(work))
    with pytest.raises(TooMuchToRender, match=r"takes more than 0\.3 s of CPU time, or more than 1 GiB of memory"):
        made.render(chat("go"))
    assert made.render(chat("stop")) == "stop"
    assert len(workers()) <= WORKERS


def test_constants_that_never_end_are_refused_when_they_are_compiled(template):
    with pytest.raises(ModelError, match=r"cannot be compiled: .*1 s of CPU time"):
        template("{{ 9 ** (9 ** 9) > 1 }}")


def test_processes_are_used_again(template):
    made = template("{{ messages[0].content }}")
    before = {worker.pid for worker in workers()}
    assert [made.render(chat(str(number))) for number in range(200)] == [str(number) for number in range(200)]
    assert {worker.pid for worker in workers()} == before


def test_one_that_was_killed_while_it_was_idle_is_replaced_unseen(template):
    made = template("{{ messages[0].content }}")
    for worker in workers():
        os.kill(worker.pid, signal.SIGKILL)
    assert made.render(chat("on")) == "on"


def test_a_slow_template_holds_up_no_other(template):
    made = template(on_word(LOOP))

    def work() -> None:
        with pytest.raises(TooMuchToRender):
            made.render(chat("go"))

    slow = threading.Thread(target=work)
    slow.start()
    try:
        while slow.is_alive():
            assert made.render(chat("stop")) == "stop"
    finally:
        slow.join()


def test_where_no_process_answers_in_time_there_is_a_sentence(template, monkeypatch):
    made = template("{{ messages[0].content }}")
    made.render(chat("on"))
    monkeypatch.setattr(template_processes, "WAIT_SECONDS", 0.3)
    stopped = template_processes.TemplateProcesses()
    monkeypatch.setattr("sojourn.engine.token.text.template.template_processes", lambda: stopped)
    before = {worker.pid for worker in workers()}
    made.render(chat("on"))
    (new,) = (worker for worker in workers() if worker.pid not in before)
    new.suspend()
    with pytest.raises(TemplatesBusy, match="busy, or cannot start; try again"):
        made.render(chat("on"))
    assert made.render(chat("on")) == "on"


def test_the_event_loop_goes_on_while_a_template_works(template):
    made = template(on_word(LOOP))

    async def count() -> int:
        rendering, turns = asyncio.create_task(asyncio.to_thread(made.render, chat("go"))), 0
        while not rendering.done():
            await asyncio.sleep(0.01)
            turns += 1
        with pytest.raises(TooMuchToRender):
            await rendering
        return turns

    assert asyncio.run(count()) >= 5


def test_processes_see_no_keys_and_import_no_torch(monkeypatch):
    monkeypatch.setenv("SOJOURN_TEST_KEY", "secret")
    worker = template_processes._Worker()
    before = {each.pid: each for each in workers()}
    assert before and not any("SOJOURN_TEST_KEY" in each.environ() for each in before.values())
    worker.end()
    code = (
        "import sys, sojourn.engine.token.text.template_worker\nprint('torch' in sys.modules, 'numpy' in sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["False", "False"]


def test_processes_die_with_their_parent(tmp_path):
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    code = (
        "import psutil, os, signal; from pathlib import Path\n"
        "from sojourn.engine.token.text.template import ChatTemplate\n"
        f"ChatTemplate(Path({str(tmp_path)!r}))\n"
        "print(psutil.Process().children()[0].pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    said = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    deadline = time.monotonic() + 10
    while psutil.pid_exists(int(said.stdout)) and psutil.Process(int(said.stdout)).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_processes_import_what_their_parent_imports_from_any_folder(tmp_path):
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (tmp_path / "json.py").write_text("raise SystemExit('a module of the folder')")
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); from pathlib import Path\n"
        "from sojourn.engine.token.text.template import ChatTemplate\n"
        "print(ChatTemplate(Path('.')).render([{'role': 'user', 'content': 'on'}]))"
    )
    said = subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert said.stdout == "on\n" and not said.stderr


def test_where_no_process_can_start_there_is_a_sentence(template, monkeypatch):
    made = template("{{ messages[0].content }}")
    none = template_processes.TemplateProcesses()
    monkeypatch.setattr("sojourn.engine.token.text.template.template_processes", lambda: none)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    for _ in range(2 * WORKERS):
        with pytest.raises(TemplatesBusy, match="cannot start"):
            made.render(chat("on"))


def test_a_fork_starts_its_own(template):
    made = template("{{ messages[0].content }}")
    made.render(chat("before"))
    child = os.fork()
    if child == 0:
        os._exit(0 if made.render(chat("inside")) == "inside" else 1)
    assert made.render(chat("outside")) == "outside"
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
