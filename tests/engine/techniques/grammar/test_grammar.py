"""An output with a grammar is always in it, and ends where it ends; whatever it costs, other requests do not pay."""

import json
import random
import re
import string
import time

import pytest
import torch

from sojourn.engine.config import EngineConfig
from sojourn.engine.core import build
from sojourn.engine.messages import Abort
from sojourn.engine.sampling import Grammar
from sojourn.engine.server.openai.structured_output import choice
from sojourn.engine.techniques.grammar.grammar import _SOURCES, REMEMBERED, GrammarCompiler, GrammarError, Guide
from sojourn.engine.token.text.tokenizer import Tokenizer
from sojourn.metrics.ledger import closes
from tests.engine.harness import drain, hand_over, make_engine, submit
from tests.engine.published import Published
from tests.further import further

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "ä 日"]}, "minItems": 1, "maxItems": 3},
        "next": {"anyOf": [{"type": "null"}, {"type": "boolean"}]},
    },
    "required": ["name", "age", "tags", "next"],
    "additionalProperties": False,
}


def is_person(text: str) -> bool:
    value = json.loads(text)
    return (
        list(value) == ["name", "age", "tags", "next"]
        and isinstance(value["name"], str) and len(value["name"]) <= 12
        and type(value["age"]) is int and 0 <= value["age"] <= 150
        and 1 <= len(value["tags"]) <= 3 and set(value["tags"]) <= {"a", "b", "ä 日"}
        and value["next"] in (None, True, False)
    )  # fmt: skip


OPTIONS = ["yes", "no", 'a "quoted" one', "new\nline", "ж\u2028"]
SUM = """
start: sum
sum: NUMBER (" + " NUMBER){1,3}
NUMBER: /[1-9][0-9]{0,2}/
"""
# What it is called → grammar, and an independent judge of its texts.
GRAMMARS = {
    "json_schema": (Grammar("json_schema", json.dumps(PERSON)), is_person),
    "json_object": (Grammar("json_schema", '{"type": "object"}'), lambda text: isinstance(json.loads(text), dict)),
    "regex": (Grammar("regex", "[a-f]{2,6}-[0-9]{3}(x|yy)?"), re.compile("[a-f]{2,6}-[0-9]{3}(x|yy)?").fullmatch),
    "lark": (Grammar("lark", SUM), re.compile(r"[1-9][0-9]{0,2}( \+ [1-9][0-9]{0,2}){1,3}").fullmatch),
    "choice": (choice(OPTIONS), OPTIONS.__contains__),
}


@pytest.fixture(scope="module")
def engine():
    """One engine over the bundled model, for all tests that leave nothing behind."""
    published = Published()
    config = EngineConfig(model="tiny-model", threads=1, dtype="float32", num_kv_blocks=512, max_model_len=512)
    made, _ = build(config, 0, published.take)
    return made, published


@pytest.fixture(scope="module")
def text_of(engine):
    """ids → the text that a client reads."""
    from tokenizers import Tokenizer

    from sojourn.engine.config import model_folder

    tokenizer = Tokenizer.from_file(str(model_folder("tiny-model") / "tokenizer.json"))
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=True)


def run(engine, *requests):
    made, published = engine
    hand_over(made, list(requests))
    drain(made, check=True)
    assert (
        made.runner.sampler.history.used == 0 and not made.runner.part("grammar").guides._live and not made.is_preparing
    )
    return published


def ask(name: str, max_tokens: int = 100, **sampling):
    defaults = {"temperature": 2.0, "ignore_eos": False, "stop_token_ids": [2]}
    return submit(name, [5, 6, 7, 8], max_tokens, **(defaults | sampling))


@pytest.mark.parametrize("kind", ["json_schema", "regex", *further("json_object", "lark", "choice")])
@pytest.mark.parametrize("temperature", [2.0, *further(0.0)])
def test_every_output_is_in_its_grammar_or_was_cut_by_length(kind, temperature, engine, text_of):
    grammar, judge = GRAMMARS[kind]
    names = [f"{kind}-{temperature}-{seed}" for seed in range(6 if temperature else 1)]
    asks = [ask(name, 220, temperature=temperature, seed=seed, grammar=grammar) for seed, name in enumerate(names)]
    published = run(engine, *asks)
    reasons = [published.ended[name].reason for name in names]
    for name, reason in zip(names, reasons, strict=True):
        if reason == "stop":
            assert judge(text_of(published.tokens[name])), text_of(published.tokens[name])
        else:
            assert reason == "length" and len(published.tokens[name]) == 220
    assert kind == "json_object" or not temperature or "stop" in reasons


