"""YAML from files that people write. Every fault is a ValueError of one line, with the line where it is known."""

from pathlib import Path
from typing import Any

import yaml

MAX_BYTES = 1 << 20
"""The longest file of this project has 20 kB; one that refers to itself many times can fill the memory."""


class _Loader(yaml.SafeLoader):
    """Refuses keys that are given twice: YAML forbids them, and PyYAML takes the last."""

    def construct_mapping(self, node, deep=False):
        seen = set()
        for key_node, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if isinstance(key_node, yaml.ScalarNode) and key_node.tag != "tag:yaml.org,2002:merge":
                if key_node.value in seen:
                    raise ValueError(f"line {key_node.start_mark.line + 1}: {key_node.value}: the key is there twice")
                seen.add(key_node.value)
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> Any:
    """Returns the value in a file. Passes on OSError."""
    data = path.read_bytes()
    if len(data) > MAX_BYTES:
        raise ValueError(f"it has {len(data)} bytes; {MAX_BYTES} is the limit")
    try:
        return yaml.load(data.decode("utf-8-sig"), _Loader)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start + 1}") from error
    except RecursionError as error:
        raise ValueError("not usable: it is nested too deeply") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark else ""
        problem = " ".join(str(getattr(error, "problem", None) or error).split())
        raise ValueError(f"{where}not YAML: {problem}") from error
