"""The looks at a server's page one by one: when each was answered, how long that took, and whether tokens were made."""

import numpy as np
import pandas as pd

from sojourn.interop.sources import scrapes
from sojourn.interop.sources.courses import names_of_family
from sojourn.interop.sources.pressure import GENERATED
from sojourn.interop.sources.registry import recognise
from sojourn.metrics.run.directory import RunDirectory


def looks_of(run: RunDirectory) -> pd.DataFrame:
    """`begin_ns, end_ns` of each answered scrape, and `generated`: tokens since the one before; NaN where the page does
    not count them. In order of time; empty of a server that is not known."""
    source = recognise(scrapes.names(run))
    answered = scrapes.answers(run)
    if source is None or not len(answered):
        return pd.DataFrame({"begin_ns": [], "end_ns": [], "generated": []}, dtype="float64")
    end_ns = answered.ns.to_numpy("float64")
    counted = names_of_family(source, GENERATED)
    grown = scrapes.growth_over_time(run, counted, int(end_ns[0]), int(end_ns[-1]))
    made = grown.groupby("ns").growth.sum() if len(grown) else pd.Series(dtype="float64")
    generated = made.reindex(answered.ns).to_numpy("float64")
    return pd.DataFrame({
        "begin_ns": end_ns - 1e9 * np.nan_to_num(answered.took_s.to_numpy("float64")),
        "end_ns": end_ns, "generated": generated,
    })  # fmt: skip
