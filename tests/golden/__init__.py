"""What the code says of drawn inputs, to the last digit: a change of the structure must not change it.

    python -m tests.golden check                    compares with tests/golden/digests.json, names what differs
    python -m tests.golden check --texts FOLDER     writes the texts too, to compare two trees file by file
    python -m tests.golden take                     writes digests.json, after a difference was explained

`--only streams` (repeatable) takes one kind alone. All take about six minutes on two cores.
"""
