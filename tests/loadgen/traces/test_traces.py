"""Each form of trace is told by its beginning and read as its authors mean it; a wrong line is refused by number."""

import csv
import json
import tracemalloc
from datetime import datetime

import numpy as np
import pytest

from sojourn.loadgen.errors import ScenarioError
from sojourn.loadgen.schedule.build import build_schedule
from sojourn.loadgen.traces.reader import FORMS, TRACE_FOLDER, find_trace, read_trace
from sojourn.loadgen.traces.row import Window
from sojourn.loadgen.traces.servegen import weibull_shape
from tests.loadgen.scenarios import CHAT, scenario
from tests.loadgen.trace_files import BURST_EIGHT, TEXTS, write, write_servegen


def read_rows(path, **window) -> list[tuple]:
    rows = read_trace(path, window=Window(**window)).rows
    return [(row.offset_s, row.prompt_tokens, row.output_tokens) for row in rows]


@pytest.mark.parametrize(
    ("name", "form", "rows"),
    [
        ("azure2023.csv", "azure", [(0, 374, 44), (4.314579, 396, 109)]),
        ("azure2024.csv", "azure", [(0, 374, 44), (3.99007, 396, 109)]),
        ("burst6.csv", "burstgpt", [(0, 472, 18), (113, 417, 276)]),
        ("burst8.csv", "burstgpt", [(0, 472, 18), (40, 1087, 230)]),
        ("mooncake.jsonl", "mooncake", [(0, 513, 5), (3, 1024, 7)]),
        ("bailian.jsonl", "bailian", [(0, 20, 9), (0.75, 50, 9), (8.5, 64, 9)]),
        ("sharegpt.json", "sharegpt", [(None, 5, 3)]),
        ("plain.jsonl", "plain", [(0, 4, None), (1, 12, 3), (3.5, 3, 2)]),
    ],
)
def test_form_is_told_by_the_first_line_and_its_rows_come_in_order_of_time(tmp_path, name, form, rows):
    found = read_trace(write(tmp_path, name))
    assert found.form.name == form and found.timed is (rows[0][0] is not None)
    assert read_rows(found.path) == [tuple(pytest.approx(value) if value else value for value in row) for row in rows]
    assert read_rows(found.path) == [(row.offset_s, row.prompt_tokens, row.output_tokens)
                                for row in read_trace(found.path, form).rows]  # fmt: skip


def test_what_a_form_tells_beside_times_and_lengths_is_kept(tmp_path):
    sessions = read_trace(write(tmp_path, "bailian.jsonl")).rows
    assert [(row.session_id, row.hash_ids) for row in sessions] == [("1", (7,)), ("1", (7, 8, 9, 10)), ("1", ())]
    assert [row.session_id for row in read_trace(write(tmp_path, "burst8.csv")).rows] == ["s1", "s1"]
    plain = read_trace(write(tmp_path, "plain.jsonl")).rows
    assert [(row.klass, row.session_id) for row in plain] == [("", "s"), ("a", ""), ("", "")]
    assert json.loads(plain[0].content) == "one two three" and json.loads(plain[2].content)[0]["role"] == "user"
    assert json.loads(read_trace(write(tmp_path, "sharegpt.json")).rows[0].content) == "what is a token"


def test_rows_that_stand_for_no_request_are_left_out_and_counted(tmp_path):
    assert read_trace(write(tmp_path, "burst6.csv")).left_out == {"failed: 0 response tokens": 1}
    assert list(read_trace(write(tmp_path, "sharegpt.json")).left_out.values()) == [2]


