"""DeepSeek V4 and V4.1 prompts through the official encoder (the optional package deepseek-recipe).

The encoder says which ranges of its output are control tokens; everything else is encoded as plain text. V4 moves every
system message to the front, so instructions inside a conversation become user turns there; V4.1 keeps them in place.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from engine.syntax.deepseek import official
from engine.text.control import Segment, clean
from engine.text.effort import SWITCHES
from engine.text.render import Rendered, RenderOptions
from engine.text.turns import Origin, Turn, inline_as_user
from engine.types.conversation import Image
from engine.types.request import RequestError

Version = Literal["deepseek4", "deepseek41"]

_MARKS: Final = re.compile("[\ufdd0-\ufdd3]")
"""Noncharacters that stand for up to four boundaries in a second rendering."""
_SCORE: Final = "Reasoning Effort: 75 (range"


class DeepSeekRenderer:
    """engine.text.render.Renderer for one version. Raises RuntimeError when the package isn't installed."""

    native_instructions = False

    def __init__(self, version: Version) -> None:
        self._recipe = official()
        self._inline = version == "deepseek41"
        encodings = {"deepseek4": self._recipe.DeepseekV4Encoding, "deepseek41": self._recipe.DeepseekV41Encoding}
        self._encoding = encodings[version]()

    def render(self, turns: Sequence[Turn], options: RenderOptions) -> Rendered:
        _check(options)
        if not self._inline:
            turns = inline_as_user(turns)
        prompt, ranges = self._prompt(turns, options, {})
        thinking = options.thinking.enabled is not False
        cuts = self._cuts(turns, options, prompt) if options.boundaries else ()
        return Rendered(_segments(prompt, ranges), "reasoning" if thinking else "content", cuts)

    def _prompt(
        self, turns: Sequence[Turn], options: RenderOptions, marks: Mapping[Origin, str]
    ) -> tuple[str, list[tuple[int, int]]]:
        effort = options.thinking.effort
        conversation = self._recipe.Conversation(
            [self._message(turn, marks) for turn in turns],
            thinking_mode=options.thinking.enabled is not False,
            tools=[
                self._recipe.ToolDefinition(
                    clean(tool.name), clean(tool.description), json.loads(clean(json.dumps(tool.parameters)))
                )
                for tool in options.tools
            ]
            or None,
            reasoning_effort="high" if isinstance(effort, int) else effort,
        )
        rendered = self._encoding.render_conversation(conversation)
        prompt, ranges = rendered.prompt, rendered.special_ranges
        if isinstance(effort, int) and _SCORE in prompt[:200]:
            return _scored(prompt, ranges, effort)
        return prompt, ranges

    def _message(self, turn: Turn, marks: Mapping[Origin, str]) -> Any:
        text = _text(turn, marks)
        match turn.role:
            case "system":
                return self._recipe.SystemMessage(text)
            case "user":
                return self._recipe.UserMessage(text)
            case "tool":
                return self._recipe.ToolMessage(text, clean(turn.call_id))
            case "assistant":
                calls = [
                    self._recipe.ToolCall(clean(call.id), clean(call.name), clean(_arguments(call.arguments)))
                    for call in turn.calls
                ]
                # as the official request conversion does: reasoning that is missing counts as empty
                return self._recipe.AssistantMessage(text, clean(turn.reasoning), calls or None)

    def _cuts(self, turns: Sequence[Turn], options: RenderOptions, prompt: str) -> tuple[int, ...]:
        if _MARKS.search(prompt):
            return ()
        marks = {origin: chr(0xFDD0 + index) for index, origin in enumerate(options.boundaries[:4])}
        marked, _ = self._prompt(turns, options, marks)
        places = [found.start() - index for index, found in enumerate(_MARKS.finditer(marked))]
        return tuple(sorted(set(places))) if _MARKS.sub("", marked) == prompt else ()


def _check(options: RenderOptions) -> None:
    """Raises RequestError for what the encoders don't have."""
    if options.continue_final_message:
        raise RequestError("DeepSeek's prompt encoder can't continue an assistant message", field="messages")
    if not options.add_generation_prompt:
        raise RequestError("DeepSeek's prompt encoder needs add_generation_prompt=true", field="add_generation_prompt")
    unknown = sorted(options.kwargs.keys() - {*SWITCHES, "reasoning_effort"})
    if unknown:
        raise RequestError(
            f"chat_template_kwargs: DeepSeek's prompt encoder does not take {unknown[0]!r}",
            field="chat_template_kwargs",
        )


def _text(turn: Turn, marks: Mapping[Origin, str]) -> str:
    parts: list[str] = []
    for index, block in enumerate(turn.blocks):
        if isinstance(block.content, Image):
            raise RequestError("the DeepSeek prompt encoder takes text only here: remove the image", field="messages")
        last = all(other.origin != block.origin for other in turn.blocks[index + 1 :])
        mark = marks.get(block.origin, "") if block.origin is not None and last else ""
        parts.append(clean(block.content) + mark)
    return "\n\n".join(parts)


def _arguments(arguments: Mapping[str, Any]) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def _scored(prompt: str, ranges: Sequence[tuple[int, int]], effort: int) -> tuple[str, list[tuple[int, int]]]:
    """The prompt with an effort score of the client's; control tokens behind it move by the difference."""
    at = prompt.index(_SCORE)
    wanted = _SCORE.replace("75", str(effort))
    shift = len(wanted) - len(_SCORE)
    moved = [(start + shift, end + shift) if start > at else (start, end) for start, end in ranges]
    return prompt[:at] + wanted + prompt[at + len(_SCORE) :], moved


def _segments(prompt: str, ranges: Sequence[tuple[int, int]]) -> tuple[Segment, ...]:
    segments: list[Segment] = []
    at = 0
    for start, end in ranges:
        if at < start:
            segments.append((prompt[at:start], False))
        segments.append((prompt[start:end], True))
        at = end
    if at < len(prompt):
        segments.append((prompt[at:], False))
    return tuple(segments)
