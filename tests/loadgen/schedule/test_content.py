"""What is shared in a trace is shared in the prompts, token by token; what a class says of sampling is sent."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sojourn.loadgen.errors import ScenarioError
from sojourn.loadgen.prompts.bodies import build_wire_requests
from sojourn.loadgen.prompts.build import CORPUS, load_tokenizer
from sojourn.loadgen.prompts.exact_words import WordSource
from sojourn.loadgen.scenario.scenario import Scenario
from sojourn.loadgen.schedule.build import build_schedule
from sojourn.loadgen.schedule.ideal_prefix_hits import ideal_hit_rate, ideal_hits
from sojourn.loadgen.schedule.request import read_schedule, save_schedule
from sojourn.loadgen.target.endpoint import parse_base_url
from sojourn.loadgen.traces.reader import TRACE_FOLDER, read_trace
from tests.loadgen.scenarios import CHAT, scenario
from tests.loadgen.trace_files import write

ENDPOINT = parse_base_url("http://127.0.0.1:1")
MOONCAKE = {"process": "trace", "file": "mooncake_conversation_trace.jsonl", "duration_s": 30}
TRACED = {"distribution": "trace", "min_tokens": 1, "max_tokens": 4000}
BLOCKS = CHAT | {"content": "blocks", "block_tokens": 16, "prompt_tokens": TRACED}
SESSION = {"turns": 2, "think_time_s": 1, "turn_tokens": 5}
PROSE = CORPUS.read_text(encoding="utf-8").split() if CORPUS.exists() else []
TOKENIZER = load_tokenizer("tiny-model")
WORDS = WordSource(7, TOKENIZER, PROSE)

AGAIN = WordSource(7, TOKENIZER, PROSE)

ids = st.lists(st.integers(0, 2**63 - 1) | st.integers(0, 3), min_size=1, max_size=6)


def tokens(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def ideal_of(chosen: Scenario, schedule: list) -> dict | None:
    """Of a schedule that is sent in its order, all of it measured, to a cache with blocks of 16."""
    return ideal_hit_rate(chosen.workload, schedule, range(len(schedule)), 16)


def common(one: list, other: list) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (left, right) in pairs if left != right), min(len(one), len(other)))


def bodies(chosen: Scenario, tokenizer: str | None = "tiny-model") -> list[dict]:
    schedule = build_schedule(chosen, 3, "x")
    wire = build_wire_requests(chosen, 3, schedule, ENDPOINT, "m", tokenizer)
    return [json.loads(request.split(b"\r\n\r\n", 1)[1]) for request in wire.values()]


@settings(max_examples=80)
@given(ids, ids, st.sampled_from([8, 16, 40]), st.integers(0, 39), st.integers(0, 39))
def test_two_prompts_share_exactly_the_token_blocks_that_their_hash_ids_share(one, other, block, short, shorter):
    """And less than half a block beyond them, by the chance that two blocks begin with the same words."""
    texts, lengths = [], []
    for request, (blocks, missing) in enumerate(((one, short), (other, shorter))):
        lengths.append(len(blocks) * block - missing % block)
        texts.append(tokens(WORDS.blocks(tuple(blocks), block, lengths[-1], request)))
    assert [len(text) for text in texts] == lengths
    same = common(one, other)
    shared, inside = common(*texts), min(same * block, *lengths)
    assert inside <= shared <= (inside if inside < same * block else inside + block // 2)


@settings(max_examples=50)
@given(st.integers(0, 2**63 - 1), st.integers(1, 64))
def test_part_of_a_block_is_the_beginning_of_it_and_another_source_has_the_same(block, size):
    whole = tokens(WORDS.blocks((block,), 64, 64, 0))
    assert tokens(AGAIN.blocks((block,), 64, size, 9)) == whole[:size]


def test_words_of_a_seed_are_the_same_on_every_machine():
    assert WORDS.blocks((46,), 8, 8, 0) == "valid sing In arg all Ex ext only"


@settings(max_examples=100)
@given(st.lists(st.tuples(ids, st.integers(1, 15)), min_size=1, max_size=12), st.sampled_from([1, 4, 16]))
def test_ideal_hits_are_those_of_a_cache_that_keeps_every_block_of_every_prompt(prompts, cache_block):
    """Oracle: tokens are spelled out as (id, place), and a set remembers every chain of whole cache blocks."""
    kept: set[tuple] = set()
    brute, asked = [], []
    for blocks, last in prompts:
        sizes = [16] * (len(blocks) - 1) + [last]
        spelled = [(block, place) for block, size in zip(blocks, sizes, strict=True) for place in range(size)]
        chains = [tuple(spelled[:end]) for end in range(cache_block, len(spelled) + 1, cache_block)]
        found = 0
        while found < len(chains) and chains[found] in kept and len(chains[found]) < len(spelled):
            found += 1
        brute.append(found * cache_block)
        kept |= set(chains)
        asked.append((list(zip(blocks, sizes, strict=True)), len(spelled)))
    assert list(ideal_hits(asked, cache_block)) == brute


def test_mooncake_conversation_shares_what_its_authors_count():
    """36.6 % of the blocks of the whole trace: the figure of every tool that counts them without a cache's limits."""
    rows = read_trace(TRACE_FOLDER / "mooncake_conversation_trace.jsonl").rows
    seen: set[int] = set()
    known = total = 0
    for row in rows:
        known += sum(block in seen for block in row.hash_ids)
        total += len(row.hash_ids)
        seen.update(row.hash_ids)
    assert known / total == pytest.approx(0.366, abs=0.0005)
    prompts = [([(block, 512) for block in row.hash_ids], len(row.hash_ids) * 512 + 1) for row in rows]
    hits = sum(ideal_hits(prompts, 512))
    assert hits / (512 * total) == pytest.approx(0.366, abs=0.005)


