"""Flags of the servers that vLLM's tests ask for, against those of the servers under test. Used by `attached.py`."""


def pairs(flags: list[str]) -> list[tuple[str, str]]:
    """(flag, value) of a command line's words, with an empty value where a flag has none."""
    found = []
    for word in flags:
        if word.startswith("--"):
            name, _, value = word.partition("=")
            found.append((name, value))
        elif found and not found[-1][1]:
            found[-1] = (found[-1][0], word)
    return found


def missing(flags: list[str], suite: dict[str, list[str]]) -> list[str]:
    """The flags that change answers and that the servers under test do not have: neither neutral nor given."""
    whole = [(name, f"{name}={value}" if value else name) for name, value in pairs(flags)]
    return [one for name, one in whole if name not in suite["neutral"] and not {name, one} & set(suite["given"])]