def test_a_model_that_says_random_things_is_held_to_the_grammar(engine, text_of, monkeypatch):
    """Random logits, among which the forbidden tokens are the best."""
    made, _ = engine
    generator = torch.Generator().manual_seed(1)
    monkeypatch.setattr(
        made.runner.eager.model,
        "logits",
        lambda hidden, dtype=None: torch.randn(len(hidden), 2560, generator=generator) * 5,
    )
    for kind, (grammar, judge) in GRAMMARS.items():
        names = [f"random-{kind}-{seed}" for seed in range(5)]
        published = run(engine, *[ask(name, 100, seed=i, grammar=grammar) for i, name in enumerate(names)])
        for name in names:
            text, reason = text_of(published.tokens[name]), published.ended[name].reason
            assert reason == "length" or (reason == "stop" and judge(text)), text


def test_the_end_is_only_drawn_where_the_grammar_may_end(engine, text_of):
    """The end token is made the most probable by far: it comes at the first place where it may."""
    grammar = Grammar("regex", "[ab]{4,9}")
    published = run(engine, ask("eager", grammar=grammar, logit_bias={2: 100.0}))
    assert len(text_of(published.tokens["eager"])) == 4 and published.tokens["eager"][-1] == 2
    published = run(engine, ask("late", grammar=grammar, logit_bias={2: 100.0}, min_tokens=99))
    assert len(text_of(published.tokens["late"])) == 9, "the grammar ends it, though min_tokens would not"
    published = run(engine, ask("other", grammar=grammar, logit_bias={0: 100.0}))
    assert 0 not in published.tokens["other"], "an end token of the library, but not of the request"
    assert published.ended["late"].reason == published.ended["eager"].reason == "stop"


@pytest.mark.parametrize("kind", ["regex", *further("json_schema", "lark")])
def test_what_stands_before_a_grammar_follows_its_head(kind, engine, text_of):
    grammar, judge = GRAMMARS[kind]
    behind = Grammar(grammar.kind, grammar.source, 'head: /[xy]{2,4}/ "</think>"')
    published = run(engine, ask(f"head-{kind}", 200, grammar=behind))
    head, _, answer = text_of(published.tokens[f"head-{kind}"]).partition("</think>")
    assert re.fullmatch("[xy]{2,4}", head)
    assert published.ended[f"head-{kind}"].reason == "length" or judge(answer)


def test_a_grammar_that_is_complete_ends_the_output_without_an_end_token(engine, text_of):
    published = run(engine, ask("fixed", grammar=choice(["exactly this"]), logprobs=1))
    assert text_of(published.tokens["fixed"]) == "exactly this" and 2 not in published.tokens["fixed"]
    assert published.ended["fixed"].reason == "stop"
    assert len(published.logprobs["fixed"]) == len(published.tokens["fixed"])
    published = run(engine, ask("cut", len(published.tokens["fixed"]), grammar=choice(["exactly this"])))
    assert published.ended["cut"].reason == "stop", "complete with its last allowed token"
    published = run(engine, ask("empty", grammar=Grammar("regex", ""), stop_token_ids=[]))
    assert published.ended["empty"].reason == "stop" and "empty" not in published.tokens


def test_neighbours_draw_the_same_with_and_without_grammars_around_them(engine):
    free = [ask(f"free{i}", 12, seed=i) for i in range(3)]
    alone = run(engine, *free).tokens
    alone = [alone[f"free{i}"] for i in range(3)]
    mixed = []
    for i, (grammar, _) in enumerate(GRAMMARS.values()):
        mixed.append(ask(f"bound{i}", 30, seed=i, grammar=grammar, repetition_penalty=1.1))
    among = [ask(f"among{i}", 12, seed=i) for i in range(3)]
    published = run(engine, *mixed, *among)
    assert [published.tokens[f"among{i}"] for i in range(3)] == alone
    again = run(engine, ask("again", 30, seed=0, grammar=GRAMMARS["json_schema"][0], repetition_penalty=1.1))
    assert again.tokens["again"] == published.tokens["bound0"]


def test_preemption_changes_no_output_of_a_grammar():
    grammar = Grammar("json_schema", json.dumps({"type": "array", "items": {"type": "integer"}, "minItems": 40}))
    requests = [ask(f"r{i}", 60, seed=i, grammar=grammar) for i in range(4)]
    calm, squeezed = Published(), Published()
    for published, blocks in ((calm, 256), (squeezed, 12)):
        made, _ = make_engine("tiny-model", num_kv_blocks=blocks, max_model_len=128)
        made.publish = published.take
        hand_over(made, requests)
        drain(made, check=True)
    assert sum(ended.preemptions for ended in squeezed.ended.values()) > 0
    assert squeezed.tokens == calm.tokens


