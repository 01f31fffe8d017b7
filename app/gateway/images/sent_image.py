"""An image as a request sends it: the bytes of its file, in a base64 `data:` URL.

Invariant: no address of a request is ever fetched.
"""

import re
from base64 import b64decode
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Self

from tailrace.deployments.features.wire import MAX_BYTES

MAX_SENT_BYTES = 20 << 20
"""Maximum bytes of one image's file. A page of a paper at 300 dpi has 5 MB as PNG."""

DATA_URL = re.compile("data:image/(?:jpeg|jpg|png|webp|gif);base64,", re.IGNORECASE)
TOO_LARGE = f"the images have more than {MAX_BYTES} bytes once they are processed; send fewer or smaller ones"
KINDS = "JPEG", "PNG", "WEBP", "GIF"
"""The same kinds of files, by Pillow's names."""


@dataclass(frozen=True, slots=True)
class SentImage:
    """`content`: the file. `digest`: names it, 64 hex digits."""

    content: bytes
    digest: str

    @classmethod
    def of(cls, url: Any) -> Self:
        """Reads an image's URL. Raises ValueError, one line, unless it is a `data:` URL of an image's file."""
        if not isinstance(url, str) or (head := DATA_URL.match(url)) is None:
            raise ValueError(
                "messages: an image is not fetched from an address; send its file as data:image/png;base64,... "
                "(png, jpeg, webp or gif)"
            )
        try:
            content = b64decode(url[head.end() :], validate=True)
        except ValueError as error:
            raise ValueError(f"messages: an image's data: URL is not base64: {error}") from error
        if not content or len(content) > MAX_SENT_BYTES:
            raise ValueError(f"messages: an image's file has {len(content)} bytes; send 1 to {MAX_SENT_BYTES}")
        return cls.of_file(content)

    @classmethod
    def of_file(cls, content: bytes) -> Self:
        return cls(content, blake2b(content, digest_size=32).hexdigest())
