"""The `workload` block of a scenario: classes of requests, their lengths and their shared prefixes."""

from typing import Any, Literal

from pydantic import Field, model_validator

from sojourn.loadgen.scenario.distributions import Block, Length, Number, Seconds, Turns, Whole

# Keys of a body that other keys of the scenario set, so that extra_body must not.
OWN_KEYS = frozenset((
    "model", "prompt", "messages", "max_tokens", "temperature", "seed", "stream", "stream_options", "ignore_eos",
    "priority", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "n",
    "response_format", "structured_outputs",
))  # fmt: skip


FORMATS = ("text", "json_object", "json_schema")


class PrefixTree(Block):
    """Prefixes that share prefixes: a request takes one of `branching` ways at each of `depth` levels."""

    depth: Whole = Field(ge=1, le=64, description="nodes on the way from the root to a leaf")
    branching: Whole = Field(
        ge=1, le=10_000, description="at each level, all equally often; `branching`^`depth` at most 2^53"
    )
    node_tokens: Whole = Field(ge=1, le=1_000_000, description="that each level adds")

    @model_validator(mode="after")
    def _countable(self):
        if self.branching**self.depth > 2**53:
            raise ValueError(f"has {self.branching}^{self.depth} paths, more than 2^53; lower depth or branching")
        return self

    @property
    def tokens(self) -> int:
        return self.depth * self.node_tokens


class Sampling(Block):
    """Sampling parameters. Those that are not set are not sent."""

    top_k: Whole | None = Field(None, ge=1, description="draws from the k most probable; not in OpenAI's API")
    top_p: Number | None = Field(None, gt=0, le=1, description="draws from the smallest set of this much probability")
    min_p: Number | None = Field(
        None, ge=0, le=1, description="drops what is below this share of the best; not in OpenAI's API"
    )
    presence_penalty: Number | None = Field(None, ge=-2, le=2, description="taken off a logit once its token was drawn")
    frequency_penalty: Number | None = Field(None, ge=-2, le=2, description="taken off a logit per draw of its token")
    repetition_penalty: Number | None = Field(
        None, gt=0, le=2, description="divides logits of tokens in prompt or output; not in OpenAI's API"
    )
    n: Whole | None = Field(
        None,
        ge=1,
        le=128,
        description="answers to one prompt; the first token is that of the first one, tokens are of all",
    )
    response_format: dict[str, Any] | None = Field(
        None, description="`{type: json_object}`, or `{type: json_schema, json_schema: {...}}`"
    )
    regex: str | None = Field(
        None, min_length=1, description="sent as `structured_outputs: {regex: ...}`, as vLLM has it"
    )
    extra_body: dict[str, Any] = Field(
        default_factory=dict, description="further keys of the request's JSON, unchanged"
    )

    @model_validator(mode="after")
    def _honest(self):
        if self.response_format is not None and self.regex is not None:
            raise ValueError("has response_format and regex; an answer has one form: keep one of the two")
        if self.response_format is not None and self.response_format.get("type") not in FORMATS:
            raise ValueError(
                f"has response_format {self.response_format!r:.60}; its type must be one of {', '.join(FORMATS)}"
            )
        if clash := sorted(OWN_KEYS & self.extra_body.keys()):
            raise ValueError(f"has extra_body.{clash[0]}, which another key of the scenario says; leave it out there")
        return self


class Variant(Sampling):
    """A variant of sampling in a class: its values replace those of the class."""

    weight: Number = Field(1.0, gt=0, le=1_000_000, description="share of requests, relative to the other variants")
    temperature: Number | None = Field(None, ge=0, le=2, description="replaces that of the class")


class SubAgents(Block):
    """Agents that a session starts after some of its answers. Its next turn waits for all of them."""

    share: Number = Field(gt=0, le=1, description="of the answers with a turn after them, those that start sub-agents")
    agents: Whole = Field(1, ge=1, le=64, description="that start together")
    turns: Turns = Field(description="requests of each; its pauses, tool results and answers are drawn as its parent's")
    prompt_tokens: Length = Field(description="of its first request, the shared prefix of its parent included")


