"""Slots of adapters: a step fills each one before it is read, also where what was planned is taken back."""

from types import SimpleNamespace

from sojourn.engine.techniques.lora.line import AdapterLine
from sojourn.engine.techniques.lora.slots import Adapted, AdapterSlots, slot_of


def test_a_slot_whose_request_left_before_a_step_was_launched_is_filled_for_the_next_one():
    """Its adapter may be gone from host memory by then: nothing may be loaded for a request that has ended."""
    line = AdapterLine(AdapterSlots(2), rank=lambda request: (request.number,), patience=4)
    first, second, third = (request(number, key) for number, key in enumerate("aba"))
    line.enter(first)
    line.enter(second)
    line.give_back(first)
    assert [(slot, adapter.key) for slot, adapter in line.take_loads()] == [(slot_of(second), "b")]
    assert (first.parts["lora"], line.slots.loads) == (Adapted(slot=-1, loads=0), 1)
    line.enter(third)
    assert slot_of(third) != slot_of(second)
    assert [(slot, adapter.key) for slot, adapter in line.take_loads()] == [(slot_of(third), "a")]


def test_a_slot_is_filled_once_for_all_who_use_it():
    line = AdapterLine(AdapterSlots(2), rank=lambda request: (request.number,), patience=4)
    first, second = request(0, "a"), request(1, "a")
    line.enter(first)
    line.enter(second)
    line.give_back(first)
    assert len(line.take_loads()) == 1 and not line.take_loads(), "the second one still needs it"
    line.give_back(second)
    line.enter(first)
    assert not line.take_loads(), "it stays in its slot"


def request(number: int, key: str) -> SimpleNamespace:
    return SimpleNamespace(number=number, adapter=SimpleNamespace(key=key), parts={})
