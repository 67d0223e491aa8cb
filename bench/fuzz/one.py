"""The process that fuzzes one target with libFuzzer: `python -m bench.fuzz.one TARGET FOLDER… [-libFuzzer options]`."""

import sys

import atheris

with atheris.instrument_imports(include=["engine", "loadgen", "metrics"]):
    from bench.fuzz.targets import TARGETS

    make, _ = TARGETS[sys.argv[1]]
    target = make()

if __name__ == "__main__":
    atheris.Setup([sys.argv[0], *sys.argv[2:]], target)
    atheris.Fuzz()
