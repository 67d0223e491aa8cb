"""Memory: what the prefix cache gave, what more of it would give, and how KV blocks live, die and are fought for."""

import streamlit as st

from sojourn.metrics.memory.residence import residences_of
from sojourn.metrics.run.directory import engine_settings
from sojourn.ui.figures import memory
from sojourn.ui.launch import unfilled_pages
from sojourn.ui.markup import fragments
from sojourn.ui.page import caption, draw, once, open_page, show_no_steps, stop_with
from sojourn.ui.tables import kv_lens
from sojourn.ui.tables.adapters import adapters
from sojourn.ui.tables.memory import (
    block_events,
    hit_rates,
    load_sentence,
    miss_ratios,
    outcome_tokens,
    preemptions,
    residences,
    tiers,
)
from sojourn.ui.text import markdown

NO_MEMORY = (
    "This run has no records of a server's memory: it was measured from outside, or another tool recorded it. A "
    "Sojourn server records them with `sojourn serve MODEL --run-dir RUN`, and KV events of a vLLM server show its "
    "cache."
)

run = open_page(
    "Memory",
    "What the prefix cache made of every prompt token, what a larger pool would change, and who took whose KV blocks.",
    "**Prompt tokens by outcome**: a token is a *hit*, or a miss with its cause; *evicted* is what more memory mends, "
    "*diverged* what another order of the prompt mends, *cold* what nothing mends. **Hit rate**: the dotted line is a "
    "cache that never evicts; the gap between the lines is the price of this pool. **Pool size**: the share of prompt "
    "tokens that pools of other sizes would have missed for the same requests in the same order. **Blocks** sum to the "
    "pool; the dotted line is how many blocks the written positions would fill, so the distance to *active* is what "
    "half-empty blocks waste. **KV block lifetimes**: if blocks are evicted after less idle time than it takes until "
    "they are used again, or reuse distances lie beyond the pool, the cache thrashes.",
    may_be_empty=True,
)
shown = once(run, "memory.lens", lambda: kv_lens.lens_of(run))
has_requests = not (run.requests.empty and run.steps.empty)
if not has_requests and shown.lens is None:
    stop_with(f"The run {markdown(run.name)} has recorded no request and no step yet.", "hourglass_empty")
if shown.lens is None and "memory" in unfilled_pages(run.path):
    stop_with(NO_MEMORY, "info")
is_whole = len(run.requests) == run.sent  # a cache has no part that some of the requests used


def show_sizes() -> None:
    lens = shown.lens if is_whole else None
    draw(
        "Miss rate by cache size",
        once(run, "memory.miss_ratio_curve", lambda: memory.miss_ratio_curve(*miss_ratios(run.requests, lens))),
        "`requests.parquet` `resized_hit_tokens`, from the distances between uses of the same blocks"
        + (
            ", and of other sizes from `prompt_block_hashes`; the band is a 95% interval over stretches of the run."
            if lens is not None
            else "."
        ),
    )


def show_lens() -> None:
    """What more memory would hit, in figures, and who needed the room of what was evicted."""
    lens = shown.lens
    st.subheader("Hit rate by cache size", anchor=False)
    if lens is None:
        caption(shown.why)
        return
    st.markdown(markdown(lens.headline))
    if any(point.hit_rate != 0 for point in lens.curve):  # else the sentence has said it
        st.html(fragments.data_table(kv_lens.sizes(lens)))
    limits = " ".join(f"{each[0].upper()}{each[1:]}." for each in lens.unknown)
    caption(
        f"Of the whole run, for the same lookups in the same order. {limits} What twice the memory is worth in "
        f"goodput: `sojourn kv-lens {run.name}`."
    )
    if lens.takers:
        st.subheader("Who needed the room of evicted blocks", anchor=False)
        st.html(fragments.data_table(kv_lens.takers(lens)))
        caption("`requests.parquet` `evicted_by`; blocks: `kv_events.parquet`. Most tokens first.")
    if lens.pools:
        st.subheader("Blocks by KV events", anchor=False)
        st.html(fragments.data_table(kv_lens.pools(lens)))
        caption("`kv_events.parquet`: hashes of blocks that were stored and removed.")


