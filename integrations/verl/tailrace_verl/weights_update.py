"""What the ranks of the trainer agree on before they send weights. Made by the server, read by every rank."""

from typing import NamedTuple

from tailrace_verl.settings import Settings


class WeightsUpdate(NamedTuple):
    """`unsaved`: names that the trainer has and the model's folder has not, so the service does not expect them."""

    version: int
    settings: Settings
    unsaved: tuple[str, ...]