def test_window_is_counted_from_the_first_request_even_in_an_unordered_file(tmp_path):
    assert read_rows(write(tmp_path, "mooncake.jsonl"), start_s=1) == [(3, 1024, 7)]
    assert read_rows(write(tmp_path, "plain.jsonl"), start_s=1, end_s=2) == [(1, 12, 3)]
    assert read_trace(write(tmp_path, "plain.jsonl"), window=Window(start_s=99)).end_s == 3.5


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nsoon,1,2\n", "a.csv line 2: TIMESTAMP is 'soon'"),
        ("a.csv", TEXTS["azure2024.csv"] + "2024-05-10 00:00:00,1,2\n", "a.csv line 4: TIMESTAMP"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00,x,2\n", "ContextTokens is 'x'"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00,-1,2\n", "is -1; it must be from 0"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n1,2\n", "a.csv line 2: '1,2' is not time,tokens"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n", "a.csv holds no requests"),
        ("b.csv", f"{BURST_EIGHT}\n5,s,1,GPT-4,1\n", "b.csv line 2: it has 5 cells; the header names 8"),
        ("b.csv", f"{BURST_EIGHT}\nx,s,1,GPT-4,1,2,3,log\n", "Timestamp is 'x'"),
        ("b.csv", f"{BURST_EIGHT}\n5,s,1,GPT-4,1,0,3,log\n", "holds no requests (1 failed: 0 response tokens)"),
        ("m.jsonl", TEXTS["mooncake.jsonl"]
         + '{"timestamp": 0, "input_length": 513, "output_length": 5, "hash_ids": [1, 2, 3]}',
         "m.jsonl line 3: hash_ids has 3 entries, but input_length 513 is 2 blocks of 512 tokens"),
        ("m.jsonl", TEXTS["mooncake.jsonl"] + '{"timestamp": 1, "input_length": "x", "output_length": 5}',
         "m.jsonl line 3:"),
        ("m.jsonl", TEXTS["mooncake.jsonl"] + "{half", "m.jsonl line 3: '{half'"),
        ("p.jsonl", '{"prompt": "a", "messages": [{"role": "user", "content": "b"}]}', "it has both prompt and"),
        ("p.jsonl", '{"prompt_tokens": 1}\n{"output_tokens": 5}', "line 2: it has neither prompt_tokens nor prompt"),
        ("p.jsonl", '{"prompt_tokens": 1}\n{"prompt_tokens": 1, "at_s": 2}', "line 2: either every line has at_s"),
        ("p.jsonl", '{"prompt_tokens": 1, "lenght": 2}', "unknown field `lenght`"),
        ("s.json", "[{]", "s.json is not a JSON list of conversations"),
        ("u.txt", "when,in,out\n", "u.txt begins with 'when,in,out', which no known form of trace does; known are:"),
    ],
)  # fmt: skip
def test_wrong_line_is_refused_with_its_file_and_number(tmp_path, name, text, sentence):
    (tmp_path / name).write_text(text)
    with pytest.raises(ScenarioError) as caught:
        read_trace(tmp_path / name)
    assert sentence in str(caught.value)
    if name == "u.txt":
        assert all(f"  {form.name}: " in str(caught.value) for form in FORMS)


def test_named_form_that_the_file_has_not_is_refused(tmp_path):
    with pytest.raises(ScenarioError, match="is a file of the form mooncake, not azure; leave format out"):
        read_trace(write(tmp_path, "mooncake.jsonl"), "azure")
    with pytest.raises(ScenarioError, match=r"bundled are: .*mooncake_conversation_trace\.jsonl"):
        find_trace("absent.csv")


@pytest.mark.parametrize("cv", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("family", ["Gamma", "Weibull"])
def test_servegen_client_sends_at_its_rate_and_variation_with_its_lengths(tmp_path, family, cv):
    found = read_trace(write_servegen(tmp_path / "pool", family, cv), window=Window(0, 600, seed=1))
    gaps = np.diff([row.offset_s for row in found.rows])
    count = 600 * 20
    assert len(found.rows) == pytest.approx(count, abs=5 * cv * count**0.5 + 2)
    # heavy tails make the sample's variation uncertain: some 3 % at cv 2 and 12,000 gaps
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.1)
    assert np.mean([row.prompt_tokens == 200 for row in found.rows]) == pytest.approx(0.75, abs=0.02)
    assert {row.output_tokens for row in found.rows} == {10} and {row.session_id for row in found.rows} == {"chunk-0"}
    assert found.left_out == {"windows of a client without lengths": 1}


