"""Which fields of a settings model are keys of the configuration file.

A model names them in `file_keys`; without it all its fields are keys. Every other field is a constant: its default has
evidence, and only code gives another value: a test, a benchmark, the simulator, or a driver that makes a policy. A file
that names one is refused (`app/file_form.py`), and neither the schema nor the reference lists it.
"""

from typing import Any

from pydantic import BaseModel


def keys_of(model: type[BaseModel]) -> tuple[str, ...]:
    """Returns the names of the fields that a file may set, in order."""
    keys = getattr(model, "file_keys", None)
    return tuple(name for name in model.model_fields if keys is None or name in keys or name == "type")


def without_constants(schema: dict[str, Any], model: type[BaseModel]) -> None:
    """Removes the constants from a model's JSON schema; for `json_schema_extra`."""
    keys = keys_of(model)
    schema["properties"] = {name: of for name, of in schema["properties"].items() if name in keys}