class Session(Block):
    """Requests that follow one another, each with the conversation so far and the server's real answers.

    Either a person thinks between turns, or a tool runs and returns its result. A recorded session has both, and its
    prompts, from a trace.
    """

    turns: Turns | None = Field(None, description="requests of a session, the first one included; not if `recorded`")
    think_time_s: Seconds | None = Field(None, description="from the end of an answer to the person's next message")
    turn_tokens: Length | None = Field(None, description="what a person adds with every turn after the first")
    tool_pause_s: Seconds | None = Field(None, description="from the end of an answer to the tool's result")
    tool_result_tokens: Length | None = Field(None, description="what a tool adds with every turn after the first")
    sub_agents: SubAgents | None = Field(None, description="agents that the session starts and waits for")
    recorded: bool = Field(False, description="whole sessions of `from_file`: order, sub-agents, pauses and prompts")
    pause_scale: Number = Field(1.0, ge=0, le=1_000, description="of a recorded session: times each recorded pause")
    longest_pause_s: Number = Field(
        60.0, ge=0, le=86_400, description="of a recorded session: cuts longer pauses, after `pause_scale`"
    )

    @property
    def pause(self) -> Seconds | None:
        return self.think_time_s or self.tool_pause_s

    @property
    def message(self) -> Length | None:
        return self.turn_tokens or self.tool_result_tokens

    @model_validator(mode="after")
    def _one_partner(self):
        drawn = (self.turns, self.think_time_s, self.turn_tokens, self.tool_pause_s, self.tool_result_tokens)
        if self.recorded:
            if any(part is not None for part in (*drawn, self.sub_agents)):
                raise ValueError(
                    "is recorded, so the trace has its turns, pauses and sub-agents; leave the others out, or recorded"
                )
            return self
        if {"pause_scale", "longest_pause_s"} & self.model_fields_set and (
            self.pause_scale != 1.0 or self.longest_pause_s != 60.0
        ):
            raise ValueError("has pause_scale or longest_pause_s, which are of a recorded session; leave them out")
        if self.turns is None:
            raise ValueError("needs turns, or recorded: true with a trace of sessions in from_file")
        person, tool = (self.think_time_s, self.turn_tokens), (self.tool_pause_s, self.tool_result_tokens)
        for here, other in ((person, tool), (tool, person)):
            if None not in here and other == (None, None):
                return self
        raise ValueError(
            "needs think_time_s and turn_tokens (a person), or tool_pause_s and tool_result_tokens (an agent's tool); "
            "give one pair, and leave the other out"
        )


