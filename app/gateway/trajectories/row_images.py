"""The images of a trajectory's rows: processed again from their files, which the trajectory keeps."""

import asyncio

from tailrace.app.gateway.images.sent_image import SentImage
from tailrace.app.gateway.service import GatewayService
from tailrace.app.gateway.trajectories.tree import TrajectoryTree


async def row_images(service: GatewayService, tree: TrajectoryTree, known: dict[str, str] | None = None) -> dict:
    """Returns the processed content of all images of a tree, in base64, by their names. `known`: some of them. Raises
    RuntimeError if an image cannot be made again here.
    """
    found = dict(known or {})
    while missing := {one.name: one.sent for turn in tree.turns for one in turn.images if one.name not in found}:
        images, loop = (await service.model()).images, asyncio.get_running_loop()
        for name, content in missing.items():
            made = await loop.run_in_executor(images.thread, images.process, [SentImage.of_file(content)], (), 1)
            if made.names != (name,):
                raise RuntimeError(
                    f"image {name[:16]}: its processor has changed since its turn, so the row's features are lost; "
                    "read the rows from a gateway with the model's folder of then"
                )
            found[name] = made.items[0]
    return found
