"""An error of a value inside another value, with the rest of its dotted key."""


class KeyedError(ValueError):
    """`key`: dotted, starting from the value that is being checked."""

    def __init__(self, key: str, message: str):
        super().__init__(f"{key}: {message}")
        self.key, self.message = key, message
