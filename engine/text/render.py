"""Turns → prompt segments: the seam that Jinja templates and native encoders share, and the Jinja side of it.

A renderer says whether generated text starts inside reasoning and where candidate boundaries fell. It never tokenizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final, Literal, Protocol

from engine.recipes.recipe import Recipe
from engine.text.control import ControlTokens, Segment, mark, strip_breaks, take_marks
from engine.text.effort import SWITCHES, Thinking, template_variables
from engine.text.template import RESERVED, ChatTemplate, to_json
from engine.text.turns import Origin, Turn, inline_as_user, tool_json
from engine.types.constraint import Constraint
from engine.types.conversation import Image, ToolCall, ToolDefinition
from engine.types.request import RequestError

Opening = Literal["reasoning", "content"]

UNSET: Final = Thinking(None, None)
_END: Final = 255


@dataclass(frozen=True, slots=True)
class RenderOptions:
    """How the turns are rendered. `thinking`: resolved switches. `kwargs`: the client's chat_template_kwargs.
    `boundaries`: origins whose ends are candidate boundaries. `required` and `constraint` are for encoders with a
    native form of them."""

    tools: tuple[ToolDefinition, ...] = ()
    thinking: Thinking = UNSET
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    boundaries: tuple[Origin, ...] = ()
    required: bool = False
    constraint: Constraint | None = None


@dataclass(frozen=True, slots=True)
class Rendered:
    """`cuts`: character offsets into the joined segments where candidate boundaries end, increasing."""

    segments: tuple[Segment, ...]
    opening: Opening
    cuts: tuple[int, ...] = ()


class Renderer(Protocol):
    @property
    def native_instructions(self) -> bool:
        """Whether it renders `required` and `constraint` itself, so no instruction text need be added."""
        ...

    def render(self, turns: Sequence[Turn], options: RenderOptions) -> Rendered:
        """Raises RequestError for what the template or encoder refuses."""
        ...


class JinjaRenderer:
    """Renders through a chat template: the checkpoint's own, or the recipe's."""

    native_instructions = False

    def __init__(self, template: ChatTemplate, recipe: Recipe, control: ControlTokens) -> None:
        self._template = template
        self._recipe = recipe
        self._control = control

    def render(self, turns: Sequence[Turn], options: RenderOptions) -> Rendered:
        if any(turn.role == "system" for turn in turns[1:]) and not self.inline_system:
            turns = inline_as_user(turns)
        tools = [tool_json(tool) for tool in options.tools]
        call = _Call(self._control.protect_tree(tools), options.add_generation_prompt, self._variables(options))
        if options.continue_final_message:
            call = replace(call, generation_prompt=False)
            text = self._continued(turns, call)
            opening = self._continued_opening(turns[-1], text)
        else:
            text = self._text(turns, call)
            opening = self._opening(turns, call, text)
        cuts = self._cuts(turns, call, options, text) if options.boundaries else ()
        return Rendered(self._control.split(text), opening, cuts)

    @cached_property
    def inline_system(self) -> bool:
        """Whether a system message after the first is printed, and printed in its place. Probed once."""
        words = ("first question", "first answer", "inline instruction", "second question")
        roles = ("user", "assistant", "system", "user")
        messages = [{"role": role, "content": self._content(word)} for role, word in zip(roles, words, strict=True)]
        try:
            text = self._template.render(messages, (), add_generation_prompt=True, variables={})
        except RequestError:
            return False
        places = [text.find(word) for word in words]
        return places[0] >= 0 and places == sorted(places) and len(set(places)) == len(places)

    @cached_property
    def _lists_only(self) -> bool:
        """Whether the template prints text only from lists of parts. Probed once."""
        probe = "a plain question"
        for as_list in (False, True):
            content: Any = [{"type": "text", "text": probe}] if as_list else probe
            try:
                text = self._template.render(
                    [{"role": "user", "content": content}], (), add_generation_prompt=True, variables={}
                )
            except RequestError:
                continue
            if probe in text and "'text'" not in text:
                return as_list
        return False

    @cached_property
    def _string_arguments(self) -> bool:
        """Whether the template wants a call's arguments as JSON text instead of an object. Probed once."""

        def fails(arguments: Any) -> bool:
            call = {"id": "call00001", "type": "function", "function": {"name": "probe", "arguments": arguments}}
            messages = [
                {"role": "user", "content": self._content("a plain question")},
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": "a result", "tool_call_id": "call00001", "name": "probe"},
            ]
            try:
                self._template.render(messages, (), add_generation_prompt=True, variables={})
            except RequestError:
                return True
            return False

        return fails({"key": "value"}) and not fails('{"key": "value"}')

    def _variables(self, options: RenderOptions) -> dict[str, Any]:
        reserved = RESERVED & options.kwargs.keys()
        if reserved:
            raise RequestError(
                f"chat_template_kwargs can't set {', '.join(sorted(reserved))}", field="chat_template_kwargs"
            )
        known = {*SWITCHES, "reasoning_effort"} if self._recipe.thinking_kwargs else {"reasoning_effort"}
        passed = {name: value for name, value in options.kwargs.items() if name not in known}
        return {**self._control.protect_tree(passed), **template_variables(self._recipe, options.thinking)}

    def _text(self, turns: Sequence[Turn], call: _Call, marks: Mapping[Origin, str] | None = None) -> str:
        messages = [self._message(turn, marks or {}) for turn in turns]
        return self._template.render(
            messages, call.tools, add_generation_prompt=call.generation_prompt, variables=call.variables
        )

    def _continued(self, turns: Sequence[Turn], call: _Call) -> str:
        end = mark(_END)
        origin = _continued_origin(turns)
        text = self._text(turns, call, {origin: end})
        at = text.rfind(end)
        if at < 0:
            raise RequestError("the model's chat template can't continue the final assistant message", field="messages")
        return text[:at].replace(end, "")

    def _continued_opening(self, last: Turn, text: str) -> Opening:
        syntax = self._recipe.reasoning
        if syntax is None or last.blocks or not last.reasoning:
            return "content"
        return "reasoning" if text.rfind(syntax.open.rstrip()) > text.rfind(syntax.close) else "content"

    def _opening(self, turns: Sequence[Turn], call: _Call, text: str) -> Opening:
        syntax = self._recipe.reasoning
        if syntax is None or not call.generation_prompt:
            return "content"
        if syntax.header:
            return "reasoning"
        opener = syntax.open.rstrip()
        at = text.rfind(opener)
        if at < 0 or text.rfind(syntax.close) > at:
            return "content"
        if text[at + len(opener) :].strip():  # more than glue follows: is it the generation prompt's at all?
            without = self._text(turns, replace(call, generation_prompt=False))
            if text[: at + len(opener)] == without[: at + len(opener)]:
                return "content"
        return "reasoning"

    def _cuts(self, turns: Sequence[Turn], call: _Call, options: RenderOptions, text: str) -> tuple[int, ...]:
        """Boundaries through a second render with marks; it must be the same text apart from them."""
        marks = {origin: mark(index) for index, origin in enumerate(options.boundaries[:_END])}
        marked = self._text(turns, call, marks)
        plain, places = take_marks(marked)
        if not plain.startswith(text):
            return ()
        cuts = {len(strip_breaks(plain[:place])) for place in places if place <= len(text)}
        return tuple(sorted(cuts))

    def _message(self, turn: Turn, marks: Mapping[Origin, str]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": turn.role, "content": self._turn_content(turn, marks)}
        if turn.role == "tool":
            message["tool_call_id"] = self._control.protect(turn.call_id)
            message["name"] = self._control.protect(turn.name)
        if turn.reasoning:
            reasoning = self._marked(turn.reasoning, marks.get(turn.reasoning_origin or (-1, -1)))
            message["reasoning_content"] = message["reasoning"] = reasoning
        if turn.calls:
            message["tool_calls"] = [self._tool_call(call) for call in turn.calls]
        return message

    def _turn_content(self, turn: Turn, marks: Mapping[Origin, str]) -> Any:
        last = {block.origin: index for index, block in enumerate(turn.blocks)}
        parts: list[str | Image] = []
        for index, block in enumerate(turn.blocks):
            point = marks.get(block.origin) if block.origin and last[block.origin] == index else None
            if isinstance(block.content, Image):
                parts.append(block.content)
            elif parts and isinstance(parts[-1], str):
                parts[-1] += "\n\n" + self._marked(block.content, point)
            else:
                parts.append(self._marked(block.content, point))
        if any(isinstance(part, Image) for part in parts):
            return [{"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in parts]
        text = "".join(part for part in parts if isinstance(part, str))
        if not turn.blocks and not turn.reasoning and turn.role == "assistant" and _CONTINUED in marks:
            text += marks[_CONTINUED]
        return self._content(text)

    def _content(self, text: str) -> Any:
        return [{"type": "text", "text": text}] if self._lists_only else text

    def _marked(self, text: str, point: str | None) -> str:
        protected = self._control.protect(text)
        if point is None:
            return protected
        if point == mark(_END):
            return protected + point
        kept = protected.rstrip()
        return kept + point + protected[len(kept) :]

    def _tool_call(self, call: ToolCall) -> dict[str, Any]:
        arguments: Any = self._control.protect_tree(call.arguments)
        if self._string_arguments:
            arguments = to_json(arguments)
        name = self._control.protect(call.name)
        return {
            "id": self._control.protect(call.id),
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }


@dataclass(frozen=True, slots=True)
class _Call:
    """The arguments of one template call besides its turns."""

    tools: Sequence[Mapping[str, Any]]
    generation_prompt: bool
    variables: Mapping[str, Any]


_CONTINUED: Final[Origin] = (-2, -2)


def _continued_origin(turns: Sequence[Turn]) -> Origin:
    """Where the final assistant message is continued. Raises RequestError when it can't be."""
    last = turns[-1] if turns else None
    if last is None or last.role != "assistant":
        raise RequestError("continue_final_message needs a final assistant message", field="messages")
    if last.calls:
        raise RequestError("a final assistant message with tool calls can't be continued", field="messages")
    if last.blocks:
        return last.blocks[-1].origin or _CONTINUED
    return last.reasoning_origin or _CONTINUED
