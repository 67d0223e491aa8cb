import pytest

from sojourn.engine.faults.delay import SECOND_NS, Window
from sojourn.engine.faults.plan import FAULTS, BlockLeak, CoreDeath, SlowDevice, SlowTokeniser, planned
from sojourn.engine.options import engine_config
from sojourn.metrics.errors import InputError


def test_several_faults_are_read_in_their_order():
    text = " slow_tokeniser: ms=20 , by=sleep; core_death:at_s=5;slow_device:factor=3,steps=prompts,until_s=4 "
    assert planned(text) == [
        SlowTokeniser(ms=20, by="sleep"), CoreDeath(at_s=5), SlowDevice(factor=3, steps="prompts", until_s=4)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("slow_tokenizer:ms=2", "'slow_tokenizer' is no fault; did you mean slow_tokeniser?"),
        ("gremlins", "'gremlins' is no fault; known are slow_tokeniser, "),
        ("slow_device:factor=0.5", "slow_device: factor=0.5 is not valid: input should be greater than 1"),
        ("slow_device:", "slow_device: factor is missing; add it"),
        ("slow_host:ms", "slow_host: 'ms' is not KEY=VALUE, such as ms=20"),
        ("slow_host:stage=commit", "slow_host: costs no time; give ms a value above 0"),
        ("slow_sampler:", "slow_sampler: costs no time; give ms or us_per_row a value above 0"),
        ("slow_host:ms=5,ms=6", "slow_host: ms stands twice; keep one"),
        ("slow_host:ms=nan", "slow_host: ms=nan is not valid: input should be a finite number"),
        ("slow_host:mss=3", "slow_host: mss is none of its values; it has by, from_s, ms, stage, until_s"),
        ("slow_sampler:ms=2,from_s=4,until_s=3", "slow_sampler: until_s=3 is not after from_s=4; raise it"),
        ("core_death:at_s=1,from_s=3", "core_death: has one moment, at_s; leave from_s and until_s out"),
        (" ; ", "it names no fault; give one such as slow_tokeniser:ms=20, or leave the setting out"),
    ],
)
def test_a_bad_setting_gets_a_sentence(text, sentence):
    with pytest.raises(InputError, match=r"^faults=.* is not valid: ") as refused:
        engine_config({"model": "tiny-model", "faults": text})
    assert sentence in str(refused.value)


def test_every_fault_says_what_it_does_and_where():
    for name, kind in FAULTS.items():
        assert kind.process in ("front", "core") and kind.__doc__, name


def test_a_window_is_counted_from_the_first_call():
    now = [100 * SECOND_NS]
    window = Window(BlockLeak(blocks=1, from_s=2, until_s=5), lambda: now[0])
    opened = []
    for _ in range(8):
        opened.append(window.is_open())
        now[0] += SECOND_NS
    assert opened == [False, False, True, True, True, False, False, False]
