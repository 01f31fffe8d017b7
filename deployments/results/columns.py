"""Numbers of a sample's tokens, one for each, as a read-only array that behaves like a tuple.

A token takes 4 bytes in a column and over 30 in a tuple. Invariant: a column never changes, and holds the numbers that
it was given, bit by bit. When it is pickled by protocol 5, its array is a buffer of its own, which Ray's object store
shares with another process of the node without a copy. numpy is loaded with the first column: clients over HTTP start
without it. Made by the records of samples, and from the numbers of any result.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, SupportsIndex, overload

from pydantic_core import CoreSchema, core_schema

if TYPE_CHECKING:
    import numpy as np


class Column(Sequence):
    """Indexing and iteration give Python numbers, a slice gives a column over the same memory. Equal to the tuple and
    the list of its numbers, and hashed as the tuple. `array`: one dimension; not copied, so it must not change."""

    __slots__ = ("_array",)

    def __init__(self, array: "np.ndarray"):
        if array.flags.writeable:
            array = array.view()
            array.flags.writeable = False
        self._array = array

    @property
    def array(self) -> "np.ndarray":
        """The numbers as an array, read-only, without a copy."""
        return self._array

    def tolist(self) -> list:
        return self._array.tolist()

    def __len__(self) -> int:
        return len(self._array)

    @overload
    def __getitem__(self, place: SupportsIndex) -> int | float: ...
    @overload
    def __getitem__(self, place: slice) -> "Column": ...
    def __getitem__(self, place):
        found = self._array[place]
        return Column(found) if isinstance(place, slice) else found.item()

    def __iter__(self) -> Iterator:
        return iter(self._array.tolist())

    def __contains__(self, value: object) -> bool:
        return value in self._array.tolist()

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Column):
            import numpy as np

            return self is other or np.array_equal(self._array, other._array)
        if isinstance(other, tuple | list):
            return len(other) == len(self) and self._array.tolist() == list(other)
        return NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __add__(self, other: "Sequence") -> "Column":
        return _sum(self, other, self._array.dtype)

    def __radd__(self, other: "Sequence") -> "Column":
        return _sum(other, self, self._array.dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> "np.ndarray":
        import numpy as np

        return np.array(self._array, dtype, copy=copy)

    def __reduce__(self) -> tuple:
        return Column, (self._array,)

    def __repr__(self) -> str:
        return repr(tuple(self))


def repeated(numbers: Sequence[int], counts: Sequence[int]) -> Column:
    """Returns each number as often as its count says, int32."""
    import numpy as np

    return Column(np.repeat(np.array(numbers, np.int32), counts))


def _sum(one: Sequence, other: Sequence, dtype: "np.dtype") -> Column:
    import numpy as np

    kind = TOKENS if dtype.kind == "i" else LOGPROBS
    return Column(np.concatenate([kind.checked(one).array, kind.checked(other).array]))


def _token_array(given: "np.ndarray") -> "np.ndarray":
    if given.dtype.kind not in "iu":
        raise ValueError("give whole numbers in one list")
    import numpy as np

    found = given.astype(np.int32)
    if not np.array_equal(found, given):
        raise ValueError(f"{max(given, key=abs)} does not fit 32 bits")
    return found


def _logprob_array(given: "np.ndarray") -> "np.ndarray":
    """Returns float32 if it holds the numbers exactly, as it does for those of engines; else float64."""
    if given.dtype.kind not in "iuf":
        raise ValueError("give numbers in one list")
    import numpy as np

    exact = given.astype(np.float64)
    with np.errstate(over="ignore"):
        short = given.astype(np.float32)
    return short if np.array_equal(short, exact, equal_nan=True) else exact


@dataclass(frozen=True)
class ColumnKind:
    """A column in a pydantic model, made from a list, tuple, array or column; a list in JSON. `dtypes`: accepted types,
    the usual one first. `fit`: converts an array to one of them, or raises ValueError.
    """

    fit: Callable[["np.ndarray"], "np.ndarray"]
    dtypes: tuple[str, ...]
    number: CoreSchema

    def checked(self, values: Iterable) -> Column:
        """Returns a column of these values. Raises ValueError, in one line."""
        import numpy as np

        if isinstance(values, Column) and values.array.dtype.name in self.dtypes:
            return values
        if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
            raise ValueError("give numbers in one list")
        array = np.asarray(values if isinstance(values, Sequence | np.ndarray) else list(values))
        if array.ndim != 1:
            raise ValueError("give numbers in one list")
        return Column(self.fit(array) if array.size else np.empty(0, self.dtypes[0]))

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            self.checked,
            json_schema_input_schema=core_schema.list_schema(self.number),
            serialization=core_schema.plain_serializer_function_ser_schema(
                tuple, return_schema=core_schema.tuple_variable_schema(self.number)
            ),
        )


TOKENS = ColumnKind(_token_array, ("int32",), core_schema.int_schema())
LOGPROBS = ColumnKind(_logprob_array, ("float32", "float64"), core_schema.float_schema())

TokenColumn = Annotated[Column, TOKENS]
"""int32."""

LogprobColumn = Annotated[Column, LOGPROBS]
"""float32; float64 only if a list was given whose numbers need it."""
