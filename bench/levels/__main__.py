"""Planted faults and public reports on a real vLLM: what each level of evidence says of them.

    python -m bench.levels collect --python .../vllm/bin/python --model CHECKPOINT --into FOLDER
    python -m bench.levels judge FOLDER
    python -m bench.levels write FOLDER

`collect` starts servers and loads them. `judge` reads what it stored, offline, by the code as it is then. `write` makes
docs/results/levels.md of the judgement.
"""

import argparse
from pathlib import Path

from bench.levels.cases import CASES
from bench.levels.collect import collect
from bench.levels.judge import judge
from bench.levels.write import PAGE, page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    measures = verbs.add_parser("collect")
    measures.add_argument("--python", required=True, help="the interpreter of vLLM's environment")
    measures.add_argument("--model", required=True, type=Path, help="a checkpoint with its tokenizer")
    measures.add_argument("--into", required=True, type=Path)
    measures.add_argument("--seed", type=int, default=0, help="of arrivals and prompts: another one is another run")
    measures.add_argument("--case", action="append", help="only these; repeatable")
    for verb in ("judge", "write"):
        verbs.add_parser(verb).add_argument(
            "folder", type=Path, nargs="+", help="those that collect filled, each a run of its cases"
        )
    chosen = parser.parse_args()
    if chosen.verb == "collect":
        wanted = [case for case in CASES if not chosen.case or case.name in chosen.case]
        collect(chosen.python, chosen.model.resolve(), chosen.into.resolve(), wanted, chosen.seed)
    elif chosen.verb == "judge":
        judge(chosen.folder)
        print(page(chosen.folder))
    else:
        PAGE.write_text(page(chosen.folder), encoding="utf-8")


if __name__ == "__main__":
    main()
