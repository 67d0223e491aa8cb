"""python -m bench.sizing [page] · python -m bench.sizing agree RUN [OTHER...]

`page` writes docs/results/sizing.md; it needs the extra `silicon`. `agree` takes a run with step records, and further
runs of the same server: `size` gets the steps of the first one, and the load of each; the page shows what it says
beside what was measured.
"""

import sys
from pathlib import Path

from bench.sizing.agreement import agree, write_agreement
from bench.sizing.articles import PAGE, page


def main(arguments: list[str]) -> None:
    if not arguments or arguments == ["page"]:
        PAGE.write_text(page(), encoding="utf-8")
        print(f"wrote {PAGE}")
    elif arguments[0] == "agree" and len(arguments) >= 2:
        write_agreement(agree([Path(each) for each in arguments[1:]]))
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
