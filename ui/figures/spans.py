"""What a foreign server's spans tell of single requests: one bar a request, its parts end to end."""

import pandas as pd
import plotly.graph_objects as go

from sojourn.interop.imported.otlp import PARTS, WORDS
from sojourn.metrics.ledger import COLOURS
from sojourn.ui.theme import TEMPLATE, UNACCOUNTED_COLOUR, shade

PIXELS_PER_ROW = 22
PART_COLOURS = {
    "client_lag_ns": COLOURS["client"],
    "outside_ns": shade(COLOURS["client"], 0.4),
    "queue_ns": COLOURS["request"],
    "prefill_ns": shade(COLOURS["compute"], -0.45),
    "decode_ns": COLOURS["compute"],
    "server_rest_ns": UNACCOUNTED_COLOUR,
}


def parts_of_requests(rows: pd.DataFrame) -> go.Figure:
    """`rows` as `interop.imported.otlp.read_joined` has them, from top to bottom, without parts that no span tells."""
    figure = go.Figure()
    for part in PARTS:
        milliseconds = rows[part].astype("float64") / 1e6
        if milliseconds.notna().any():
            figure.add_bar(
                y=rows.request_id, x=milliseconds.clip(lower=0), name=WORDS[part], orientation="h",
                marker={"color": PART_COLOURS[part]}, hovertemplate="%{x:,.1f} ms",
            )  # fmt: skip
    figure.update_layout(
        template=TEMPLATE, barmode="stack",
        height=110 + PIXELS_PER_ROW * len(rows), legend={"orientation": "h", "y": 1, "yanchor": "bottom"},
        margin={"l": 8, "r": 8, "t": 40, "b": 8},
    )  # fmt: skip
    figure.update_yaxes(autorange="reversed", automargin=True, type="category")
    figure.update_xaxes(title="milliseconds since the request was due")
    return figure
