"""The dashboard of several servers behind a router: side by side, together, and how unequal they are.

Its metrics stand on the dashboards of the lifecycles, too; here they are by `instance`, the label of a server.
"""

from sojourn.dashboards.content import Row
from sojourn.dashboards.views import Panel, Query, gauge, rate, share
from sojourn.metrics.catalog.catalog import GOOD

_LOOKUPS = "sojourn_memory_prefix_tokens_total"
_TOKENS = "sojourn_token_scheduled_tokens_total"
_OBJECTIVE = "sojourn_request_objective_total"
_ENDED = "sojourn_request_finished_total"
_HIT = 'result="hit"'
_GOOD = f'objective="{GOOD}"'
_EACH = "{{instance}}"


def _uneven(by_instance: str) -> str:
    """Most over mean; nothing where all have none."""
    return f"max ({by_instance}) / (avg ({by_instance}) > 0)"


def _by_server(title: str, name: str, unit: str, quantile: float, width: int) -> Panel:
    buckets = rate(f"{name}_bucket", by="le, instance")
    return Panel(title, unit, (Query(f"histogram_quantile({quantile:g}, {buckets})", _EACH),), width=width)


FLEET = (
    Row("The fleet as one", (
        share("Good requests", rate(_OBJECTIVE, where=f'{_GOOD},outcome="met"'), rate(_OBJECTIVE, where=_GOOD),
              "good requests", shape="number", width=4,
              note="Share of the ended requests of all servers that met every objective; empty without objectives."),
        Panel("Servers up", "suffix: servers", (Query(f"count ({gauge('sojourn_request_running', by='instance')})",
              "servers"),), shape="number", width=4, is_derived=True,
              note="Servers whose metrics Prometheus scrapes now."),
        Panel("Requests ended, by server", "reqps", (Query(rate(_ENDED, by="instance"), _EACH),), shape="stack"),
        Panel("Tokens computed, by server", "suffix: tokens/s", (Query(rate(_TOKENS, by="instance"), _EACH),),
              shape="stack"),
    )),
    Row("Load balance", (
        Panel("Imbalance: maximum over mean", "suffix: times the mean", (
            Query(_uneven(rate(_TOKENS, by="instance")), "tokens computed"),
            Query(_uneven(rate(_ENDED, by="instance")), "requests ended"),
            Query(_uneven(gauge("sojourn_request_waiting", by="instance")), "waiting"),
        ), note="1 is even; as many as there are servers, if one has all. Beside a router that prefers cached "
                "prefixes, some of it is wanted."),
        Panel("Waiting, by server", "suffix: requests", (
            Query(gauge("sojourn_request_waiting", by="instance"), _EACH),), shape="stack",
              note="A queue at one server while another has none: the router does not look at load."),
        Panel("KV in use, by server", "percentunit", (
            Query(gauge("sojourn_memory_kv_usage_ratio", by="instance", operator="max"), _EACH),)),
        _by_server("Time to first token, p90 by server", "sojourn_request_ttft_seconds", "s", 0.9, 12),
        _by_server("Inter-token latency, p90 by server", "sojourn_request_itl_seconds", "s", 0.9, 12),
    )),
    Row("Prefix hit rate, by server and fleet", (
        Panel("Prefix hit rate, by server", "percentunit", (
            Query(f'{rate(_LOOKUPS, by="instance", where=_HIT)} / {rate(_LOOKUPS, by="instance")}', _EACH),
            Query(f"{rate(_LOOKUPS, where=_HIT)} / {rate(_LOOKUPS)}", "fleet"),
        ), width=12, note="A server far below the fleet is sent prompts that others hold. Prometheus does not know "
                          "what another server held: the app's page Fleet does."),
        Panel("Prefix hit rate without eviction, by server", "percentunit", (
            Query(f'{rate("sojourn_memory_infinite_hit_tokens_total", by="instance")} / '
                  f'{rate(_LOOKUPS, by="instance")}', _EACH),
        ), width=12, note="What each server would hit if it kept all. What lies above the hits is lost by eviction."),
    )),
    Row("Server by server", (
        Panel("Requests at $instance", "suffix: requests", (
            Query(gauge("sojourn_request_running"), "running"), Query(gauge("sojourn_request_waiting"), "waiting"),
        ), repeats=True),
        Panel("KV blocks at $instance", "suffix: blocks", (
            Query(gauge("sojourn_memory_kv_blocks", by="state"), "{{state}}"),), shape="stack", repeats=True),
        Panel("Tokens computed at $instance", "suffix: tokens/s", (Query(rate(_TOKENS, by="kind"), "{{kind}}"),),
              shape="stack", repeats=True),
        Panel("Device busy at $instance", "percentunit", (
            Query(rate("sojourn_compute_device_seconds_total", operator="avg"), "busy"),), repeats=True,
              note="Share of wall time."),
    )),
)  # fmt: skip
