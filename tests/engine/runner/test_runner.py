"""What only the runner knows of a request: what its model cannot do."""

import pytest

from tests.engine.harness import drain, hand_over, make_engine, submit


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"prompt": [3, 5000]}, "`prompt` holds token id 5000"),
        ({"bad_words": [[3, 5000], [5000]]}, "`bad_words` holds token id 5000"),
        ({"stop_token_ids": [5000], "min_tokens": 2}, "`stop_token_ids` holds token id 5000"),
        ({"logit_bias": {5000: 1.0}}, "`logit_bias` holds token id 5000"),
        ({"allowed_token_ids": [-1]}, "`allowed_token_ids` holds token id -1"),
    ],
)
def test_ids_that_only_the_tokenizer_knows_end_their_request_and_nobody_elses(change, sentence, checkpoints):
    engine, published = make_engine(checkpoints["llama"])
    prompt, change = change.get("prompt", [3, 4]), {name: change[name] for name in change if name != "prompt"}
    hand_over(engine, [submit("good", [3, 4]), submit("bad", prompt, **change)])
    drain(engine, check=True)
    engine.flush()
    assert published.ended["bad"].reason == "error" and sentence in published.ended["bad"].error
    assert len(published.tokens["good"]) == 12 and "bad" not in published.tokens
    assert sum(published.ended["bad"].ledger) > 0
