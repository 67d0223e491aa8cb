"""The token lifecycle's metrics: what the model had to compute."""

from metrics.catalog.metric import TOKEN_BOUNDS, WORK_BOUNDS, counter, histogram, log_buckets
from metrics.records import KINDS

MASS_BOUNDS = (
    0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.07, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7,
    0.75, 0.8, 0.85, 0.9, 0.95, 0.99, 0.999, 1.0,
)  # fmt: skip

TOKEN = (
    counter("token", "prompt_tokens_total", "tokens", "Prompt tokens of ended requests, cached ones included.",
            "Booked at the end of a request: for what runs now see sojourn_token_scheduled_tokens_total."),
    counter("token", "computed_tokens_total", "tokens", "Tokens of ended requests that the model computed.",
            "Prompt tokens taken from the prefix cache are in sojourn_memory_prefix_tokens_total."),
    counter("token", "generated_tokens_total", "tokens", "Output tokens of ended requests.",
            "Not all were read: an aborted request counts with what it had."),
    counter("token", "drafted_tokens_total", "tokens", "Tokens that speculation proposed.",
            "0 without speculation."),
    counter("token", "accepted_tokens_total", "tokens", "Proposed tokens that the model confirmed.",
            "Says nothing of the time that the proposals cost."),
    counter("token", "scheduled_tokens_total", "tokens",
            "Tokens that steps computed, by kind: prefill, recompute, decode, verify. Live, step by step.",
            "Padding is not in it.", kind=KINDS),
    counter("token", "padding_tokens_total", "tokens", "Tokens computed only to fill a graph's bucket.",
            "Their time is in the device time and cannot be told apart."),
    counter("token", "overrun_tokens_total", "tokens",
            "Tokens computed for requests that had ended meanwhile: their next step was launched before the last was "
            "read.", "0 without overlap. Their time is in the device time and cannot be told apart."),
    counter("token", "budget_tokens_total", "tokens",
            "Tokens that steps could have held; scheduled / budget is the fill of a step.",
            "A low fill is a fault only while requests wait."),
    counter("token", "logit_rows_total", "rows", "Rows of logits computed: for draws, and for scored prompt tokens.",
            "Their FLOPs are part=\"head\" of sojourn_compute_part_flops_total."),
    histogram("token", "entropy_nats", "nats", log_buckets(0.001, 12, per_decade=6),
              "Entropy of the distribution that a token was drawn from, at its temperature, before truncation.",
              "A sample of the draws, without those under penalties, biases or a grammar.", scale=1000),
    histogram("token", "kept_mass_ratio", "ratio", MASS_BOUNDS,
              "Share of that distribution that truncation left; of greedy draws, the probability of their token.",
              "A sample of the draws, as above.", scale=1_000_000),
    counter("token", "prompt_characters_total", "characters", "Characters of the prompts of ended requests.",
            "A prompt sent as ids has none; a chat counts with the template around it."),
    counter("token", "output_characters_total", "characters", "Characters of the text of ended requests.",
            "What a stop string cut off is not in it."),
    histogram("token", "step_tokens", "tokens", TOKEN_BOUNDS, "Tokens of one step, all kinds, without padding.",
              "Ten prompts and one long chunk look alike."),
    histogram("token", "encode_seconds", "seconds", WORK_BOUNDS,
              "Parse, chat template and tokenise, per request (account token.encode).",
              "Only what delayed the request."),
    histogram("token", "sample_seconds", "seconds", WORK_BOUNDS,
              "Logits → id, per request (account token.sample).",
              "One request's sum over its steps, on its critical path."),
    histogram("token", "decode_seconds", "seconds", WORK_BOUNDS,
              "Ids → text, per request (account token.decode).",
              "What hides behind the device costs nothing and is not in it."),
)  # fmt: skip
