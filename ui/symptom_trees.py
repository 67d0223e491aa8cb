"""The six symptom trees of a run, computed once and kept while its files stay as they are."""

from pathlib import Path

import streamlit as st

from sojourn.diagnosis.evidence import read_evidence
from sojourn.diagnosis.expectation import with_expectation
from sojourn.diagnosis.symptom_tree.tree import SymptomTree, symptom_tree
from sojourn.diagnosis.symptoms import SYMPTOMS
from sojourn.diagnosis.verdict import Diagnosis
from sojourn.metrics.run.directory import RunDirectory
from sojourn.ui.run_data import RunData, fingerprint


def trees_of(run: RunData) -> dict[str, SymptomTree]:
    """Symptom → its tree. Raises RunDataError."""
    return _trees(str(run.path), fingerprint(run.path), run.diagnosis)


@st.cache_data(max_entries=4, show_spinner="Looking at every branch …")
def _trees(path: str, stamps: tuple[tuple[str, int, int], ...], _diagnosis: Diagnosis) -> dict[str, SymptomTree]:
    facts = read_evidence(with_expectation(RunDirectory.open(Path(path))))
    return {symptom.key: symptom_tree(facts, _diagnosis, symptom.key) for symptom in SYMPTOMS}
