"""Builds everything that Prometheus and Grafana need: dashboards, rules and the compose file, in one flat folder."""

import json
from pathlib import Path

import yaml

from sojourn.dashboards.alerts import AlertOptions
from sojourn.dashboards.boards import BOARDS
from sojourn.dashboards.factory import dashboard
from sojourn.dashboards.rules import DEFAULTS, prometheus_rule, rules
from sojourn.dashboards.stack import Stack
from sojourn.metrics.whole_file import write_whole

GENERATED = Path(__file__).with_name("generated")
HEADER = "# Generated from the metric catalogue and dashboards/ by `sojourn server dashboards`; change it there.\n"
SERVERS_HERE = Stack()


def build_dashboards(
    out_dir: Path | str = GENERATED, options: AlertOptions = DEFAULTS, stack: Stack = SERVERS_HERE
) -> list[Path]:
    """Writes one `sojourn-<name>.json` a dashboard, `rules.yaml`, the same rules as an object of Kubernetes, and the
    compose stack; returns their paths.

    Files of the same names are replaced, others are left alone. Raises NotADirectoryError if `out_dir` is a file.
    """
    out_dir = Path(out_dir)
    if out_dir.exists() and not out_dir.is_dir():
        raise NotADirectoryError(f"{out_dir} is a file; give a folder to write the dashboards into")
    out_dir.mkdir(parents=True, exist_ok=True)
    return [write_whole(out_dir / name, text) for name, text in contents(options, stack).items()]


def contents(options: AlertOptions = DEFAULTS, stack: Stack = SERVERS_HERE) -> dict[str, str]:
    """File name → text of everything that `build_dashboards` writes."""
    boards = {
        f"{board.uid}.json": json.dumps(dashboard(board, options.app_url), indent=1, ensure_ascii=False) + "\n"
        for board in BOARDS
    }
    objects = {"rules.yaml": rules(options), "prometheus_rule.yaml": prometheus_rule(options), **stack.files()}
    texts = {
        name: HEADER + yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=120)
        for name, data in objects.items()
    }
    return {**boards, **texts}


if __name__ == "__main__":
    for written in build_dashboards():
        print(written)
