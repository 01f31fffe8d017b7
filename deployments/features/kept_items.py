"""The items of the prompts that the service holds, by their names: a later turn of a conversation sends no data again.

An item whose data are empty in a request is the one that has its `mm_hash` as name. Invariant: nothing is kept for
later turns alone; an item is known for as long as some sample has it in its prompt. Called by `Prompts`, from any
thread.
"""

from weakref import WeakValueDictionary

from tailrace.deployments.features.item_check import item_refusal
from tailrace.deployments.features.prompt_features import ItemData, PromptFeatures
from tailrace.deployments.features.wire import MAX_BYTES, Features


class KeptItems:
    """Each item is one object in all prompts that have it."""

    def __init__(self):
        self._items: WeakValueDictionary[str, ItemData] = WeakValueDictionary()

    def __len__(self):
        return len(self._items)

    def features(self, given: Features) -> PromptFeatures:
        """Returns a prompt's features with all their data. Raises ValueError, one line, if they are invalid, and
        DataMissing if an item without data is not known.
        """
        features = PromptFeatures.of(given, self._items)
        every = [item.data for item in features.items]
        if (size := sum(len(item.content) + len(item.metadata) for item in every)) > MAX_BYTES:
            raise ValueError(f"features: {size} bytes; a prompt has at most {MAX_BYTES}")
        for item in every:
            if item.name not in self._items:  # else it has been checked
                self._check(item)
                self._items[item.name] = item
        return features

    @staticmethod
    def _check(item: ItemData) -> None:
        for part in filter(None, (item.content, item.metadata)):
            if (reason := item_refusal(part)) is not None:
                raise ValueError(f"features: an item of {item.modality!r}: {reason}")
