"""A preprocessor and a model for the decision scorer: prompts are text, and the model's opinion is a function."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from engine.types.conversation import Conversation, Image, Text
from engine.types.events import TokenRecord
from engine.types.request import GenerationRequest, PreparedPrompt, PreparedRequest, RequestError, SamplingParams
from protocols.questions import Read

SAMPLING = SamplingParams(1.0, 1.0, -1, 0.0, 1.0, 0.0, 0.0, 0)
Opinion = Callable[[str], Mapping[str, float]]
"""The final user turn → label → full-vocabulary probability."""


def rendered(conversation: Conversation) -> list[str]:
    """The text of each message, blocks joined as the lowering joins them."""
    shown = []
    for message in conversation.messages:
        blocks = [
            part.text if isinstance(part, Text) else "<image>"
            for part in message.parts
            if isinstance(part, Text | Image)
        ]
        shown.append("\n\n".join(blocks))
    return shown


class ScriptedScorer:
    """Both of the scorer's ports. One token a byte; a label's id is its place in `labels`, plus 1000; labels not in
    it are several tokens. `alternate`: two user messages in a row are refused."""

    def __init__(
        self,
        opinion: Opinion = lambda _: {},
        *,
        labels: Sequence[str] = tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"),
        alternate: bool = False,
    ) -> None:
        self.opinion = opinion
        self.labels = tuple(labels)
        self.alternate = alternate
        self.prompts: list[list[str]] = []
        self.requests: list[GenerationRequest] = []
        self.reads = 0

    async def label_ids(self, request: GenerationRequest, labels: Sequence[str]) -> tuple[int | None, ...]:
        self._conversation(request)
        return tuple(self._id(label) for label in labels)

    def _id(self, label: str) -> int | None:
        return 1000 + self.labels.index(label) if label in self.labels else None

    def _conversation(self, request: GenerationRequest) -> Conversation:
        (conversation,) = request.prompts
        assert isinstance(conversation, Conversation)
        if self.alternate and len(conversation.messages) > 1:
            raise RequestError("roles must alternate")
        return conversation

    async def prepare(self, request: GenerationRequest) -> PreparedRequest:
        text = rendered(self._conversation(request))
        self.prompts.append(text)
        self.requests.append(request)
        ids = np.frombuffer("\n".join(text).encode(), np.uint8).astype(np.int32)
        child = PreparedPrompt(ids, SAMPLING, 1, (0,), output=request.output, opening="content")
        return PreparedRequest((child,))

    async def read(self, prepared: PreparedRequest) -> Read:
        """Reads the labels in the order asked; the sampled token is none of them."""
        (child,) = prepared.children
        opinion = self.opinion(self.prompts[self.reads][-1])
        self.reads += 1
        alternatives = []
        for id in child.output.logprob_token_ids:
            p = opinion.get(self.labels[id - 1000], 0.0)
            alternatives.append((id, math.log(p) if p > 0 else -math.inf))
        return Read(TokenRecord(7, -1.0, tuple(alternatives)), cached=min(10 * (self.reads - 1), len(child.token_ids)))
