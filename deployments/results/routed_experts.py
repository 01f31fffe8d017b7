"""Routed experts of a sample's tokens (rollout routing replay, R3), as a read-only array.

JSON has them as vLLM's `routed_experts`: base64 of a .npy file. numpy is loaded with the first one: clients over HTTP
start without it. Made by the records of samples, and from JSON.
"""

import io
from base64 import b64decode, b64encode
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from pydantic_core import CoreSchema, core_schema

if TYPE_CHECKING:
    import numpy as np

DTYPES = "uint8", "uint16"


class RoutedExperts:
    """`array`: uint8, or uint16 with more than 256 experts, [tokens, layers, experts of a token]; layers without
    experts have zeros. The last row is of the token before the sample's last one, which no pass has computed.
    """

    __slots__ = ("array",)

    def __init__(self, array: "np.ndarray"):
        """Takes an array without a copy. Raises ValueError for one of another type or shape."""
        if getattr(array, "ndim", 0) != 3 or array.dtype.name not in DTYPES:
            raise ValueError(f"routed experts are {' or '.join(DTYPES)} [tokens, layers, experts], see R3")
        self.array = array.view()
        self.array.flags.writeable = False

    @classmethod
    def joined(cls, parts: Iterable["np.ndarray | None"]) -> "RoutedExperts | None":
        """Returns the routes of successive parts; parts may have none, and then the next one has theirs. None without
        any."""
        import numpy as np

        found = [part for part in parts if part is not None]
        return cls(np.concatenate(found)) if found else None

    @classmethod
    def of(cls, value: Any) -> "RoutedExperts":
        """Returns routes given as such, as an array or as base64. Raises ValueError for anything else."""
        if isinstance(value, cls):
            return value
        if not isinstance(value, str):
            return cls(value)
        import numpy as np

        try:
            return cls(np.load(io.BytesIO(b64decode(value, validate=True)), allow_pickle=False))
        except EOFError as error:
            raise ValueError("routed experts: no .npy file in it") from error

    def base64(self) -> str:
        """Returns them as vLLM's answers have them."""
        import numpy as np

        file = io.BytesIO()
        np.save(file, self.array, allow_pickle=False)
        return b64encode(file.getvalue()).decode()

    def __len__(self) -> int:
        return len(self.array)

    def __eq__(self, other: object) -> bool:
        import numpy as np

        return isinstance(other, RoutedExperts) and np.array_equal(self.array, other.array)

    def __hash__(self) -> int:
        return hash(self.array.tobytes())

    def __reduce__(self) -> tuple:
        return RoutedExperts, (self.array,)

    def __repr__(self) -> str:
        return f"RoutedExperts({list(self.array.shape)}, {self.array.dtype.name})"

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls.of,
            json_schema_input_schema=core_schema.str_schema(),
            serialization=core_schema.plain_serializer_function_ser_schema(
                cls.base64, return_schema=core_schema.str_schema(), when_used="json"
            ),
        )