if run.fleet is not None:
    show_no_steps(run, "memory")
if has_requests:
    left, right = st.columns([3, 2], gap="large")
    with left:
        draw(
            "Prompt tokens by outcome",
            once(run, "memory.prefix_outcomes", lambda: memory.prefix_outcomes(outcome_tokens(run.requests))),
            "Every prompt token at its first query; the parts sum to the prompt tokens. `requests.parquet` "
            "`prefix_outcomes`.",
        )
        draw(
            "Hit rate, and that of a cache without eviction",
            once(run, "memory.hit_rates", lambda: memory.hit_rates(hit_rates(run.requests, run.begin_ns))),
            "`requests.parquet` `prefix_outcomes`, `infinite_hit_tokens`, over `arrived_ns`.",
        )
    with right:
        show_sizes()
elif shown.lens is not None and shown.lens.hit_rate is not None:
    show_sizes()
show_lens()
if has_requests:
    draw(
        "KV blocks by state",
        once(
            run,
            "memory.blocks_over_time",
            lambda: memory.blocks_over_time(run.steps, run.begin_ns, engine_settings(run.meta).get("block_size")),
        ),
        "`steps.parquet` `blocks_*`, `slots_written`, `preempted_ids`; with more than 300 steps, means of equal spans.",
    )
pool = run.steps[[name for name in run.steps.columns if name.startswith("blocks_")]].sum(axis=1)
lives = shown.lives if is_whole and shown.lives else block_events(run.steps)
draw(
    "KV block lifetimes",
    once(
        run,
        "memory.block_lives",
        lambda: memory.block_lives(lives, int(pool.max()) if len(pool) else 0),
    ),
    "`steps.parquet` `evicted_age_ns`, `evicted_idle_ns`, `reuse_gap_ns`, `reuse_distance_blocks`: a sample by hash. "
    "Where a run has `kv_events.parquet`: of all blocks, from it and from `requests.parquet` `prompt_block_hashes`.",
)
if not (found := tiers(run.steps, run.requests)).empty:
    st.subheader("KV tiers below the device", anchor=False)
    st.html(fragments.data_table(found))
    caption(
        "`steps.parquet` `tier_*`; tokens and requests: `requests.parquet` `loaded_tokens`. `load_decision` says "
        "what was predicted to be cheaper, loading or computing again, beside both predictions. "
        + load_sentence(run.requests)
    )
if not (found := adapters(run.requests)).empty:
    st.subheader("Adapters", anchor=False)
    st.html(fragments.data_table(found))
    caption(
        "`requests.parquet` `adapter`, `adapter_loads`, `ledger_memory_adapter_load_ns` (reading into host memory), "
        "`waits` with the reason `adapter` (all slots were taken)."
    )
if models := residences_of(run.meta):
    st.subheader("Models: what warmth costs, and what cold starts cost", anchor=False)
    st.html(fragments.data_table(residences(models)))
    caption(
        "`run.json` `models`: planned bytes, summed over time. *Freed* is what a model would have held besides, "
        "if it had been hot all the time; the last column sets it against the time that calls waited for the model."
    )
st.subheader("Preemptions", anchor=False)
table = preemptions(run.steps, run.requests, run.begin_ns)
if table.empty:
    caption("No request lost its blocks in this run." if len(run.steps) else "The server recorded no step.")
else:
    st.html(fragments.data_table(table))
    caption(
        "`steps.parquet` `preempted_ids`, `preempted_for`, `preempted_tokens`; cost of the victim over its life: "
        "`requests.parquet` `recomputed_tokens`, `ledger_memory_preempted_ns`. The 20 costliest."
    )