def test_a_grammar_that_leaves_the_other_masks_nothing_ends_with_an_error(engine):
    published = run(engine, ask("torn", grammar=choice(["yes"]), allowed_token_ids=[900]))
    assert published.ended["torn"].reason == "error" and "leave no token" in published.ended["torn"].error


@pytest.mark.parametrize(
    ("grammar", "sentence"),
    [
        (Grammar("json_schema", '{"type": "strin"}'), "Invalid type: strin"),
        (Grammar("json_schema", "nonsense"), "expected"),
        (Grammar("json_schema", '{"not": {}}'), 'Unimplemented keys: ["not"]'),
        (Grammar("json_schema", '{"type": "string", "pattern": "(?!a)b"}'), "invalid regex (?!a)b: look-around"),
        (Grammar("regex", "(abc"), "invalid regex (abc: unclosed group"),
        (Grammar("lark", 'start: "a" ob\nob: %json {"not": {}}'), 'Unimplemented keys: ["not"]'),
        (Grammar("regex", "(" + "\n" * 60_000), "invalid regex"),
        (Grammar("lark", 'start: "a"\n  | nowhere'), 'line 1, column 8: unknown name: "nowhere"'),
        (Grammar("json_schema", '{"$ref": "#"}'), "could not be followed"),
    ],
)
def test_a_bad_grammar_ends_its_request_with_a_sentence_and_no_other(grammar, sentence, engine):
    published = run(engine, ask(f"bad {grammar}", grammar=grammar), ask(f"good {grammar}", 5, seed=1))
    assert published.ended[f"bad {grammar}"].reason == "error"
    error = published.ended[f"bad {grammar}"].error
    assert sentence in error and "(8)" not in error and "failed to compile" not in error
    assert len(published.tokens[f"good {grammar}"]) == 5


# Short grammars that llguidance would spell out for minutes, at a place that no check of the beginning sees.
GIGANTIC = {
    "repetition": Grammar("regex", "ab{3000000}"),
    "doubling": Grammar(
        "lark", 'start: "a" T0\n' + "\n".join(f"T{i}: T{i + 1} T{i + 1}" for i in range(24)) + '\nT24: "b"'
    ),
    "endless": Grammar("lark", 'start: "a" more\nmore: "b" more'),
    "its own options": Grammar("lark", '%llguidance {"no_forcing": false}\nstart: "a" /b{3000000}/'),
}


@pytest.mark.parametrize("name", GIGANTIC)
def test_a_grammar_that_forces_gigabytes_costs_no_more_than_another(name, engine, text_of):
    published = run(engine, ask(name, 12, grammar=GIGANTIC[name]), ask("cheap", grammar=choice(["fine"])))
    assert published.ended[name].reason == "length" and re.fullmatch("ab+", text_of(published.tokens[name]))
    assert published.ended["cheap"].reason == "stop"


def test_a_mask_that_takes_too_long_ends_its_request_and_no_other(engine, monkeypatch):
    fill, costly = Guide.fill, "a very long text, which is nothing to wait for"

    def slow_fill(guide, mask, stop_token_ids):
        while guide in slow and guide.error is None:  # burns CPU time, as llguidance does, until it is given up
            sum(range(1000))
        fill(guide, mask, stop_token_ids)

    made, _ = engine
    slow, begin = set(), made.runner.part("grammar").guides._prepare

    def prepare(request, preparation):
        begin(request, preparation)
        if request.id == "costly":
            slow.add(preparation.guide)

    monkeypatch.setattr(Guide, "fill", slow_fill)
    monkeypatch.setattr(made.runner.part("grammar").guides, "_prepare", prepare)
    published = run(
        engine, ask("costly", grammar=choice([costly])), ask("cheap", grammar=choice(["fine"])), ask("free", 5)
    )
    assert published.ended["costly"].reason == "error" and "simpler" in published.ended["costly"].error
    assert published.ended["cheap"].reason == "stop" and len(published.tokens["free"]) == 5


