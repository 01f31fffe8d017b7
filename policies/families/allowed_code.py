"""The packages whose code a dotted path may name. A path into any other package is refused before it is imported.

Tailrace itself and packages with entry points of the group `tailrace.policies` are allowed. More are added by
`allow_code`: for `--allow-code`, for `allowed_code` of a deployment's own file, or by a program for its own packages.
Invariant: the list belongs to the process and only grows; no message and no journal adds to it. Read by `registry`.
"""

from importlib import metadata

ENTRY_POINTS = "tailrace.policies"
"""Group of entry points by which an installed package names its policies: `ordering.shortest_first = pkg:Class`."""

_added: set[str] = set()


def allow_code(*packages: str) -> None:
    """Allows dotted paths into these packages, in this process. Raises ValueError unless each is one plain name."""
    for package in packages:
        if not isinstance(package, str) or not package.isidentifier():
            raise ValueError(f"allowed_code: {package!r} is not the name of a top-level package, such as my_package")
    _added.update(packages)


def added_code() -> tuple[str, ...]:
    """Returns the packages that `allow_code` has added, in order of names."""
    return tuple(sorted(_added))


def check_allowed(path: str) -> None:
    """Raises ValueError, in one line, if the package of a dotted path `module:Class` is not allowed. Imports
    nothing.
    """
    package = path.partition(":")[0].partition(".")[0]
    if package == "tailrace" or package in _added:
        return
    if package not in {entry.module.partition(".")[0] for entry in metadata.entry_points(group=ENTRY_POINTS)}:
        mend = f"allow it by --allow-code {package}, or by allowed_code in the Coordinator's user_config"
        raise ValueError(f"{path!r}: code of package {package!r} is not allowed and was not imported; {mend}")
