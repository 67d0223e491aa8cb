"""`sojourn lint`: prompts that a prefix cache cannot use, texts that cost tokens, and queries without an answer."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from sojourn.commands.cli import find_run, need, open_run, out, print_json, table
from sojourn.commands.lint_queries import is_dashboard, lint_queries
from sojourn.metrics.errors import InputError
from sojourn.metrics.exit_codes import Ended

if TYPE_CHECKING:
    from sojourn.engine.token.text.template import ChatTemplate
    from sojourn.loadgen.prompts.written import WrittenPrompt
    from sojourn.loadgen.scenario.scenario import Scenario
    from sojourn.metrics.memory.prompt_lint.finding import Finding
    from sojourn.metrics.memory.prompt_lint.lint import LintReport
    from sojourn.metrics.run.directory import RunDirectory

MOST_PROMPTS = 1000  # of a scenario or a trace
BLOCK_SIZE = 16  # of the engine, unless a scenario sets another
BUNDLED = "tiny-model"
STYLES = {"high": "red", "medium": "yellow", "low": "dim"}


def lint(
    targets: Annotated[
        list[str],
        typer.Argument(
            metavar="SCENARIO|TRACE|RUN|DASHBOARD|RULES",
            help="a scenario, a trace file, or a run directory; with --metrics, dashboards and files of rules",
        ),
    ],
    metrics: Annotated[
        list[str] | None,
        typer.Option(metavar="URL|FILE", help="judge queries of dashboards and rules by this /metrics; repeatable"),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="folder with tokenizer and chat template; by default the scenario's, or the bundled model's"),
    ] = None,
    requests: Annotated[
        int | None, typer.Option(min=2, max=20_000, help=f"prompts to read at most; by default {MOST_PROMPTS}")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="seed of a scenario's prompts; by default its own")] = None,
    block_size: Annotated[
        int | None, typer.Option(min=1, max=1024, help="tokens of a KV block; by default the scenario's, or 16")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="exit with 1 if anything is found")] = False,
    json: Annotated[bool, typer.Option("--json", help="print the findings as JSON")] = False,
) -> None:  # fmt: skip
    """Find prompts that a prefix cache cannot use, and panels and alerts that a server cannot answer (--metrics)."""
    if metrics or any(is_dashboard(target) for target in targets):
        given = {"model": model, "requests": requests, "seed": seed, "block_size": block_size}
        _refuse("is a dashboard or a file of rules, which has no prompts", targets[0], **given)
        sys.exit(lint_queries(targets, metrics or [], strict, json))
    if len(targets) > 1:
        raise InputError(f"lint reads one scenario, trace or run at a time; {targets[1]} is one too many")
    report = _report(targets[0], model, requests, seed, block_size)
    if json:
        print_json(report)
    else:
        _print(report)
    sys.exit(Ended.FAILED if strict and report.findings else Ended.DONE)


def _report(
    target: str, model: str | None, requests: int | None, seed: int | None, block_size: int | None
) -> "LintReport":
    from sojourn.diagnosis.run_lint import lint_run

    if (find_run(Path(target)) / "run.json").exists():
        _refuse(
            "is a run, and its records are read as they are", target,
            model=model, requests=requests, seed=seed, block_size=block_size,
        )  # fmt: skip
        return _with_template(lint_run(opened := open_run(Path(target))), opened)
    requests = requests or MOST_PROMPTS
    need("tokenizers")
    from sojourn.loadgen.scenario.scenario import bundled_scenarios, load_scenario

    if target in bundled_scenarios() or Path(target).suffix in (".yaml", ".yml"):
        return _lint_scenario(load_scenario(target), target, model, requests, seed, block_size)
    _refuse("is no scenario, whose prompts are drawn", target, seed=seed)
    return _lint_trace(target, model, requests, block_size)


def _refuse(why: str, target: str, **given: Any) -> None:
    """Raises InputError for the options that say nothing of such a target."""
    names = [f"--{name.replace('_', '-')}" for name, value in given.items() if value is not None]
    if names:
        raise InputError(f"{target} {why}; leave {' and '.join(names)} out")


def _with_template(report: "LintReport", run: "RunDirectory") -> "LintReport":
    """With what is wrong with the template of the model that it ran, where the load was of chats and it stands here."""
    from sojourn.diagnosis.run_lint import by_cost
    from sojourn.metrics.run.directory import engine_settings, section

    meta = run.meta()
    model = engine_settings(meta).get("model")
    if section(section(meta, "scenario"), "target").get("api") != "chat" or not isinstance(model, str):
        return report
    notes = list(report.notes)
    _, found = _template(model, notes)
    return msgspec.structs.replace(report, findings=by_cost([*found, *report.findings]), notes=notes)


def _lint_scenario(
    scenario: "Scenario", target: str, model: str | None, requests: int, seed: int | None, block_size: int | None
) -> "LintReport":
    from sojourn.loadgen.prompts.build import load_tokenizer
    from sojourn.loadgen.prompts.written import prompts_of_scenario
    from sojourn.loadgen.target.server_tokenizer import SERVER

    named = scenario.target.tokenizer
    model = model or (None if named == SERVER else named) or str(scenario.engine.get("model") or BUNDLED)
    seed = scenario.measure.seed if seed is None else seed
    written = prompts_of_scenario(scenario, seed, load_tokenizer(model), requests)
    notes = []
    if any(klass.session is not None for klass in scenario.workload.classes):
        notes.append("answers are unknown before a run: of a conversation, the messages that are sent are compared")
    if all(klass.content != "recorded" for klass in scenario.workload.classes):
        notes.append("the text is Sojourn's own: only its lengths and shared parts are the scenario's")
    size = block_size or int(scenario.engine.get("block_size", BLOCK_SIZE))
    return _lint_written(written, target, model, size, notes)


def _lint_trace(target: str, model: str | None, requests: int, block_size: int | None) -> "LintReport":
    from sojourn.loadgen.prompts.written import prompts_of_trace
    from sojourn.loadgen.traces.block_lint import lint_blocks, lint_lengths
    from sojourn.loadgen.traces.reader import find_trace, read_trace

    trace = read_trace(find_trace(target))
    if trace.form.block_tokens:
        _refuse("has blocks of its own and no text", target, model=model, block_size=block_size)
        return lint_blocks(target, trace.rows[:requests], trace.block_tokens)
    block_size = block_size or BLOCK_SIZE
    written = list(prompts_of_trace(trace.rows, requests))
    if not written:
        _refuse("has lengths and no text", target, model=model)
        return lint_lengths(target, trace.form.name, trace.rows[:requests], block_size)
    notes = [] if model else [f"tokens are those of {BUNDLED}: name the tokenizer of your model with --model"]
    return _lint_written(written, target, model or BUNDLED, block_size, notes)


def _lint_written(
    written: "list[WrittenPrompt]", target: str, model: str, block_size: int, notes: list[str]
) -> "LintReport":
    from sojourn.diagnosis.run_lint import by_cost
    from sojourn.loadgen.prompts.build import load_tokenizer
    from sojourn.metrics.memory.prompt_lint.lint import LintedPrompt, LintReport, lint_prompts

    tokenizer = load_tokenizer(model)
    has_chats = any(not isinstance(prompt.content, str) for prompt in written)
    template, findings = _template(model, notes) if has_chats else (None, [])
    texts = [_text(prompt.content, template) for prompt in written]
    encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
    prompts = [LintedPrompt(prompt.klass, text, encoding.ids)
               for prompt, text, encoding in zip(written, texts, encoded, strict=True)]  # fmt: skip
    classes, found = lint_prompts(
        prompts, block_size, lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)
    )
    return LintReport(
        target=target, block_size=block_size, classes=classes, findings=by_cost([*findings, *found]), notes=notes
    )


def _template(model: str, notes: list[str]) -> "tuple[ChatTemplate | None, list[Finding]]":
    """The template of the model and what is wrong with it; None, and a note, where there is none to read."""
    need("jinja2")
    from sojourn.engine.config import model_folder
    from sojourn.engine.token.text.template import ChatTemplate
    from sojourn.engine.token.text.template_lint import lint_template

    folder = model_folder(model)
    template = ChatTemplate(folder) if folder.is_dir() else None
    if template is None or not template.exists:
        notes.append(f"{model} has no chat template here: messages are compared without one")
        return None, []
    return template, lint_template(folder)


def _text(content: str | list[dict[str, Any]], template: "ChatTemplate | None") -> str:
    if isinstance(content, str):
        return content
    if template is not None:
        return template.render(content)
    return "\n".join(f"{message.get('role', '')}: {message.get('content') or ''}" for message in content)


def _print(report: "LintReport") -> None:
    shares = table("class", "requests", "tokens", "in common", "shared", "in blocks", "movable", text=["class"])
    texts = table("class", "text", "tokens", "characters per token", text=["class", "text"])
    for each in report.classes:
        common = "–" if each.common_prefix_tokens is None else f"{each.common_prefix_tokens:,}"
        measured = (_share(each.shared_share), _share(each.infinite_share), _share(each.movable_share))
        shares.add_row(each.klass or "–", f"{each.requests:,}", f"{each.prompt_tokens:,}", common, *measured)
        for text in each.texts:
            texts.add_row(each.klass or "–", text.kind, f"{text.tokens:,}", f"{text.characters_per_token:.2f}")
    out.print(shares)
    if texts.row_count:
        out.print(texts)
    for finding in report.findings:
        cost = "" if finding.tokens is None else f" [{finding.tokens:,} tokens, {_share(finding.share)}]"
        cost += "" if finding.prefill_ms is None else f" [{finding.prefill_ms:,.0f} ms of prefill]"
        out.print(f"\n{finding.severity} {finding.key}", style=STYLES[finding.severity], end="", markup=False)
        out.print(f" {finding.subject}: {finding.says}{cost}\n  fix: {finding.fix}", markup=False, soft_wrap=True)
    if not report.findings and any(each.infinite_share is not None for each in report.classes):
        out.print("nothing found")
    for note in report.notes:
        out.print(f"note: {note}", style="dim", markup=False, soft_wrap=True)


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"
