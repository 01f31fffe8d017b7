"""Writes a software bill of materials: the locked packages as CycloneDX 1.6, in JSON.

The bill has one component for each package and hash: name, version, SHA-256, package URL, and the locks that have it.
No network and no clock are used, so the same locks give the same bytes. Run by `make sbom`; `sbom.py gpu` writes the
bill of one lock.
"""

import json
import re
import sys
import tomllib
import uuid
from pathlib import Path
from urllib.parse import quote

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ("cpu", "torch", "gpu", "dev")
PIN = re.compile(r"(?P<name>\S+)==(?P<version>\S+) --hash=sha256:(?P<sha256>[0-9a-f]{64})")


def pins(lock: str) -> list[tuple[str, str, str]]:
    """Returns name, version and SHA-256 of each package of a lock. Raises ValueError at a line that is no pin."""
    found = []
    for line in (ROOT / "requirements" / f"{lock}.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            match = PIN.fullmatch(line)
            if match is None:
                raise ValueError(f"requirements/{lock}.txt: not a pin with one hash: {line}")
            found.append((match["name"], match["version"], match["sha256"]))
    return found


def purl(name: str, version: str) -> str:
    return f"pkg:pypi/{name}@{quote(version, safe='.')}"


def component(name: str, version: str, sha256: str, locks: list[str]) -> dict:
    return {
        "type": "library",
        "bom-ref": f"{purl(name, version)}#{sha256[:12]}",
        "name": name,
        "version": version,
        "purl": purl(name, version),
        "hashes": [{"alg": "SHA-256", "content": sha256}],
        "properties": [{"name": "tailrace:lock", "value": lock} for lock in locks],
    }


def bill(locks: tuple[str, ...] = LOCKS) -> dict:
    """Returns the bill of these locks."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found: dict[tuple[str, str, str], list[str]] = {}
    for lock in locks:
        for pin in pins(lock):
            found.setdefault(pin, []).append(lock)
    components = [component(*pin, names) for pin, names in sorted(found.items())]
    subject = {
        "type": "application",
        "bom-ref": purl(project["name"], project["version"]),
        "name": project["name"],
        "version": project["version"],
        "purl": purl(project["name"], project["version"]),
        "licenses": [{"license": {"id": project["license"]}}],
    }
    references = [each["bom-ref"] for each in components]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, json.dumps([subject, components]))}",
        "version": 1,
        "metadata": {"component": subject},
        "components": components,
        "dependencies": [{"ref": subject["bom-ref"], "dependsOn": references}],
    }


if __name__ == "__main__":
    chosen = tuple(sys.argv[1:]) or LOCKS
    if unknown := set(chosen) - set(LOCKS):
        sys.exit(f"no lock is called {min(unknown)}; known: {', '.join(LOCKS)}")
    made = bill(chosen)
    target = ROOT / "out" / "sbom.cdx.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(made, indent=1) + "\n")
    print(f"out/{target.name}: {len(made['components'])} components")