def test_servegen_window_is_the_same_whatever_else_is_drawn(tmp_path):
    pool = write_servegen(tmp_path / "pool")
    alone = read_rows(pool, start_s=1200, end_s=1210, seed=3)
    assert len(alone) > 100 and alone == [row for row in read_rows(pool, seed=3) if 1200 <= row[0] < 1210]
    assert alone != read_rows(pool, start_s=1200, end_s=1210, seed=4)
    assert read_rows(pool / "chunk-0-trace.csv", start_s=1200, end_s=1210, seed=3) == alone
    assert read_rows(pool, start_s=601, end_s=1199) == []  # silent
    (pool / "chunk-0-dataset.json").unlink()
    with pytest.raises(ScenarioError, match=r"chunk-0-dataset\.json is missing beside its trace"):
        read_trace(pool, window=Window(end_s=1))


@pytest.mark.parametrize("client", ["", "chunk-0-trace.csv"])
def test_servegen_is_refused_where_no_time_says_how_much_of_it_is_drawn(tmp_path, client):
    file = str(write_servegen(tmp_path / "pool") / client)
    lengths = {"distribution": "empirical", "file": file, "min_tokens": 1, "max_tokens": 400}
    for klass in ({"from_file": file}, {"prompt_tokens": lengths}):
        with pytest.raises(ScenarioError, match=r"form servegen, which has no requests.* name it in arrivals\.file"):
            build_schedule(scenario(classes=[CHAT | klass]), 0, "x")


@pytest.mark.parametrize("shape", [0.5, 1.0, 3.0])
def test_weibull_shape_is_the_one_that_has_the_variation(shape):
    draws = np.random.default_rng(0).weibull(shape, 400_000)
    assert weibull_shape(draws.std() / draws.mean()) == pytest.approx(shape, rel=0.05)


def test_bundled_traces_have_the_rows_that_their_authors_count():
    found = {path.name: read_trace(path) for path in TRACE_FOLDER.iterdir() if path.suffix in (".csv", ".jsonl")}
    assert {name: slice_.num_rows for name, slice_ in found.items()} == {
        "AzureLLMInferenceTrace_conv.csv": 19_366, "AzureLLMInferenceTrace_code.csv": 8_819,
        "mooncake_conversation_trace.jsonl": 12_031,
    }  # fmt: skip
    mooncake = found["mooncake_conversation_trace.jsonl"].rows
    assert all(len(row.hash_ids) == -(-row.prompt_tokens // 512) for row in mooncake)


def test_azure_rows_are_those_of_an_independent_reading():
    with (TRACE_FOLDER / "AzureLLMInferenceTrace_code.csv").open(newline="") as file:
        rows = [(datetime.fromisoformat(row["TIMESTAMP"][:26]), int(row["ContextTokens"]), int(row["GeneratedTokens"]))
                for row in csv.DictReader(file)]  # fmt: skip
    first = min(row[0] for row in rows)
    expected = [((when - first).total_seconds(), *lengths) for when, *lengths in sorted(rows, key=lambda row: row[0])]
    assert read_rows(TRACE_FOLDER / "AzureLLMInferenceTrace_code.csv") == expected


@pytest.mark.thorough
def test_slice_of_a_long_trace_does_not_take_the_memory_of_the_whole(tmp_path):
    """4 MB of lines, of which a five-hundredth is wanted: that, and a line, must be all that stands in memory."""
    path = tmp_path / "long.jsonl"
    ids = list(range(1000, 1100))
    with path.open("w") as file:
        for second in range(6_000):
            file.write(json.dumps({"timestamp": second * 1000, "input_length": 51_200, "output_length": 1,
                                   "hash_ids": ids}) + "\n")  # fmt: skip
    tracemalloc.start()
    found = read_trace(path, window=Window(100, 112))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(found.rows) == 12 and found.num_rows == 6_000
    assert peak < path.stat().st_size / 10
