"""The files of a model's folder that define its tokenizer: reads them, names them by their content, writes them
elsewhere.

Invariant: folders with the same name decode alike. Called by `Prompts`, the coordinator and the client.
"""

from hashlib import blake2b
from pathlib import Path

KINDS = (".json", ".txt", ".model", ".jinja", ".tiktoken")
MOST_BYTES = 64 << 20
"""Maximum size of a file: vocabularies have some megabytes."""


def tokenizer_files(folder: Path) -> dict[str, bytes]:
    """Returns the content of the tokenizer's files by name, in order of names; only files directly in `folder`. Empty
    if it is no folder.
    """
    paths = sorted(path for path in folder.glob("*") if path.name.endswith(KINDS))
    return {
        path.name: path.read_bytes()
        for path in paths
        if not path.name.endswith(".index.json") and path.is_file() and path.stat().st_size <= MOST_BYTES
    }


def name_of_tokenizer(files: dict[str, bytes]) -> str:
    """Returns a digest of names and contents; empty without files."""
    digest = blake2b(digest_size=8)
    for name, content in files.items():
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest() if files else ""
