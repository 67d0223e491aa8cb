"""What pyproject.toml cannot say: the folders of a checkout are installed inside one package."""

ROOMS = (
    "commands", "dashboards", "diagnosis", "engine", "interop", "live", "loadgen", "metrics", "replay", "scale",
    "scenarios", "scripting", "triage", "ui",
)  # fmt: skip

if __name__ == "__main__":  # else somebody reads the list
    from setuptools import find_namespace_packages, setup

    INSIDE = find_namespace_packages(include=[f"{room}*" for room in ROOMS])
    setup(
        packages=["sojourn", *(f"sojourn.{name}" for name in INSIDE)],
        package_dir={"sojourn": "sojourn"} | {f"sojourn.{room}": room for room in ROOMS},
    )
