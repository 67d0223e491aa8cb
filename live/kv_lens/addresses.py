"""Where live servers publish KV events: addresses as a caller gives them, and what a server says of itself."""

import json
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

from sojourn.live.kv_lens.sockets import KvEndpoint
from sojourn.live.watch.fetch import base_of, fetch
from sojourn.metrics.errors import InputError, ServerError

TIMEOUT_S = 5.0
MOST_RANKS = 256


def endpoints_from(
    sources: Sequence[str], replay: Sequence[str] = (), topic: str = ""
) -> tuple[list[KvEndpoint], list[str]]:
    """The sockets to read, and the http addresses among the sources: their /metrics counts lookups.

    `replay` are addresses that answer for missed messages, in the order of the sources that are no http addresses.
    Raises InputError, and ServerError where a server does not say where it publishes.
    """
    urls = [source for source in sources if source.startswith("http") or "://" not in source]
    addresses = [source for source in sources if source not in urls]
    if len(replay) not in (0, len(addresses)):
        raise InputError(f"{len(replay)} --replay are given for {len(addresses)} addresses of events; give one each")
    found = [KvEndpoint(address, *replay[place : place + 1], topic=topic) for place, address in enumerate(addresses)]
    return [*found, *(each for url in urls for each in endpoints_of(url))], urls


def endpoints_of(url: str) -> list[KvEndpoint]:
    """The sockets that a server names in /server_info, one pair a rank: ours, and SGLang's. Raises ServerError where it
    names none."""
    base = base_of(url)
    status, body = fetch(f"{base}/server_info", TIMEOUT_S)
    try:
        facts = json.loads(body) if status == 200 else {}
    except ValueError:
        facts = {}
    facts = facts if isinstance(facts, dict) else {}
    found, blocks = facts.get("kv_events"), facts.get("num_kv_blocks")
    host = urlsplit(base).hostname or ""
    endpoints = list(_named(found, f"[{host}]" if ":" in host else host, blocks)) if isinstance(found, dict) else []
    if not endpoints:
        raise ServerError(
            f"{base} does not say where it publishes KV events; give their address, such as tcp://127.0.0.1:5557, with "
            f"--metrics {base}. vLLM publishes with --kv-events-config, ours with --kv-events"
        )
    return endpoints


def _named(facts: dict[str, Any], host: str, blocks: Any) -> Iterator[KvEndpoint]:
    """Ours names addresses; SGLang the first port of its ranks. What is bound everywhere is at the host that was
    asked."""
    topic = str(facts.get("topic") or "")
    if isinstance(address := facts.get("endpoint"), str):
        addresses = [address, facts.get("replay_endpoint")]
        for everywhere in ("tcp://*:", "tcp://0.0.0.0:", "tcp://[::]:"):
            addresses = [each and str(each).replace(everywhere, f"tcp://{host}:") for each in addresses]
        yield KvEndpoint(addresses[0], addresses[1], topic, blocks if isinstance(blocks, int) else None)
        return
    first, ranks = facts.get("endpoint_port_base"), facts.get("dp_size") or 1
    replay = facts.get("replay_endpoint_port_base")
    if isinstance(first, int) and isinstance(ranks, int):
        for rank in range(min(ranks, MOST_RANKS)):
            asking = f"tcp://{host}:{replay + rank}" if isinstance(replay, int) else None
            yield KvEndpoint(f"tcp://{host}:{first + rank}", asking, topic)
