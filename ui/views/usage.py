"""Usage: who used what, and what it costs."""

from pathlib import Path

import streamlit as st

from sojourn.metrics.errors import InputError, RunDataError
from sojourn.metrics.usage.files import FOLDER, usage_files
from sojourn.metrics.usage.reader import Usage, read_usage
from sojourn.metrics.usage.report import GROUPS, total
from sojourn.ui.figures.usage import tokens_by_tenant
from sojourn.ui.markup import fragments
from sojourn.ui.page import caption, draw, open_page, stop_with
from sojourn.ui.tables.usage import tokens_over_time, usage_sums
from sojourn.ui.text import markdown


@st.cache_data(max_entries=4, show_spinner="Reading the usage …")
def read(folder: str, stamps: tuple[tuple[str, int, int], ...]) -> Usage:
    """The usage of a folder as it was when its files had these `stamps`."""
    return read_usage(Path(folder))


def stamps_of(folder: Path) -> tuple[tuple[str, int, int], ...]:
    return tuple((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in usage_files(folder))


run = open_page(
    "Usage",
    "Which tenant used how many tokens and how much of the device, and what that costs.",
    "Each call of the server has one record, whether it was answered, refused, cancelled, failed or interrupted by a "
    "kill. **Tokens by tenant** stand where their calls arrived. **Device time** is a call's share of each step, by "
    "the FLOPs of its own tokens: the shares of all calls sum to the device's time. Waiting is not charged. **Prices** "
    "stand in the records where the server had a price list. `sojourn server usage` prices them again with another "
    "list.",
)
folder = run.path / FOLDER
try:
    stamps = stamps_of(folder)
    usage = read(str(folder), stamps) if stamps else None
    sums = total(usage.records) if usage is not None else None
except (RunDataError, InputError, OSError) as error:
    st.error(markdown(error), icon=":material/error:")
    st.stop()
if usage is None:
    stop_with(
        "This run has no usage records. `sojourn serve MODEL --run-dir RUN --usage-dir RUN/usage --usage-prices FILE` "
        "writes them; without the file of prices they have no price.",
        "receipt_long",
    )
draw(
    "Tokens by tenant",
    tokens_by_tenant(*tokens_over_time(usage.records)),
    "`usage/*.jsonl` `prompt_tokens` and `output_tokens`, by `tenant` and `time`; of many tenants the largest.",
)
st.subheader("Sums", anchor=False)
by = st.segmented_control("by", list(GROUPS), default="tenant", key="usage_by", required=True)
st.html(fragments.data_table(usage_sums(usage.records, by)))
unreadable = f" {usage.unreadable_lines} lines were cut off by a kill or a full disk." if usage.unreadable_lines else ""
sensor = "" if sums.joules is not None else " Joules are unknown without a power sensor."
caption(f"{sums.calls:,} calls, {sums.status_counts}.{unreadable}{sensor} `usage/*.jsonl`.")
