"""Features in vLLM's types, decoded by its own decoder after `item_check`. Called on the engine's thread.

Invariant: vLLM's hash of an item is its name, which is made from its content.
"""

from tailrace.deployments.features.item_check import item_refusal
from tailrace.deployments.features.prompt_features import ItemData, PromptFeatures


def prompt_input(features: PromptFeatures, token_ids: list[int], cache_salt: str):
    """Returns vLLM's engine input of a prompt. Raises ValueError for an invalid item."""
    from vllm.inputs.engine import mm_input
    from vllm.multimodal.inputs import MultiModalKwargsItems

    parts = specs(features)
    by_modality = {part.modality: [one for one in parts if one.modality == part.modality] for part in parts}
    return mm_input(
        prompt_token_ids=token_ids,
        mm_kwargs=MultiModalKwargsItems({name: [one.data for one in of] for name, of in by_modality.items()}),
        mm_hashes={name: [one.identifier for one in of] for name, of in by_modality.items()},
        mm_placeholders={name: [one.mm_position for one in of] for name, of in by_modality.items()},
        cache_salt=cache_salt,
    )


def specs(features: PromptFeatures) -> list:
    """Returns vLLM's MultiModalFeatureSpec of each item, in order. Raises ValueError for an invalid item."""
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    return [
        MultiModalFeatureSpec(
            data=_decoded(item.data),
            modality=item.data.modality,
            identifier=item.name,
            mm_position=PlaceholderRange(offset=item.offset, length=item.length),
            mm_hash=item.name,
        )
        for item in features.items
    ]


def _decoded(item: ItemData):
    """Returns vLLM's MultiModalKwargsItem of an item."""
    from vllm.entrypoints.scale_out.token_in_token_out.mm_features import merge_mm_kwargs_items
    from vllm.multimodal.inputs import MultiModalKwargsItem
    from vllm.v1.serial_utils import MsgpackDecoder

    decoder, parts = MsgpackDecoder(t=MultiModalKwargsItem), (item.content, item.metadata)
    for part in parts:
        if part and (reason := item_refusal(part)) is not None:
            raise ValueError(reason)
    return merge_mm_kwargs_items(*(decoder.decode(part) if part else None for part in parts))