class RequestClass(Sampling):
    """One kind of request. `prompt_tokens` counts the shared prefix too, but not what a chat template adds."""

    klass: str = Field(
        min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.-]+$", description="its name, once in a file; not `all`"
    )
    tenant: str = Field("", max_length=64, pattern=r"^[A-Za-z0-9_.-]*$", description="sent as `x-sojourn-tenant`")
    adapter: str | None = Field(
        None, min_length=1, max_length=128, description="LoRA adapter that the requests name as their `model`"
    )
    model: str | None = Field(
        None,
        min_length=1,
        max_length=128,
        description="one of several models of the server, which the requests name; not beside `adapter`",
    )
    priority: Whole = Field(
        0, ge=-1_000_000, le=1_000_000, description="lower goes first under `policy: priority`; not in OpenAI's own API"
    )
    weight: Number = Field(
        1.0, gt=0, le=1_000_000, description="share of `one_class` arrivals, relative to the other classes"
    )
    prompt_tokens: Length = Field(description="shared prefix included, chat template not")
    output_tokens: Length = Field(description="sent as `max_tokens`")
    shared_prefix_tokens: Whole = Field(0, ge=0, le=10_000_000, description="must be below the shortest prompt")
    num_shared_prefixes: Whole = Field(1, ge=1, le=1_000_000, description="a request draws one of these")
    prefix_tree: PrefixTree | None = Field(
        None, description="prefixes that share prefixes, instead of the two keys above"
    )
    shared_part: Literal["first", "last"] = Field(
        "first", description="last: the request's own part stands before the shared one, and no cache finds it"
    )
    content: Literal["prose", "random", "blocks", "recorded"] = Field("prose", description="kind of the prompts' text")
    from_file: str | None = Field(
        None, min_length=1, description="a trace whose rows are shuffled and assigned to this class's requests"
    )
    block_tokens: Whole | None = Field(
        None,
        ge=1,
        le=65_536,
        description="tokens that each block of the trace becomes, with `content: blocks`; by default the trace's own",
    )
    variants: list[Variant] | None = Field(
        None, min_length=1, max_length=1_000, description="sampling settings, one drawn by `weight` for each request"
    )
    temperature: Number = Field(0.0, ge=0, le=2, description="0 is greedy; above 0 the server draws, see `send_seed`")
    send_seed: bool = Field(
        False, description="above temperature 0, a seed per request: a repeat draws the same tokens; see below"
    )
    ignore_eos: bool = Field(False, description="generate all of `output_tokens`; not in OpenAI's own API")
    session: Session | None = Field(None, description="more turns follow the first request")
    salt: Literal["none", "session"] = Field(
        "none", description="session: each session has a text of its own, so that no cache finds it in another one"
    )
    patience_s: Seconds | None = Field(None, description="from the due time; then the client closes the connection")
    patience_for: Literal["first_token", "answer"] | None = Field(
        None, description="what it waits for; the first token by default"
    )

    @property
    def has_turns(self) -> bool:
        """Whether a later request holds the answers to those before it, which only the run tells."""
        return self.session is not None and not self.session.recorded

    @model_validator(mode="after")
    def _session_draws_its_lengths(self):
        if self.session is not None and self.session.recorded:
            if self.from_file is None or self.content not in ("blocks", "recorded"):
                raise ValueError(
                    "has a recorded session, so its prompts are those of a trace: set from_file, and content to blocks "
                    "(hash ids) or recorded (texts)"
                )
        elif self.session is not None:
            later = (self.session.turn_tokens, self.session.tool_result_tokens, self.output_tokens)
            if any(length is not None and length.distribution == "trace" for length in later):
                raise ValueError(
                    "has a session and a length of distribution trace, but a row of a trace has no later turns; "
                    "take output_tokens, turn_tokens and tool_result_tokens from another distribution"
                )
            if any((each.n or 1) > 1 for each in (self, *(self.variants or ()))):
                raise ValueError("has a session and n above 1; a conversation goes on with one answer: leave n out")
        if self.patience_s is None and self.patience_for is not None:
            raise ValueError("has patience_for but no patience_s; add it, or leave patience_for out")
        return self

    @model_validator(mode="after")
    def _salts_what_is_shared(self):
        if self.salt == "session" and (self.session is None or self.prefix_tree is not None):
            raise ValueError(
                "has salt session, which is for classes with a session and without prefix_tree; leave it out"
            )
        return self

    @model_validator(mode="after")
    def _prefix_fits(self):
        shortest = self.prompt_tokens.bounds[0]
        if self.prefix_tree is not None and self.shared_prefix_tokens:
            raise ValueError(
                "has shared_prefix_tokens and prefix_tree; a tree of depth 1 is a pool: keep one of the two"
            )
        if self.session is not None and self.session.sub_agents is not None:
            shortest = min(shortest, self.session.sub_agents.prompt_tokens.bounds[0])
        if self.prefix_tree is not None and self.prefix_tree.tokens >= shortest:
            raise ValueError(
                f"prefix_tree is {self.prefix_tree.tokens} deep and must be below the shortest prompt, {shortest} "
                "tokens; shorten the tree, or raise the lower bound of prompt_tokens"
            )
        if self.shared_prefix_tokens >= shortest:
            raise ValueError(
                f"shared_prefix_tokens {self.shared_prefix_tokens} must be below the shortest prompt, {shortest} "
                "tokens; shorten the prefix, or raise the lower bound of prompt_tokens"
            )
        return self

    @model_validator(mode="after")
    def _names_one(self):
        if self.model is not None and self.adapter is not None:
            raise ValueError("has model and adapter, and a request names one of them; leave one out")
        return self

    @model_validator(mode="after")
    def _shares_what_it_places(self):
        if self.shared_part == "last" and (self.session is not None or not self.shared_prefix_tokens):
            raise ValueError(
                "has shared_part last, which is for requests of one turn with shared_prefix_tokens; set those, and "
                "leave session out, or leave shared_part out"
            )
        return self

    @model_validator(mode="after")
    def _content_has_its_source(self):
        if self.block_tokens is not None and self.content != "blocks":
            raise ValueError(f"has block_tokens, but content is {self.content}; set content: blocks, or leave it out")
        if self.content in ("prose", "random"):
            return self
        if self.session is not None and not self.session.recorded:
            raise ValueError(
                f"has content {self.content} and a session, whose later turns no row of a trace tells; leave one out, "
                "or take whole sessions with session: {recorded: true}"
            )
        if self.prompt_tokens.distribution != "trace" or self.prompt_tokens.scale != 1:
            raise ValueError(
                f"has content {self.content}, so its prompts are as long as the trace says: set prompt_tokens to "
                "{distribution: trace, min_tokens: ..., max_tokens: ...} without scale"
                + ("; block_tokens scales them" if self.content == "blocks" else "")
            )
        if self.shared_prefix_tokens or self.prefix_tree is not None:
            raise ValueError(f"has content {self.content}, which tells what is shared; leave the prefixes out")
        return self


class Workload(Block):
    """The classes of requests. `one_class` draws a class by weight; `every_class` sends one of each together."""

    each_arrival: Literal["one_class", "every_class"] = Field(
        "one_class", description="one class drawn by weight, or one of each at the same moment (not in a closed loop)"
    )
    classes: list[RequestClass] = Field(min_length=1, description="kinds of requests")
