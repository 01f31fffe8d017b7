"""The images of a prompt as features, in the format of `/inference/v1/generate`."""

from collections.abc import Iterable, Sequence

from tailrace.deployments.features.wire import Features, PlaceholderSpan
from tailrace.deployments.messages.trajectory import PromptImage


def spans_of(images: Iterable[PromptImage]) -> tuple[PlaceholderSpan, ...]:
    """Returns the placeholders of images."""
    return tuple(PlaceholderSpan(offset=image.offset, length=image.length) for image in images)


def image_features(images: Sequence[PromptImage], items: Sequence[str]) -> Features:
    """Returns the features of all images of a prompt. `items`: their processed content, in base64."""
    return Features(
        mm_hashes={"image": tuple(image.name for image in images)},
        mm_placeholders={"image": spans_of(images)},
        kwargs_data={"image": tuple(items)},
    )
