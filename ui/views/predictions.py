"""Predictions: what replays said that a change would give, and what the run with that change gave."""

import streamlit as st

from sojourn.metrics.errors import RunDataError
from sojourn.replay.verdict.ledger import FILE_NAME, read, score
from sojourn.ui.figures import ledger_of_predictions as figures
from sojourn.ui.markup import fragments
from sojourn.ui.page import draw, stop_with, style
from sojourn.ui.tables.predictions import compared, pair_name, tiles
from sojourn.ui.text import markdown

style()
st.title("Predictions", anchor=False)
st.markdown("What a replay said before a setting was changed, and what the run with the changed setting then measured.")
with st.expander("How to read this page"):
    st.markdown(
        "Every prediction that `sojourn verify RUN RUN2` has checked is one entry, and none is ever taken away. A "
        "prediction is a **hit** if the measured figure lies within its 80% interval. The **error** is measured less "
        "predicted. What nearly every outcome would have fitted counts as **not predicted**. The last row of a pair is "
        "predicted for the speed that the machine had in the second run. Before, predicted and measured stand side by "
        "side for each pair of runs."
    )
ledger = st.session_state.runs_folder / FILE_NAME
try:
    entries = read(ledger)
except RunDataError as error:
    st.error(markdown(error), icon=":material/error:")
    st.stop()
if not entries:
    stop_with(
        f"No prediction has been verified in {markdown(st.session_state.runs_folder)}. Run the fix that a finding "
        "names, then: `sojourn verify RUN RUN2`.",
        "fact_check",
    )
st.html(fragments.tiles(tiles(score(entries))))
draw(
    "Predicted and measured attainment",
    figures.predicted_against_measured(entries),
    f"`{FILE_NAME}`: the judged figure of each entry. On the diagonal it was right; lines are intervals.",
)
latest = list(reversed(entries))
place = st.selectbox(
    "Pair", range(len(latest)), format_func=lambda at: pair_name(latest[at]), key="pair",
)  # fmt: skip
entry = latest[place]
draw(
    "Before, predicted, measured",
    figures.before_and_after(entry),
    f"`{FILE_NAME}`: figures of {markdown(entry.run)} before the change and of {markdown(entry.run2)} after it.",
)
st.html(fragments.data_table(compared(entry)))
