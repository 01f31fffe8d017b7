"""Converts chat requests to prompts in token ids with features of their images, and answers to messages.

Invariant: the prompt is that of the model's chat template. If a conversation only appends to one that was answered
here, images included, the answer's token ids are those that were generated, and only the messages after it are encoded.
"""

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np

from tailrace.app.gateway.chat.answer_parser import AnswerParser, RequestParser
from tailrace.app.gateway.chat.conversations import AnsweredTurn, AnsweredTurns, digest_after, digest_of
from tailrace.app.gateway.chat.messages import RequestedMessage, fitting
from tailrace.app.gateway.chat.requests import ChatRequest
from tailrace.app.gateway.images.image_form import ImageForm
from tailrace.app.gateway.images.image_processor import ImageProcessor
from tailrace.app.gateway.images.prompt_images import image_features, spans_of
from tailrace.app.gateway.images.sent_image import SentImage
from tailrace.deployments.batches.prompts import Prompts
from tailrace.deployments.features.wire import Features, PlaceholderSpan
from tailrace.deployments.messages.rollout import SampleResult, SamplingParams
from tailrace.deployments.messages.trajectory import PromptImage
from tailrace.policies.protocol.actions import SampleEnd

NOTHING = AnsweredTurn(np.zeros(0, np.int32), None)


