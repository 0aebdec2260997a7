"""A conversational request → prompt segments: turns, our instructions, effort and the model's renderer put together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from engine.text.control import ControlTokens, Segment
from engine.text.effort import resolve
from engine.text.render import JinjaRenderer, Opening, Rendered, Renderer, RenderOptions
from engine.text.template import ChatTemplate, own_template
from engine.text.turns import Turn, arrange, presented_tools
from engine.types.constraint import Constraint
from engine.types.conversation import Conversation, Image, Message, Text, ToolResult
from engine.types.request import GenerationRequest, RequestError

if TYPE_CHECKING:
    from engine.text.lowering import ModelPort

REQUIRED_TOOL: Final = "Call at least one of the available tools in this answer. Don't answer without a tool call."
JSON_ONLY: Final = "Answer with one valid JSON {what} and nothing else: no explanation, no code fence."
MAX_CUTS: Final = 4


@dataclass(frozen=True, slots=True)
class RenderedConversation:
    """`cuts`: character offsets into the joined segments at which candidate boundaries end."""

    segments: tuple[Segment, ...]
    opening: Opening
    tools_active: bool
    cuts: tuple[int, ...]


class ConversationRenderer:
    """Renders conversations for one model. The renderer is built once, when first needed or at construction."""

    def __init__(self, model: ModelPort) -> None:
        """Raises ValueError when the model's chat template doesn't compile."""
        self._recipe = model.recipe
        self._renderer = renderer_for(model)

    def render(self, request: GenerationRequest, conversation: Conversation, *, vision: bool) -> RenderedConversation:
        """Raises RequestError for what the model can't be asked."""
        if self._renderer is None:
            raise RequestError("the model has no chat template: only /v1/completions can be used")
        if not conversation.messages:
            raise RequestError("messages must not be empty", field="messages")
        if not vision:
            refuse_images(conversation.messages)
        tools = presented_tools(conversation)
        required = conversation.tool_choice.mode == "required"
        native = self._renderer.native_instructions
        instructions = [] if native else list(_instructions(required, request.constraint))
        options = RenderOptions(
            tools=tools,
            thinking=resolve(self._recipe, request.reasoning, request.template.kwargs, request.api),
            add_generation_prompt=request.template.add_generation_prompt,
            continue_final_message=request.template.continue_final_message,
            kwargs=request.template.kwargs,
            boundaries=_boundaries(conversation),
            required=required,
            constraint=request.constraint,
        )
        turns = arrange(conversation, instructions)
        rendered = self._renderer.render(turns, options)
        if request.reasoning.closed and rendered.opening == "reasoning":
            rendered = _closed(self._renderer, turns, options, rendered)
        active = bool(conversation.tools) and conversation.tool_choice.mode != "none"
        return RenderedConversation(rendered.segments, rendered.opening, active, rendered.cuts)

    def default_opening(self) -> Opening | None:
        """Where output starts for a plain question with all defaults; None when it can't be rendered or opens with
        a header."""
        if self._renderer is None or (self._recipe.reasoning is not None and self._recipe.reasoning.header):
            return None
        conversation = Conversation((Message("user", (Text("a plain question"),)),))
        thinking = resolve(self._recipe, GenerationRequest("chat", (conversation,)).reasoning, {}, "chat")
        try:
            return self._renderer.render(arrange(conversation), RenderOptions(thinking=thinking)).opening
        except RequestError:
            return None


def _closed(renderer: Renderer, turns: Sequence[Turn], options: RenderOptions, rendered: Rendered) -> Rendered:
    """`rendered`, whose generation prompt opens reasoning, and then what the template itself prints of an answer that
    had none. Raises RequestError when the template has no such form."""
    closed = renderer.render((*turns, Turn("assistant")), replace(options, continue_final_message=True))
    if closed.opening == "reasoning" or not _text(closed).startswith(_text(rendered)):
        raise RequestError(
            "the model's chat template opens reasoning and can't show it closed, so no answer can follow"
        )
    return closed


def _text(rendered: Rendered) -> str:
    return "".join(text for text, _ in rendered.segments)


def renderer_for(model: ModelPort) -> Renderer | None:
    """The renderer of `model`: its checkpoint's template, else the recipe's; None when it has neither."""
    source = model.template
    name = model.recipe.template
    if source is None and name is not None:
        if name.startswith("native:"):
            return _native(name.removeprefix("native:"))
        source = own_template(name)
    if source is None:
        return None
    control = ControlTokens(control_spellings(model))
    return JinjaRenderer(ChatTemplate(source, _special_variables(model)), model.recipe, control)


def control_spellings(model: ModelPort) -> set[str]:
    """Spellings that conversation text must not smuggle in: every control token, and the recipe's own delimiters."""
    tokens = model.tokens
    words = {tokens.text(token) for token in range(tokens.vocab_size) if tokens.is_control(token)}
    words.update(model.recipe.stop_tokens)
    syntax = model.recipe.reasoning
    if syntax is not None:
        words.update((syntax.open.strip(), syntax.close.strip()))
    return words


def refuse_images(messages: Iterable[Message]) -> None:
    """Raises RequestError when a message holds an image."""
    for index, message in enumerate(messages):
        for part in message.parts:
            inner = part.parts if isinstance(part, ToolResult) else (part,)
            if any(isinstance(item, Image) for item in inner):
                raise RequestError(f"messages[{index}] holds an image, but the model takes text only", field="messages")


def _native(name: str) -> Renderer:
    """Raises ValueError when the encoder's package isn't installed."""
    from engine.text.deepseek import DeepSeekRenderer
    from engine.text.kimi import KimiRenderer

    try:
        match name:
            case "deepseek4" | "deepseek41":
                return DeepSeekRenderer(name)
            case "kimi3":
                return KimiRenderer()
    except RuntimeError as error:
        raise ValueError(str(error)) from error
    raise ValueError(f"there is no prompt encoder named {name!r}")


def _instructions(required: bool, constraint: Constraint | None) -> Iterable[str]:
    if required:
        yield REQUIRED_TOOL
    if constraint is not None and constraint.kind == "json_object":
        yield JSON_ONLY.format(what="object")
    if constraint is not None and constraint.kind == "json_schema":
        yield JSON_ONLY.format(what="value that matches this JSON Schema,") + "\n" + constraint.source


def _boundaries(conversation: Conversation) -> tuple[tuple[int, int], ...]:
    return conversation.boundaries[:MAX_CUTS]


def _special_variables(model: ModelPort) -> dict[str, str]:
    manifest = model.manifest
    variables = {"bos_token": "", "eos_token": ""}
    if manifest.bos_id is not None:
        variables["bos_token"] = model.tokens.text(manifest.bos_id)
    if manifest.eos_ids:
        variables["eos_token"] = model.tokens.text(manifest.eos_ids[0])
    return variables
