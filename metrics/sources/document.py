"""The page `docs/foreign-servers.md`: what is seen of which server, made from the sources."""

from metrics.catalog.catalog import METRIC_BY_NAME
from metrics.ledger import ACCOUNTS
from metrics.sources.registry import SOURCES
from metrics.sources.source import Source, Sum, Term, Translation
from metrics.sources.view import BY_CLIENT

INTRODUCTION = """\
# Foreign servers

Made from `metrics/sources` by `python -m metrics.sources.document > docs/foreign-servers.md`; change it there.

`sojourn load SCENARIO --base-url URL` replays a scenario against any OpenAI-compatible server. The client's side is
exact whatever the server: each request is timed from when it was *meant* to be sent to its last byte, with tokens,
failures and objectives. Of the server's inside there is what its `/metrics` tells, scraped once a second from before
the first request to after the last one, and read in the names of our own [catalogue](metrics.md). The report is the
same as of our own engine; what cannot be seen is marked so, and is neither 0 nor left out.

- **Sums over the run.** Counters and histograms give totals and means over all requests that the server finished in the
  meantime, those of other clients included. Where its counts differ from the client's, the report says so.
- **Nothing of one request, nothing of the late ones.** A mean over all requests cannot tell what those that missed an
  objective had in common.
- **Gauges are samples**, one a second: what came and went in between is not seen.
- **What no metric explains is `unaccounted`**: the client's mean latency less its own lag and less what the server
  measured. As far as the server has an end-to-end latency of its own, the report says how much of it lies inside.
- A server that begins anew resets its counters; what they had gained since the last scrape is lost, and said so. A
  scrape that fails or takes longer than a second is counted and shown.

On one host our own server's records tell all of it: `sojourn serve MODEL --run-dir runs/server` and
`sojourn load … --server-run runs/server`.

This is the part of a report that is the metrics' own (vLLM 0.32.0 on 2 cores of an AMD EPYC beside other work, the
bundled model, 48 requests; 2026-11-21):

```
part of the time   mean, ms   all time                        to first token
────────────────────────────────────────────────────────────────────────────
client.lag                        0.1%                                  1.5%
queue                   0.0       0.0%                                  0.0%
prefill               261.5       6.2%   █▎                            61.3%
decode              3,827.4      90.1%   ██████████████████                –
unaccounted                       3.5%   ▊                             37.3%
unaccounted: 137.8 ms inside vLLM's own end-to-end latency, 12.7 ms outside of
it (client.network, token.decode, request.stream)

running      8.2 on average, 18 at most (22 samples)
waiting      0.0 on average, 0 at most (22 samples)
KV use       0.2% on average, 0.5% at most
prefix hits  65.3% of the prompt tokens
preemptions  0
TTFT         398.2 ms on average, p99 between 0.75 and 1 s

Client and server agree: 48 finished requests, 9,215 prompt tokens, 768 output tokens
```

## Which accounts of the ledger can be seen
"""
SEES = {"seen": "seen", "partly": "in part", "unseen": "unseen"}


def render_markdown() -> str:
    """The whole page."""
    lines = [INTRODUCTION.rstrip("\n"), "", *_accounts()]
    for source in SOURCES:
        lines += ["", f"## {source.title}", "", *_source(source)]
    return "\n".join(lines) + "\n"


def _accounts() -> list[str]:
    heads = [f"{source.title} ({source.facts})" for source in SOURCES]
    lines = [f"| account | {' | '.join(heads)} |", f"|---|{'---|' * len(heads)}"]
    for info in ACCOUNTS:
        cells = [_sight(source, info.name) for source in SOURCES]
        lines.append(f"| `{info.name}` | {' | '.join(cells)} |")
    return lines


def _sight(source: Source, account: str) -> str:
    sight = BY_CLIENT if account == "client.lag" else source.sights.get(account)
    return f"**{SEES[sight.visibility]}**: {sight.why}" if sight is not None else "**unseen**: no metric of it"


def _source(source: Source) -> list[str]:
    own = all(len(item.theirs) == 1 and item.theirs[0] == (Term(item.ours),) for item in source.translations)
    lines = ["Stretches of a request's time that it measures as a whole, means over all requests:", ""]
    if own:
        return ["Every family of the [catalogue](metrics.md) is itself. Each account is a sum of its own, from",
                "`sojourn_request_ledger_seconds_total` and `sojourn_request_ttft_ledger_seconds_total`; only "
                "`client.network` takes the run directory."]  # fmt: skip
    lines += ["| stretch | accounts in it | from | meaning |", "|---|---|---|---|"]
    for span in source.spans:
        accounts = ", ".join(f"`{account}`" for account in span.accounts)
        lines.append(f"| {span.name} | {accounts} | {_sum(span.seconds)} / {_sum(span.requests)} | {span.meaning} |")
    lines += ["", "Families in the catalogue's names:", "", "| ours | theirs | differs |", "|---|---|---|"]
    lines += [f"| {_ours(item)} | {_theirs(item)} | {item.differs or '–'} |" for item in source.translations]
    return lines


def _ours(item: Translation) -> str:
    labels = ",".join(f'{label}="{value}"' for label, value in item.labels)
    kind = METRIC_BY_NAME[item.ours].kind
    return f"`{item.ours}{{{labels}}}` ({kind})" if labels else f"`{item.ours}` ({kind})"


def _theirs(item: Translation) -> str:
    return " or ".join(_sum(terms) for terms in item.theirs)


def _sum(terms: Sum) -> str:
    written = [f"{'−' if term.sign < 0 else '+'} `{_term(term)}`" for term in terms]
    return " ".join(written).removeprefix("+ ")


def _term(term: Term) -> str:
    labels = ",".join(f'{label}="{value}"' for label, value in term.where)
    return f"{term.name}{{{labels}}}" if labels else term.name


if __name__ == "__main__":
    print(render_markdown(), end="")