class Chat:
    """One chat request. `token_ids`: its prompt; `images`: those of the prompt; `features`: theirs, or None. `parser`:
    of its answers, or None if they are text alone. `finds_thoughts`: whether the gateway has a parser of thoughts.
    `answer`: message of the last answer that was kept.
    """

    answer: dict

    def __init__(
        self,
        request: ChatRequest,
        prompts: Prompts,
        conversations: AnsweredTurns,
        parser: AnswerParser | None,
        processor: ImageProcessor | None = None,
    ):
        """`processor`: None for a model of text alone. Raises ValueError, one line, if the request cannot be met."""
        self.request, self._prompts, self._conversations = request, prompts, conversations
        sent = self._sent(processor)
        self.parser = self._checked(parser)
        self.finds_thoughts = parser is not None and parser.finds_thoughts
        self._form = ImageForm() if processor is None else processor.form()
        self._messages = [message.for_template() for message in request.messages]
        normal = (message.normal() for message in request.messages)
        self._digests = list(accumulate(normal, digest_after, initial=digest_of(request.template())))
        try:
            known, after = self._encoded()
        except Exception as error:  # a template is a program, and fails as such
            raise ValueError(f"messages: the chat template refuses them: {error or type(error).__name__}") from error
        self.images: tuple[PromptImage, ...] = ()
        self.features: Features | None = None
        if sent:
            after = self._with_images(processor, sent, known, after)
        self.token_ids = (*known.token_ids.tolist(), *after)

    @property
    def prompt(self) -> dict:
        """The prompt in the format of a PromptGroup."""
        return {"token_ids": self.token_ids} | ({} if self.features is None else {"features": self.features})

    @property
    def image_names(self) -> tuple[str, ...]:
        return tuple(image.name for image in self.images)

    def _sent(self, processor: ImageProcessor | None) -> list[SentImage]:
        if processor is None and self.request.has_images:
            model = Path(self._prompts.model).name
            raise ValueError(f"messages: an image: the model {model} takes text alone; remove it")
        sent = [image for message in self.request.messages if message.has_images for image in message.images()]
        if processor is not None:
            processor.check(len(sent))
        return sent

    def _checked(self, parser: AnswerParser | None) -> RequestParser | None:
        calls = self.request.may_call
        if calls and (parser is None or not parser.finds_calls):
            raise ValueError("tools: no tool_parser is set in the gateway's args; set one, or tool_choice to none")
        if calls and self.request.sampling().structured_outputs is not None:
            raise ValueError(
                "tools: not together with another form of the answer; remove one or set tool_choice to none"
            )
        return None if parser is None else parser.of(self.request)

    def sampling(self) -> SamplingParams:
        """Returns the request's sampling parameters, with the form that its choice of tools needs."""
        sampling = self.request.sampling()
        if self.parser is None or self.parser.form is None:
            return sampling
        return SamplingParams(**sampling.model_dump() | {"structured_outputs": self.parser.form})

    # ---- the prompt ----------------------------------------------------------------------------------

    def _with_images(
        self, processor: ImageProcessor, sent: list[SentImage], known: AnsweredTurn, after: list[int]
    ) -> list[int]:
        """Stores the features of all images. Returns the tokens after a turn with the placeholders of new images."""
        found, at = processor.process(sent, after, len(known.spans)), len(known.token_ids)
        new = (PlaceholderSpan(offset=at + span.offset, length=span.length) for span in found.spans)
        spans = (*known.spans, *new)
        self.images = tuple(
            PromptImage(name=name, offset=span.offset, length=span.length, sent=image.content)
            for name, span, image in zip(found.names, spans, sent, strict=True)
        )
        self.features = image_features(self.images, found.items)
        return found.token_ids

    def _encoded(self) -> tuple[AnsweredTurn, list[int]]:
        """Returns the turn that the request continues, which may be empty, and the tokens after it."""
        request, count = self.request, len(self._messages)
        text = self._text(count, request.add_generation_prompt, request.continue_final_message)
        for answered in range(count - 1, 0, -1):
            if self._messages[answered - 1]["role"] == "assistant":
                turn = self._conversations.find(self._digests[answered])
                after = None if turn is None else self._after(answered, turn, text)
                if after is not None:
                    return turn, after
        return NOTHING, self._prompts.encode(text, request.add_special_tokens)

    def _text(self, count: int, generates: bool, continues: bool = False) -> str:
        """Returns the first `count` messages, as the template joins them."""
        template = self.request.template() | ({"continue_final_message": True} if continues else {})
        own, form = getattr(self._prompts.tokenizer, "chat_template", ""), self._form
        template |= {} if form.chat_template is None else {"chat_template": form.chat_template}
        messages = form.lines(fitting(self._messages[:count], form.chat_template or own))
        return self._prompts.chat(messages, generates, **template)

    def _after(self, answered: int, turn: AnsweredTurn, text: str) -> list[int] | None:
        """Returns the tokens of the text that follows a turn in `text`; None if the text does not begin with the
        conversation, or if the tokenizer does not encode a part as in the whole.
        """
        before, until = self._text(answered - 1, True), self._text(answered, False)
        closing = self._prompts.closing if turn.closing is None else self._prompts.piece(turn.closing)
        at = until.rfind(closing, len(before)) if closing else -1
        if at < 0 or not until.startswith(before) or not text.startswith(until):
            return None
        after, last = text[at + (0 if turn.closing is None else len(closing)) :], int(turn.token_ids[-1])
        found = self._prompts.encode(after)
        joined = self._prompts.decode([last, *found], special=True)
        return found if joined == self._prompts.decode([last], special=True) + after else None

    # ---- the answer ----------------------------------------------------------------------------------

    def keep(self, message: dict, prompt: Sequence[int], sample: SampleResult) -> None:
        """Stores the token ids of an answer, for requests that append to its message."""
        self.answer = message
        ended = sample.finish_reason is SampleEnd.STOP
        if isinstance(sample.stop_reason, str) or not (ended or sample.finish_reason is SampleEnd.LENGTH):
            return  # a stop text is not in the message, and its tokens must not be in the next prompt
        if self.request.continue_final_message or not self.request.add_generation_prompt:
            return
        token_ids = np.array([*prompt, *sample.token_ids], np.int32)
        digest = digest_after(self._digests[-1], RequestedMessage(**message).normal())
        closing = sample.token_ids[-1] if ended else None
        self._conversations.keep(digest, AnsweredTurn(token_ids, closing, spans_of(self.images)))