def test_replayed_slice_has_the_blocks_of_the_trace_scaled_and_says_its_ideal(tmp_path):
    chosen = scenario(MOONCAKE, [BLOCKS])
    schedule = build_schedule(chosen, 1, "x")
    rows = [row for row in read_trace(TRACE_FOLDER / MOONCAKE["file"]).rows if row.offset_s < 30]
    assert [request.block_ids for request in schedule] == [row.hash_ids for row in rows]
    assert all(r.prompt_tokens == -(-row.prompt_tokens // 32) for r, row in zip(schedule, rows, strict=True))
    save_schedule(tmp_path, schedule, chosen)
    assert read_schedule(tmp_path)[0] == schedule
    ideal = ideal_of(chosen, schedule)
    sent = [tokens(body["prompt"]) for body in bodies(chosen)]
    assert [len(each) for each in sent] == [request.prompt_tokens for request in schedule]
    kept: set[tuple] = set()
    hits = 0
    for each in sent:
        chains = [tuple(each[:end]) for end in range(16, len(each), 16)]
        hits += 16 * next((place for place, chain in enumerate(chains) if chain not in kept), len(chains))
        kept |= {tuple(each[:end]) for end in range(16, len(each) + 1, 16)}
    assert ideal["ideal_hit_tokens"] == hits > 0
    assert ideal["ideal_hit_rate"] == hits / sum(map(len, sent))


def test_turns_of_a_conversation_share_all_that_was_said_and_answered_before():
    """By hand: 40 said, 8 answered, 24 said, 8 answered, 24 said; whole blocks of 16 of what stood before."""
    session = {"turns": 3, "think_time_s": 0.1, "turn_tokens": 24}
    chosen = scenario({"process": "at_once", "count": 2},
                      [CHAT | {"prompt_tokens": 40, "output_tokens": 8, "session": session}])  # fmt: skip
    ideal = ideal_of(chosen, build_schedule(chosen, 1, "x"))
    assert ideal["prompt_tokens"] == 2 * (40 + 72 + 104)
    assert ideal["ideal_hit_tokens"] == 2 * (0 + 48 + 80)


def test_prompt_longer_than_asked_for_loses_its_last_blocks_and_keeps_what_it_shares():
    short = {"prompt_tokens": TRACED | {"max_tokens": 40}}
    schedule = build_schedule(scenario(MOONCAKE, [BLOCKS | short]), 1, "x")
    assert max(request.prompt_tokens for request in schedule) == 40
    assert {len(request.block_ids) for request in schedule if request.prompt_tokens == 40} == {3}


def test_without_a_tokenizer_blocks_are_shared_word_by_word():
    prompts = [body["prompt"].split() for body in bodies(scenario(MOONCAKE, [BLOCKS]), tokenizer=None)]
    assert {prompt[0] for prompt in prompts} == {prompts[0][0]}  # block 0 begins every conversation
    assert common(prompts[0], prompts[1]) == 13  # 16 tokens at 1.3 a word


def test_tree_is_walked_from_its_root_and_siblings_share_their_parents():
    tree = {"depth": 3, "branching": 2, "node_tokens": 32}
    chosen = scenario({"process": "at_once", "count": 40}, [CHAT | {"prompt_tokens": 120, "prefix_tree": tree}])
    schedule = build_schedule(chosen, 0, "x")
    sent = [tokens(body["prompt"]) for body in bodies(chosen)]
    leaves = [request.shared_prefix for request in build_schedule(chosen, 3, "x")]
    assert set(leaves) == set(range(8)) and all(request.shared_prefix_tokens == 96 for request in schedule)
    for one in range(10):
        for other in range(one):
            levels = 3 - (leaves[one] ^ leaves[other]).bit_length()
            assert 32 * levels <= common(sent[one], sent[other]) <= 32 * levels + 4
    assert ideal_of(chosen, schedule)["ideal_hit_rate"] > 0.6


@pytest.mark.parametrize("shared", [{}, {"shared_prefix_tokens": 32, "num_shared_prefixes": 2}])
def test_random_words_have_exactly_the_wanted_tokens_and_share_only_prefixes(shared):
    sized = {"prompt_tokens": {"distribution": "uniform", "min_tokens": 40, "max_tokens": 400}, "content": "random"}
    chosen = scenario({"process": "at_once", "count": 30}, [CHAT | sized | shared])
    schedule, sent = build_schedule(chosen, 3, "x"), [tokens(body["prompt"]) for body in bodies(chosen)]
    assert [len(each) for each in sent] == [request.prompt_tokens for request in schedule]
    for one, other in zip(range(29), range(1, 30), strict=True):
        expected = 32 if shared and schedule[one].shared_prefix == schedule[other].shared_prefix else 0
        assert expected <= common(sent[one], sent[other]) <= expected + 6


def test_recorded_text_and_messages_are_sent_as_they_are(tmp_path):
    file, recorded = str(write(tmp_path, "plain.jsonl")), {"content": "recorded", "prompt_tokens": TRACED}
    classes = [CHAT | recorded, CHAT | {"klass": "a", "weight": 1e-9}]  # only for the row that names it
    arrivals = {"process": "trace", "file": file, "duration_s": 10}
    sent = bodies(scenario(arrivals, classes, target={"api": "chat"}))
    first = {"role": "user", "content": "one two three"}
    assert [first] in [body["messages"] for body in sent]
    assert [{"role": "user", "content": "hello there"}] in [body["messages"] for body in sent]
    with pytest.raises(ScenarioError, match=r"sends recorded messages, but target\.api is completions"):
        bodies(scenario({"process": "at_once", "count": 9}, [CHAT | recorded | {"from_file": messages_only(tmp_path)}]))


def messages_only(folder) -> str:
    path = folder / "messages.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "hello"}]}\n')
    return str(path)


def test_rows_of_a_file_are_dealt_shuffled_and_in_equal_numbers(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f'{{"prompt_tokens": {size}, "output_tokens": {size}}}\n' for size in range(1, 21)))
    dealt = CHAT | {"from_file": str(file), "prompt_tokens": TRACED, "output_tokens": TRACED}
    schedule = build_schedule(scenario({"process": "at_once", "count": 40}, [dealt]), 0, "x")
    sizes = [request.prompt_tokens for request in schedule]
    assert sorted(sizes[:20]) == sorted(sizes[20:]) == list(range(1, 21)) and sizes[:20] != list(range(1, 21))
    assert sizes == [request.max_tokens for request in schedule]


def test_class_that_a_row_names_is_its_class(tmp_path):
    file = tmp_path / "classes.jsonl"
    file.write_text('{"at_s": 0, "prompt_tokens": 5, "klass": "b"}\n{"at_s": 1, "prompt_tokens": 5, "klass": "a"}\n')
    arrivals = {"process": "trace", "file": str(file), "duration_s": 9}
    classes = [CHAT | {"klass": name} for name in "ab"]
    assert [request.klass for request in build_schedule(scenario(arrivals, classes), 0, "x")] == ["b", "a"]
    with pytest.raises(ScenarioError, match=r"names class 'b', which is none of the workload's \(a\)"):
        build_schedule(scenario(arrivals, classes[:1]), 0, "x")


def test_sampling_and_the_answers_form_are_sent_and_variants_come_by_weight():
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    said = {"min_p": 0.1, "presence_penalty": 0.5, "repetition_penalty": 1.1, "n": 2, "extra_body": {"user": "me"}}
    variants = [{"weight": 3, "regex": "[0-9]+", "temperature": 0.7, "extra_body": {"a": 1}}, {"top_k": 5}]
    chosen = scenario({"process": "at_once", "count": 400},
                      [CHAT | said | {"response_format": schema, "variants": variants}])  # fmt: skip
    sent = bodies(chosen, None)
    with_regex = [body for body in sent if "structured_outputs" in body]
    assert len(with_regex) / 400 == pytest.approx(0.75, abs=0.11)
    for body in sent:
        assert {**body, "n": 2, "min_p": 0.1, "presence_penalty": 0.5, "repetition_penalty": 1.1, "user": "me"} == body
        assert ("response_format" in body) is (body not in with_regex) is ("top_k" in body)
    assert all(body["temperature"] == 0.7 and body["a"] == 1 and "seed" not in body for body in with_regex)
    plain = scenario({"process": "at_once", "count": 400}, [CHAT])
    lengths = [
        (request.prompt_tokens, request.klass, request.due_offset_ns) for request in build_schedule(plain, 3, "x")
    ]
    assert lengths == [(r.prompt_tokens, r.klass, r.due_offset_ns) for r in build_schedule(chosen, 3, "x")]


@pytest.mark.parametrize(
    ("klass", "sentence"),
    [
        ({"block_tokens": 16}, "has block_tokens, but content is prose"),
        ({"content": "blocks"}, r"set prompt_tokens to \{distribution: trace"),
        (BLOCKS | {"prompt_tokens": TRACED | {"scale": 0.5}}, "without scale; block_tokens scales them"),
        (BLOCKS | {"block_tokens": 0}, "greater than or equal to 1"),
        (BLOCKS | {"prompt_tokens": TRACED | {"min_tokens": 9}, "shared_prefix_tokens": 5}, "leave the prefixes out"),
        ({"prefix_tree": {"depth": 2, "branching": 2, "node_tokens": 4}}, "is 8 deep and must be below the shortest"),
        ({"prefix_tree": {"depth": 64, "branching": 3, "node_tokens": 1}}, r"has 3\^64 paths"),
        ({"shared_prefix_tokens": 1, "prefix_tree": {"depth": 1, "branching": 2, "node_tokens": 1}}, "keep one of"),
        ({"response_format": {"type": "xml"}}, "its type must be one of text, json_object, json_schema"),
        ({"response_format": {"type": "text"}, "regex": "a"}, "keep one of the two"),
        ({"extra_body": {"max_tokens": 3}}, r"has extra_body\.max_tokens, which another key"),
        ({"variants": [{"extra_body": {"stream": True}}]}, r"has extra_body\.stream"),
        ({"variants": []}, "at least 1"),
        (BLOCKS | {"session": SESSION}, "has content blocks and a session"),
    ],
)
def test_contradictions_of_a_class_are_refused(klass, sentence):
    with pytest.raises(ValueError, match=sentence):
        scenario(MOONCAKE, [CHAT | klass])


def test_rows_from_nowhere_and_blocks_without_ids_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"class chat has no from_file; set arrivals\.process to trace"):
        scenario({"process": "at_once", "count": 1}, [BLOCKS])
    azure = {"process": "trace", "file": "AzureLLMInferenceTrace_conv.csv", "duration_s": 30}
    with pytest.raises(ScenarioError, match="content blocks, but its trace has no hash_ids"):
        build_schedule(scenario(azure, [BLOCKS]), 0, "x")
    with pytest.raises(ScenarioError, match="without times, so it is no arrivals"):
        build_schedule(scenario(MOONCAKE | {"file": str(write(tmp_path, "sharegpt.json"))}), 0, "x")
    with pytest.raises(ScenarioError, match="has no prompt of 1 to 4000 tokens with a text"):
        recorded = {"from_file": "AzureLLMInferenceTrace_conv.csv", "content": "recorded", "prompt_tokens": TRACED}
        build_schedule(scenario(classes=[CHAT | recorded]), 0, "x")