def test_masks_that_are_each_a_little_slow_end_their_request_too(engine, monkeypatch):
    """Else one request could make every step of all others a quarter of a second."""
    fill = Guide.fill

    def slow_fill(guide, mask, stop_token_ids):
        begin = time.thread_time()
        while time.thread_time() - begin < 0.06:
            pass
        fill(guide, mask, stop_token_ids)

    monkeypatch.setattr(Guide, "fill", slow_fill)
    published = run(engine, ask("costly", 60, grammar=Grammar("regex", "[a-z]{50}")))
    assert published.ended["costly"].reason == "error" and "simpler" in published.ended["costly"].error
    assert 0 < len(published.tokens["costly"]) < 10


def test_ignore_eos_contradicts_a_grammar(engine):
    published = run(engine, ask("both", grammar=choice(["yes"]), ignore_eos=True))
    assert "ignore_eos" in published.ended["both"].error


def test_a_request_can_be_aborted_while_its_grammar_is_compiled(engine):
    made, published = engine
    hand_over(made, [ask("gone", grammar=choice(["yes"])), Abort("gone")])
    drain(made)
    assert published.ended["gone"].reason == "abort" and "gone" not in published.tokens


def test_a_checkpoint_without_a_tokenizer_refuses_grammars_only(checkpoints):
    made, published = make_engine(checkpoints["llama"])
    hand_over(made, [submit("bound", [5], 3, ignore_eos=False, grammar=choice(["yes"])), submit("free", [5], 3)])
    drain(made)
    assert "tokenizer.json" in published.ended["bound"].error and len(published.tokens["free"]) == 3


def test_special_tokens_can_stand_in_a_lark_grammar(engine, text_of):
    from sojourn.engine.config import model_folder

    source = 'start: <|im_start|> "go" %json {"const": 7} <[3]>'
    published = run(engine, ask("special", grammar=Grammar("lark", source)))
    tokens = published.tokens["special"]
    assert tokens[0] == 1 and tokens[-1] == 3 and text_of(tokens) == "go7"
    with pytest.raises(GrammarError):
        GrammarCompiler(model_folder("tiny-model")).compile(Grammar("lark", "start: <|no such token|>"))


def test_choices_are_quoted_whatever_they_hold(engine, text_of):
    dice = random.Random(2)
    options = ["".join(dice.choices(string.printable + 'é\\"/{}$', k=6)) for _ in range(20)]
    for index, option in enumerate(options):
        published = run(engine, ask(f"quoted{index}", grammar=choice([option])))
        assert text_of(published.tokens[f"quoted{index}"]) == option


def test_choices_of_a_call_compile_their_grammar_once_and_follow_it_separately(monkeypatch):
    from sojourn.engine.config import model_folder

    compiled, write = [], _SOURCES["regex"]
    monkeypatch.setitem(_SOURCES, "regex", lambda source: compiled.append(source) or write(source))
    compiler = GrammarCompiler(model_folder("tiny-model"))
    compiled.clear()
    first, second = (compiler.compile(Grammar("regex", "a{2}")) for _ in range(2))
    assert compiled == ["a{2}"]
    a = Tokenizer(model_folder("tiny-model")).encode("a", add_special_tokens=False)[0]
    first.consume(a, [])
    first.consume(a, [])
    assert first.may_end and not second.may_end and first.error is None
    for number in range(REMEMBERED):
        compiler.compile(Grammar("regex", f"b{number}"))
    assert not compiler.compile(Grammar("regex", "a{2}")).may_end and compiled.count("a{2}") == 2


def test_a_grammar_costs_nothing_to_a_batch_without_one(engine):
    made, _ = engine
    seen = []
    prepare = made.runner.prepare
    made.runner.prepare = lambda items: seen.append(batch := prepare(items)) or batch
    try:
        run(engine, ask("plain", 4))
    finally:
        made.runner.prepare = prepare
    assert all(batch.sampling.edits is None and batch.masks is None for batch in seen)


def test_the_ledger_of_a_request_with_a_grammar_closes(engine):
    """The time in which its grammar is compiled is waiting for `grammar`, also beside others that run meanwhile."""
    made, published = engine
    asked = [ask("runs", 40), ask("bound", 40, grammar=GRAMMARS["json_schema"][0])]
    hand_over(made, asked[:1])
    made.receive([], made.step())
    made.receive(asked[1:], time.monotonic_ns())
    drain(made)
    for message in asked:
        committed_ns, ledger = published.ledgers[message.request_id][-1]
        elapsed_ns = committed_ns - message.encoded_ns
        assert closes(elapsed_ns - sum(ledger), elapsed_ns)
    # Absent where it was compiled before the next step was planned
    assert published.ended["bound"].waits.get("grammar", 1) > 0 and "grammar" not in published.ended["runs"].waits
