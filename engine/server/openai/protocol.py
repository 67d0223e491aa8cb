"""What clients may send to generate: the fields of completions, and those that they share with chats."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from sojourn.engine.server.body.strict import Strict
from sojourn.engine.server.errors import ApiError, invalid
from sojourn.engine.server.openai.kv_transfer import KVTransferParams
from sojourn.engine.token.generation_config import SamplingDefaults

MAX_CHOICES = 128  # n and best_of
MAX_PROMPTS = 128  # of one call
MAX_SEQUENCES = 256  # of one call: prompts × choices
MAX_LOGPROBS = 20  # alternatives at each position
MAX_BIASED_TOKENS = 1024
MAX_BAD_WORDS = 128
MAX_CHOICE_OPTIONS = 1024
MAX_STOP_TOKENS = 1024
MAX_ALLOWED_TOKENS = 262_144  # the largest vocabulary of any family

StopString = Annotated[str, Field(min_length=1, max_length=1000)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class StreamOptions(Strict):
    include_usage: bool = Field(False, description="one more chunk at the end, with the usage of the whole call")
    continuous_usage_stats: bool = Field(
        False, description="beside include_usage: the usage so far in every chunk, which gives the tokens of a chunk"
    )
    include_obfuscation: Literal[False] = Field(False, description="only false: no padding is sent")


# Each of them asks for a grammar that the output follows.
GRAMMAR_FIELDS = (
    "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
)  # fmt: skip


class GenerationRequest(Strict):
    """What completions and chat completions share."""

    prompt_field: ClassVar[str]  # that holds the prompts

    model: str = Field(description="name of the served model")
    n: int = Field(1, ge=1, le=MAX_CHOICES, description="choices for each prompt; they share the prompt's KV blocks")
    temperature: float = Field(1.0, ge=0, le=2, description="0, or anything below 0.00001, is greedy")
    top_p: float = Field(
        1.0, ge=0, le=1, description="draws from the smallest set of this much probability; 0 leaves the best one"
    )
    top_k: int = Field(0, ge=-1, lt=2**31, description="draws from the k most probable; 0 and -1 keep all")
    min_p: float = Field(0.0, ge=0, le=1, description="drops what is less probable than this share of the best")
    top_n_sigma: float = Field(
        0.0, ge=0, le=1000, description="drops logits this many standard deviations below the best; 0 keeps all"
    )
    frequency_penalty: float = Field(0.0, ge=-2, le=2, description="taken off a logit for each time it was drawn")
    presence_penalty: float = Field(0.0, ge=-2, le=2, description="taken off a logit once it was drawn")
    repetition_penalty: float = Field(
        1.0, ge=0.01, le=100, description="divides positive logits of tokens in prompt or output, multiplies negative"
    )
    lz_penalty: float = Field(0.0, ge=0, le=10, description="strength of the penalty on continuing a repetition")
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MAX_BIASED_TOKENS)] = (
        Field({}, description="token id, as a string → what is added to its logit")
    )
    bad_words: Annotated[list[StopString], Field(max_length=MAX_BAD_WORDS, fail_fast=True)] = Field(
        [], description="not written with the tokens that spell them, at a beginning or after a blank"
    )
    allowed_token_ids: Annotated[list[TokenId], Field(max_length=MAX_ALLOWED_TOKENS, fail_fast=True)] = Field(
        [], description="the only ids that may be drawn; empty allows all"
    )
    min_tokens: int = Field(0, ge=0, lt=2**31, description="output tokens before anything may stop the output")
    stop: StopString | Annotated[list[StopString], Field(max_length=16, fail_fast=True)] | None = Field(
        None, description="strings that end the output; cut off, unless include_stop_str_in_output"
    )
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKENS, fail_fast=True)] = Field(
        [], description="ids that end the output, beside the model's own"
    )
    include_stop_str_in_output: bool = Field(False, description="what ended the output is part of it")
    skip_special_tokens: bool = Field(True, description="special tokens have no text")
    ignore_eos: bool = Field(False, description="the model's own end tokens do not end the output")
    seed: int | None = Field(
        None, ge=-(2**63), lt=2**63, description="the same seed draws the same tokens; choice i has its own from it"
    )
    stream: bool = Field(False, description="server-sent events, as the text becomes ready")
    stream_options: StreamOptions | None = Field(None, description="needs stream")
    prompt_logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="log-probabilities of the prompt's tokens, as vLLM shows them"
    )
    response_format: dict[str, Any] | None = Field(
        None,
        description="text, json_object or json_schema: the output is valid, always, unless `length` or `stop` cut it",
    )
    structured_outputs: dict[str, Any] | None = Field(
        None, description="one of json (a schema), json_object, regex, choice and grammar (Lark), as vLLM has it"
    )
    guided_json: dict[str, Any] | str | None = Field(None, description="vLLM's older name of structured_outputs.json")
    guided_regex: str | None = Field(None, description="... of structured_outputs.regex")
    guided_choice: Annotated[list[str], Field(max_length=MAX_CHOICE_OPTIONS, fail_fast=True)] | None = Field(
        None, description="... of structured_outputs.choice"
    )
    guided_grammar: str | None = Field(None, description="... of structured_outputs.grammar")
    priority: int = Field(0, ge=-(2**31), lt=2**31, description="lower goes first, where the policy asks")
    cache_salt: str = Field("", max_length=1000, description="calls with different salts share no cached prefix")
    user: str = Field("", max_length=1000, description="recorded as the tenant, by whom fair shares are counted")
    safety_identifier: str = Field("", max_length=1000, description="the newer name of user; user goes first")
    prompt_cache_key: str = Field(
        "", max_length=1000, description="a hint where to look for a cached prefix; there is one cache, which has all"
    )
    kv_transfer_params: KVTransferParams | None = Field(
        None, description="prefill and decode servers: hold the prompt's KV for another server, or read it from one"
    )
    return_token_ids: bool = Field(False, description="the ids of prompt and output beside the text, as vLLM has it")

    @property
    def tenant(self) -> str:
        return self.user or self.safety_identifier

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def choices(self) -> int:
        """Sequences that are computed for each prompt."""
        return self.n

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives to each output token; None where log-probabilities are not wanted."""
        raise NotImplementedError

    @property
    def output_limit(self) -> int | None:
        """Output tokens of each sequence at most; None is what fits."""
        raise NotImplementedError

    def take_defaults(self, defaults: SamplingDefaults) -> None:
        """Fields that were not sent, or as null, get the checkpoint's value; a limit of the output is no field here."""
        for name in defaults.values.keys() - self.model_fields_set:
            setattr(self, name, defaults.values[name])

    @property
    def reasoning_budget(self) -> int | None:
        """Tokens of reasoning at most; None bounds nothing."""
        return None

    def refuse_contradictions(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "`stream_options` needs `stream`: true; leave it out", param="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise invalid("prompt_logprobs", "`prompt_logprobs` cannot be streamed; leave out `stream`")


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt_field: ClassVar[str] = "prompt"

    prompt: Any = Field(description="a text, a list of token ids, or a list of up to 128 of either")
    max_tokens: int = Field(16, ge=0, description="output tokens at most; 0 only with echo")
    best_of: int | None = Field(
        None, ge=1, le=MAX_CHOICES, description="draws this many and gives the n of best mean log-probability"
    )
    echo: bool = Field(False, description="the prompt stands before the output, with its logprobs if they are wanted")
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS, description="alternatives to each token")
    add_special_tokens: bool = Field(True, description="the tokenizer adds its own, such as a begin of text")

    def take_defaults(self, defaults: SamplingDefaults) -> None:
        super().take_defaults(defaults)
        if defaults.max_tokens is not None and "max_tokens" not in self.model_fields_set:
            self.max_tokens = min(self.max_tokens, defaults.max_tokens)

    @property
    def choices(self) -> int:
        return self.best_of or self.n

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def output_limit(self) -> int:
        return self.max_tokens

    def refuse_contradictions(self) -> None:
        super().refuse_contradictions()
        if self.max_tokens == 0 and not self.echo:
            message = "`max_tokens`=0 is not valid: it should be greater than or equal to 1, but with `echo`"
            raise invalid("max_tokens", message)
        if self.best_of is not None and self.best_of < self.n:
            message = f"`best_of`={self.best_of} is not valid: it should be at least `n`, {self.n}"
            raise invalid("best_of", message)
        if self.stream and self.choices > self.n:
            message = f"`best_of` above `n` cannot be streamed; leave out `stream`, or send {self.n}"
            raise invalid("best_of", message)


def trace_attributes(body: GenerationRequest) -> dict[str, Any]:
    """Attributes of a request's trace, by OpenTelemetry's GenAI conventions. No text of the prompt is among them."""
    attributes = {
        "gen_ai.operation.name": "text_completion" if isinstance(body, CompletionRequest) else "chat",
        "gen_ai.request.max_tokens": body.output_limit,
        "gen_ai.request.temperature": body.temperature,
        "gen_ai.request.top_p": body.top_p,
        "gen_ai.request.top_k": body.top_k,
        "gen_ai.request.seed": body.seed,
        "gen_ai.request.stop_sequences": body.stops or None,
        "gen_ai.request.stream": body.stream,
        "gen_ai.request.choice.count": body.choices,
    }
    return {name: value for name, value in attributes.items() if value is not None}
