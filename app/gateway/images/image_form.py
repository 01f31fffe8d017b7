"""Messages with images in the form that a model's chat template takes, as vLLM 0.32 finds and fills it.

Source: `renderers/chat_utils.py`, `renderers/hf.py`.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ImageForm:
    """`in_parts`: whether the template takes contents as lists of parts; else a text holds the image's mark. `marks`:
    of the first image of a conversation, of the second, and so on. `chat_template`: the processor's, for a tokenizer
    without one; else None.
    """

    in_parts: bool = False
    marks: tuple[str, ...] = ()
    chat_template: str | None = None

    def lines(self, lines: Sequence[Line]) -> list[Line]:
        """Returns messages for the template, whose contents are a text, or parts of `text` and `image`. Raises
        ValueError for a text with a mark that stands for no image.
        """
        marks = iter(self.marks)
        return [one | {"content": self._content(one, marks)} for one in lines]

    def _content(self, line: Line, marks: Iterator[str]) -> str | list[Line]:
        content = line["content"]
        if isinstance(content, str):
            if not self.in_parts or line["role"] == "tool":
                return content
            return [{"type": "text", "text": content}] if content else []
        if self.in_parts:
            return content
        texts = [part["text"] for part in content if part["type"] == "text"]
        return _marked("\n".join(texts), [next(marks) for part in content if part["type"] == "image"])


def _marked(text: str, marks: Sequence[str]) -> str:
    """Returns a text after the marks that it does not have itself."""
    missing = []
    for mark, count in Counter(marks).items():
        if (found := text.count(mark)) > count:
            raise ValueError(f"messages: a text has {found} times {mark!r} beside {count} images; remove it")
        missing += [mark] * (count - found)
    return "\n".join([*missing, *([text] if text else [])])
