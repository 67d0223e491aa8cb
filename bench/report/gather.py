"""Puts the reports of several benchmarks into one JSON file and one Markdown file, and into a document with --document.

python -m bench.report.gather FOLDER NAME REPORT... [--document docs/results/performance.md]

reads FOLDER/REPORT.json for each REPORT that is there, and FOLDER/stages.txt likewise; writes FOLDER/NAME.json and
NAME.md. With --document each report also replaces what stands there between `<!-- begin NAME-REPORT -->` and its `end`.
"""

import argparse
from pathlib import Path

import msgspec

from bench.report.tables import markdown, place
from bench.results import BenchError, Report, read_report


def gather(folder: Path, name: str, wanted: list[str]) -> tuple[dict[str, Report], list[str]]:
    """The reports that are there, by name, and what the stages said. Writes both files."""
    reports = {each: read_report(folder / f"{each}.json") for each in wanted if (folder / f"{each}.json").is_file()}
    stages = (
        (folder / "stages.txt").read_text(encoding="utf-8").splitlines() if (folder / "stages.txt").is_file() else []
    )
    content = msgspec.json.encode({"stages": stages, "reports": reports})
    (folder / f"{name}.json").write_bytes(msgspec.json.format(content, indent=1))
    parts = ["\n".join(f"- {stage}" for stage in stages)] if stages else []
    parts += [f"## {report.title}\n\n{markdown(report)}" for report in reports.values()]
    (folder / f"{name}.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return reports, stages


def main() -> None:
    parser = argparse.ArgumentParser(description="Puts reports of sojourn dev bench together.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("name")
    parser.add_argument("reports", nargs="+")
    parser.add_argument("--document", type=Path)
    options = parser.parse_args()
    try:
        reports, _ = gather(options.folder, options.name, options.reports)
        for each, report in reports.items() if options.document is not None else ():
            place(options.document, f"{options.name}-{each}", markdown(report))
    except BenchError as error:
        parser.error(str(error))
    print(f"wrote {options.folder / options.name}.json and .md: {', '.join(reports) or 'no report was there'}")


if __name__ == "__main__":
    main()
