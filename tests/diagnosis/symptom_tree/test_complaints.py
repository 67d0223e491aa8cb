"""A complaint is found by its key, its title and the words of users; anything else gets the list of names."""

import pytest

from sojourn.diagnosis.symptom_tree.complaints import COMPLAINTS, find_complaint
from sojourn.metrics.errors import InputError


@pytest.mark.parametrize(
    ("text", "symptom"),
    [
        ("high_ttft", "high_ttft"), ("my first token is slow", "high_ttft"), ("TTFT", "high_ttft"),
        ("slow frist token", "high_ttft"), ("the text stutters", "high_itl"), ("text studders", "high_itl"),
        ("The GPU idles", "low_device_utilisation"), ("memory fills quickly", "vram_fills_quickly"),
        ("benchmark good, product slow", "product_latency_poor"), ("more devices do not help", "devices_do_not_help"),
        ("more GPUs do not help", "devices_do_not_help"), ("vram", "vram_fills_quickly"),
    ],
)  # fmt: skip
def test_words_of_users_name_a_complaint(text, symptom):
    assert find_complaint(text).symptom == symptom


@pytest.mark.parametrize("text", ["", "xyz", "the", "weather"])
def test_other_words_are_refused_with_the_names(text):
    with pytest.raises(InputError) as error:
        find_complaint(text)
    assert all(each.symptom in str(error.value) and each.words in str(error.value) for each in COMPLAINTS)
