"""What a comparison says of the settings of two runs: those in force, however each of the runs came to know them."""

from sojourn.metrics.compare.settings import alike, load_differences, setting_differences

SERVED = {
    "model": "tiny-model", "max_num_seqs": 2, "threads": 1, "prefix_caching": True, "host": "127.0.0.1",
    "policy": "fcfs", "attention_window": None, "memory_bytes": {"process": 261_058_560}, "num_kv_blocks": 512,
    "device": "cpu",
}  # fmt: skip
CORE = {"device": "cpu", "threads": 1, "num_kv_blocks": 512}
STARTED = {"engine": {"model": "tiny-model", "max_num_seqs": 2, "served": {"engine": SERVED}}, "core": CORE}  # `run`
RECORDED = {  # a server that was started by hand
    "engine": SERVED | {"host": "0.0.0.0", "port": 8000, "threads": 0, "num_kv_blocks": None, "device": "auto",
                        "memory_bytes": None},
    "core": CORE,
}  # fmt: skip
LOADED = {"engine": {"base_url": "http://127.0.0.1:1", "model": "tiny-model", "served": {"engine": SERVED}}}  # `load`
BLIND = {"engine": {"base_url": "http://127.0.0.1:1", "model": "tiny-model"}}  # of a server that states nothing


def with_engine(meta: dict, **settings) -> dict:
    served = meta["engine"].get("served")
    changed = {"served": {"engine": served["engine"] | settings}} if served else settings
    return meta | {"engine": meta["engine"] | changed}


def test_runs_of_one_setting_do_not_differ_whoever_recorded_it():
    kinds = (STARTED, RECORDED, LOADED)
    assert [setting_differences(a, b).lines() for a in kinds for b in kinds] == [[]] * 9


def test_a_setting_that_differs_is_one_line_between_all_kinds_of_runs():
    for before in (STARTED, RECORDED, LOADED):
        for after in (RECORDED, LOADED):
            changed = setting_differences(before, with_engine(after, policy="shortest")).lines()
            assert changed == ['engine.policy is "fcfs" in A and "shortest" in B']
    given = setting_differences(STARTED, STARTED | {"engine": STARTED["engine"] | {"max_num_seqs": 8}}).lines()
    assert given == ["engine.max_num_seqs is 2 in A and 8 in B"]


def test_what_a_side_does_not_know_is_one_line_for_the_side():
    (line,) = setting_differences(STARTED, BLIND).lines()
    assert line.startswith("not known in B: engine.max_num_seqs (2), ") and line.endswith("and 3 more")
    (line,) = setting_differences(BLIND, STARTED).lines()
    assert line.startswith("not known in A: ")
    versions = {"versions": {"python": "3.11"}}, {"versions": {"python": "3.12", "torch": "2.13"}}
    assert setting_differences(*versions).lines() == [
        'versions.python is "3.11" in A and "3.12" in B', 'not known in A: versions.torch ("2.13")',
    ]  # fmt: skip
    imported = {"scenario": {"name": "x"}, "engine": {"model": "m"}}
    ours = imported | {"scenario": {"workload": {"classes": []}}, "hardware": {"cpu": "A", "cores": 2}}
    assert load_differences(imported, ours).lines() == [
        'not known in A: hardware.cpu ("A"), hardware.cores (2), workload.classes (none)'
    ]


def test_settings_that_nobody_knows_are_not_the_same():
    foreign = {"engine": {"base_url": "http://127.0.0.1:1", "model": "m", "served": {"id": "m"}}}
    ours = {"engine": {"max_num_seqs": 2, "model": "m"}}
    assert "settings are not known" in alike(foreign, foreign) and "settings are not known" in alike(ours, foreign)
    assert "settings and versions" in alike(ours, ours)


def test_a_difference_within_a_document_is_named_by_its_own_setting_and_no_value_is_cut_json():
    def load(*classes: dict, **more) -> dict:
        return {"scenario": {"workload": {"classes": list(classes), **more}}}

    chat = {"klass": "chat", "prompt_tokens": {"distribution": "fixed", "tokens": 128}, "session": None}
    longer = chat | {"prompt_tokens": {"distribution": "fixed", "tokens": 512}, "session": {"turns": 3}}
    found = load_differences(load(chat), load(longer))
    assert found.rows() == [
        ("workload.classes.chat.prompt_tokens.tokens", "128", "512"),
        ("workload.classes.chat.session.turns", "not set", "3"),
    ]
    assert found.lines()[0] == "workload.classes.chat.prompt_tokens.tokens is 128 in A and 512 in B"
    batch = {"klass": "batch", "prompt_tokens": {"distribution": "empirical", "counts": list(range(99))}}
    assert load_differences(load(chat), load(chat, batch)).rows() == [("workload.classes", "chat", "chat, batch")]
    rows = load_differences(load(chat, batch), load(name="x" * 500)).rows()
    assert ("workload.classes", "chat, batch", "none") in rows
    lines = (
        load_differences(load(batch), {"scenario": {}}).lines() + load_differences(load(), load(text="x" * 500)).lines()
    )
    assert all(line.count(mark) % 2 == 0 for line in lines for mark in '"') and not any("{" in line for line in lines)
    steps = {"engine": {"cuda_graphs": [1, 2, 4]}}, {"engine": {"cuda_graphs": list(range(20)), "policy": "fcfs"}}
    assert setting_differences(*steps).rows() == [
        ("engine.cuda_graphs", "1, 2, 4", "0, 1, 2, 3, 4, 5, 6, 7 and 12 more"), ("engine.policy", "not known", "fcfs"),
    ]  # fmt: skip


def test_the_affinity_of_a_client_is_not_the_hardware_of_a_foreign_server():
    pair = [{"engine": {"base_url": "http://a:1"}, "hardware": {"cpu": "A", "cores": cores, "host_cores": 2}}
            for cores in (1, 2)]  # fmt: skip
    assert not load_differences(*pair).lines()
    assert load_differences(pair[0], {**pair[1], "hardware": {"cpu": "A", "cores": 4}}).lines()
    own = [{**meta, "engine": {"model": "m"}} for meta in pair]
    assert load_differences(*own).lines() == ["hardware.cores is 1 in A and 2 in B"]
