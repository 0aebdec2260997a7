"""Chat templates: our own against recorded renders, the checkpoint's own, and text that wants to be a control token."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from engine.recipes.catalog import RECIPES
from engine.synthetic_tokenizer import synthetic_definition
from engine.text.control import ControlTokens
from engine.text.conversation import ConversationRenderer, RenderedConversation
from engine.text.template import ChatTemplate, own_template, to_json
from engine.text.tokenizer import Tokenizer, TokenTable, build_table
from engine.types.constraint import Constraint
from engine.types.conversation import (
    Conversation,
    Message,
    Reasoning,
    Text,
    ToolCall,
    ToolChoice,
    ToolDefinition,
    ToolReference,
    ToolResult,
)
from engine.types.request import GenerationRequest, ReasoningOptions, RequestError, TemplateOptions
from tests.support.byte_model import CHATML, SMOLLM2_TEMPLATE, ByteModel, smollm2

RENDERS = json.loads((Path(__file__).parent / "renders.json").read_text(encoding="utf-8"))
"""Recorded from `renderers` 0.1.12, which mirrors the published templates token for token."""

MARKUP: dict[str, tuple[str, ...]] = {
    "qwen": (*CHATML, "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    "glm": (
        *("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<think>", "</think>"),
        *("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        *("<tool_response>", "</tool_response>"),
    ),
    "gemma": (
        *("<bos>", "<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|think|>", "<|tool>", "<tool|>", '<|"|>'),
        *("<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>"),
    ),
    "minimax": ("]~!b[", "]~b]", "[e~[", "<mm:think>", "</mm:think>", "]<]minimax[>["),
    "kimi": ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"),
    "muse": ("<|start|>", "<|message|>", "<|eom|>", "<|eot|>"),
    "hermes": (*CHATML, "<think>", "</think>", "<tool_call>", "</tool_call>"),
    "deepseek": (
        *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜System｜>"),
        *("<think>", "</think>", "｜DSML｜"),
    ),
}
TEMPLATED = [name for name, recipe in RECIPES.items() if recipe.template is not None]


class Model:
    """A recipe with its family's control tokens in a synthetic vocabulary."""

    def __init__(self, name: str, template: str | None = None) -> None:
        self.recipe = RECIPES[name]
        control = MARKUP[self.recipe.syntax or "hermes"]
        definition = synthetic_definition(["<end>"], control)
        self.tokens: TokenTable = build_table(definition, 0)
        self.tokenizer = Tokenizer(json.dumps(definition), self.tokens)
        self.manifest = smollm2().manifest
        self.manifest = replace(self.manifest, vocab_size=self.tokens.vocab_size, bos_id=None, eos_ids=[0])
        self.template = template


@cache
def model(name: str) -> Model:
    return Model(name)


@cache
def renderer_of(name: str) -> ConversationRenderer:
    return ConversationRenderer(model(name))


def render(
    name: str | Any, conversation: Conversation, *, template: TemplateOptions | None = None, **fields: Any
) -> RenderedConversation:
    request = GenerationRequest("chat", (conversation,), template=template or TemplateOptions(), **fields)
    renderer = renderer_of(name) if isinstance(name, str) else ConversationRenderer(name)
    return renderer.render(request, conversation, vision=False)


def text_of(rendered: RenderedConversation) -> str:
    return "".join(text for text, _ in rendered.segments)


def user(text: str) -> Message:
    return Message("user", (Text(text),))


def system(text: str) -> Message:
    return Message("system", (Text(text),))


def assistant(*parts: Text | Reasoning | ToolCall) -> Message:
    return Message("assistant", parts)


@pytest.mark.parametrize("index", range(len(RENDERS["renders"])))
def test_recorded_renders(index: int) -> None:
    record = RENDERS["renders"][index]
    text = ChatTemplate(own_template(record["template"]), {}).render(
        RENDERS["conversations"][record["conversation"]],
        RENDERS["tools"][record["tools"]],
        add_generation_prompt=True,
        variables=record["variables"],
    )
    assert text == record["text"]


def hostile(name: str, evil: str) -> Conversation:
    """A conversation with `evil` wherever a client's text can stand."""
    tool = ToolDefinition(
        f"t{evil}",
        evil,
        {"type": "object", "properties": {evil: {"type": "string", "description": evil, evil: [evil]}}},
    )
    call = ToolCall(evil, f"t{evil}", {evil: evil, "k": {evil: [evil]}})
    return Conversation(
        (
            system(evil),
            user(f"{evil} and {evil}"),
            assistant(Reasoning(evil), Text(evil), call),
            Message("tool", (ToolResult(evil, (Text(evil),)),)),
            assistant(Text(evil)),
            user(evil),
        ),
        (tool,),
    )


@pytest.mark.parametrize("name", TEMPLATED)
def test_control_tokens_spelled_in_conversation_text_stay_text(name: str) -> None:
    """As many control tokens of each kind as with harmless text, whatever is spelled and however it is glued."""
    it = model(name)
    words = MARKUP[it.recipe.syntax or "hermes"]

    def control(evil: str) -> Counter[str]:
        ids = it.tokenizer.encode_segments(render(name, hostile(name, evil)).segments)
        return Counter(it.tokens.text(token) for token in ids if it.tokens.is_control(token))

    harmless = control("word")
    assert harmless
    spellings = {*words, "".join(words), *(word.strip("<>|/[]｜") for word in words)}
    spellings |= {word[1:] for word in words} | {word[:-1] for word in words} | {word[:1] + word for word in words}
    for spelling in sorted(spellings - {""}):
        assert control(spelling) == harmless, spelling


@pytest.mark.parametrize("name", TEMPLATED)
def test_conversation_text_survives_unchanged(name: str) -> None:
    it = model(name)
    words = "".join(MARKUP[it.recipe.syntax or "hermes"])
    conversation = Conversation((user(f"before {words} after\ud800 <"),))
    rendered = render(name, conversation)
    assert f"before {words} after\ufffd <" in text_of(rendered)
    assert not any("\ud800" <= char <= "\udfff" for char in text_of(rendered))


@pytest.mark.parametrize("name", TEMPLATED)
def test_every_family_renders_tools_results_and_reasoning(name: str) -> None:
    tool = ToolDefinition("lookup", "Looks up", {"type": "object", "properties": {"key": {"type": "string"}}})
    conversation = Conversation(
        (
            user("first question"),
            assistant(Reasoning("secret thought"), ToolCall("c1", "lookup", {"key": "a value"})),
            Message("tool", (ToolResult("c1", (Text("the result"),)),)),
        ),
        (tool,),
    )
    text = text_of(render(name, conversation))
    for part in ("first question", "lookup", "a value", "the result"):
        assert part in text, part
    if RECIPES[name].reasoning is not None:
        assert "secret thought" in text


OPENINGS = {
    "qwen38": ("reasoning", "content"),
    "qwen38_dense": ("reasoning", "content"),
    "glm53": ("reasoning", "reasoning"),
    "deepseek4": ("reasoning", "content"),
    "deepseek41": ("reasoning", "content"),
    "mimo_v2": ("reasoning", "content"),
    "kimi3": ("reasoning", "reasoning"),
    "kimi31": ("reasoning", "reasoning"),
    "step5": ("reasoning", "reasoning"),
    "nemotron_h": ("reasoning", "content"),
    "minimax_m3": ("content", "content"),
    "muse_spark": ("reasoning", "reasoning"),
    "gemma4": ("content", "content"),
    "qwen2": ("content", "content"),
    "qwen3": ("content", "content"),
}


@pytest.mark.parametrize("name", TEMPLATED)
def test_where_output_starts(name: str) -> None:
    conversation = Conversation((user("q"),))
    default = render(name, conversation).opening
    off = render(name, conversation, reasoning=ReasoningOptions(enabled=False)).opening
    assert (default, off) == OPENINGS[name]


def test_minimax_thinking_may_be_prefilled() -> None:
    on = render("minimax_m3", Conversation((user("q"),)), reasoning=ReasoningOptions(enabled=True))
    assert on.opening == "reasoning"
    assert text_of(on).endswith("<mm:think>")


def test_gemma_goes_on_thinking_after_a_tool_result() -> None:
    conversation = Conversation(
        (user("q"), assistant(ToolCall("c", "w", {})), Message("tool", (ToolResult("c", (Text("r"),)),))),
        (ToolDefinition("w", "", {}),),
    )
    assert render("gemma4", conversation, reasoning=ReasoningOptions(enabled=True)).opening == "reasoning"


def test_a_spelled_opener_in_the_last_message_does_not_open_reasoning() -> None:
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    it = Model("qwen38", template)
    assert render(it, Conversation((user("what is <think>"),))).opening == "content"


def test_an_opener_that_the_template_itself_mentions_does_not_open_reasoning() -> None:
    template = (
        "Think inside <think> tags.\n{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    assert render(Model("qwen38", template), Conversation((user("q"),))).opening == "content"


INLINE = Conversation((user("first"), assistant(Text("reply")), system("be brief"), user("second")))


@pytest.mark.parametrize(
    ("name", "wrapped"),
    [
        ("qwen38", True),
        ("nemotron_h", True),
        ("minimax_m3", True),
        ("deepseek4", True),
        ("deepseek41", False),
        ("glm53", False),
        ("gemma4", False),
        ("step5", False),
        ("kimi3", False),
        ("qwen3", False),
    ],
)
def test_instructions_inside_a_conversation_keep_their_place(name: str, wrapped: bool) -> None:
    text = text_of(render(name, INLINE))
    assert ("<system>be brief</system>" in text) == wrapped
    assert text.index("first") < text.index("reply") < text.index("be brief") < text.index("second")


def test_the_probe_demands_presence_and_position() -> None:
    hoisting = (
        "{% for m in messages if m.role == 'system' %}{{ m.content }}\n{% endfor %}"
        "{% for m in messages if m.role != 'system' %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    )
    text = text_of(render(smollm2(template=hoisting), INLINE))
    assert text == "user: first\nassistant: reply\nuser: <system>be brief</system>\nuser: second\n"


def test_the_leading_system_message_stays_native() -> None:
    text = text_of(render("qwen38", Conversation((system("lead"), *INLINE.messages))))
    assert text.startswith("<|im_start|>system\n")
    assert text.count("lead") == 1
    assert "<system>lead" not in text


def test_developer_instructions_join_the_system_message() -> None:
    conversation = Conversation(
        (
            Message("developer", (Text("dev one"),)),
            user("q1"),
            system("sys"),
            Message("developer", (Text("dev two"), Text("more"))),
            user("q2"),
        )
    )
    text = text_of(render(smollm2(), conversation))
    assert text.startswith(
        "<|im_start|>system\nDeveloper:\ndev one\n\nSystem:\nsys\n\nDeveloper:\ndev two\n\nmore<|im_end|>\n"
        "<|im_start|>user\nq1<|im_end|>\n<|im_start|>user\nq2<|im_end|>\n"
    )


def test_blocks_join_with_a_blank_line_and_empty_instructions_print_nothing() -> None:
    blocks = Conversation((Message("system", ()), system(""), Message("user", (Text("a"), Text(""), Text("b")))))
    whole = Conversation((user("a\n\nb"),))
    assert render(smollm2(), blocks).segments == render(smollm2(), whole).segments


def test_a_required_tool_is_asked_for_in_the_system_prompt() -> None:
    tool = ToolDefinition("w", "", {})
    conversation = Conversation((user("q"),), (tool,), ToolChoice("required"))
    text = text_of(render("qwen38", conversation))
    assert text.index("Call at least one of the available tools") < text.index("<|im_start|>user")
    assert "required" in text_of(render("kimi3", conversation))
    assert "Call at least one" not in text_of(render("qwen38", replace(conversation, tool_choice=ToolChoice())))


def test_a_named_choice_presents_one_tool_and_no_instruction() -> None:
    tools = (ToolDefinition("one", "", {}), ToolDefinition("two", "", {}))
    text = text_of(render("qwen38", Conversation((user("q"),), tools, ToolChoice("named", "two"))))
    assert '"name": "two"' in text
    assert '"name": "one"' not in text
    assert "Call at least one" not in text


def test_no_choice_presents_no_tools() -> None:
    conversation = Conversation((user("q"),), (ToolDefinition("one", "", {}),), ToolChoice("none"))
    rendered = render("qwen38", conversation)
    assert "# Tools" not in text_of(rendered)
    assert not rendered.tools_active


def test_deferred_tools_wait_for_a_reference() -> None:
    tools = (ToolDefinition("one", "", {}), ToolDefinition("late", "Late", {"type": "object"}, deferred=True))
    messages = (
        user("q"),
        assistant(ToolCall("c", "one", {})),
        Message("tool", (ToolResult("c", (Text("found"), ToolReference("late"))),)),
    )
    plain = text_of(render("qwen38", Conversation(messages[:1], tools)))
    assert '"late"' not in plain
    text = text_of(render("qwen38", Conversation(messages, tools)))
    assert text.index("found") < text.index('"name": "late"')
    assert text.startswith(plain.removesuffix("<|im_start|>assistant\n<think>\n"))
    with pytest.raises(RequestError, match="'gone'"):
        render("qwen38", Conversation((Message("system", (ToolReference("gone"),)), user("q")), tools))


@pytest.mark.parametrize("name", ["qwen38", "kimi3", "deepseek41", "llama"])
def test_json_output_is_asked_for_in_the_system_prompt(name: str) -> None:
    it: Any = name if name != "llama" else smollm2()
    wanted = Constraint("json_schema", '{"type": "object", "title": "Weather"}')
    text = text_of(render(it, Conversation((system("sys"), user("q"))), constraint=wanted))
    assert wanted.source in text
    assert "valid JSON" in text
    assert text.index(wanted.source) < text.index("q<" if name != "deepseek41" else "q<｜")
    plain = text_of(render(it, Conversation((user("q"),)), constraint=Constraint("regex", "a+")))
    assert "JSON" not in plain


def test_errors_of_tools_are_marked() -> None:
    result = Message("tool", (ToolResult("c", (Text("no such file"),), is_error=True),))
    text = text_of(render("qwen38", Conversation((user("q"), assistant(ToolCall("c", "w", {})), result))))
    assert "The tool call failed:\n\nno such file" in text


def test_continuing_an_answer() -> None:
    conversation = Conversation((user("q"), assistant(Text("The answer is "))))
    options = TemplateOptions(continue_final_message=True)
    assert text_of(render(smollm2(), conversation, template=options)).endswith("<|im_start|>assistant\nThe answer is ")
    for name in ("qwen38", "kimi3", "glm53", "gemma4"):
        rendered = render(name, conversation, template=options)
        assert text_of(rendered).rstrip().endswith("The answer is"), name
        assert rendered.opening == "content"


def test_continuing_inside_reasoning() -> None:
    conversation = Conversation((user("q"), assistant(Reasoning("I wonder"))))
    for name in ("qwen38", "kimi3", "glm53"):
        rendered = render(name, conversation, template=TemplateOptions(continue_final_message=True))
        assert text_of(rendered).endswith("I wonder"), name
        assert rendered.opening == "reasoning"


@pytest.mark.parametrize("name", TEMPLATED)
def test_reasoning_can_be_closed_in_the_prompt_of_every_family(name: str) -> None:
    conversation = Conversation((user("q"), user("and <think>")))
    closed = ReasoningOptions(enabled=False, closed=True)
    rendered = render(name, conversation, reasoning=closed)
    normal = render(name, conversation, reasoning=replace(closed, closed=False))
    assert rendered.opening == "content" and text_of(rendered).startswith(text_of(normal))
    assert (rendered == normal) == (normal.opening == "content")


def test_a_template_that_cant_show_closed_reasoning_refuses_to() -> None:
    printed = "{% for m in messages %}{{ '<' + m.role + '>' + m.content }}{% endfor %}"
    bare = printed + "{% if add_generation_prompt %}<assistant><think>{% endif %}"
    strict = "{% if messages[-1].role == 'assistant' %}{{ raise_exception('whose turn is it?') }}{% endif %}"
    conversation = Conversation((user("q"),))
    for template, message in ((bare, "can't show it closed"), (strict + bare, "whose turn")):
        it = Model("qwen38", template)
        assert render(it, conversation).opening == "reasoning"
        with pytest.raises(RequestError, match=message):
            render(it, conversation, reasoning=ReasoningOptions(closed=True))


@pytest.mark.parametrize("name", ["deepseek4", "deepseek41"])
@pytest.mark.parametrize(
    "template",
    [
        TemplateOptions(continue_final_message=True),
        TemplateOptions(add_generation_prompt=False),
        TemplateOptions(kwargs={"drop_thinking": True}),
    ],
)
def test_deepseek_refuses_what_its_encoder_lacks(name: str, template: TemplateOptions) -> None:
    with pytest.raises(RequestError):
        render(name, Conversation((user("q"), assistant(Text("a")))), template=template)


@pytest.mark.parametrize(
    ("conversation", "message"),
    [
        (Conversation((user("q"),)), "needs a final assistant message"),
        (Conversation((user("q"), assistant(ToolCall("c", "w", {})))), "can't be continued"),
    ],
)
@pytest.mark.parametrize("name", ["qwen38", "kimi3"])
def test_what_cant_be_continued(name: str, conversation: Conversation, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        render(name, conversation, template=TemplateOptions(continue_final_message=True))


def test_without_a_generation_prompt() -> None:
    rendered = render(smollm2(), Conversation((user("q"),)), template=TemplateOptions(add_generation_prompt=False))
    assert text_of(rendered).endswith("q<|im_end|>\n")
    assert rendered.opening == "content"


def test_template_kwargs() -> None:
    template = "{{ flavour }}{{ enable_thinking }}{% for m in messages %}{{ m.content }}{% endfor %}"
    it = Model("qwen3", template)
    options = TemplateOptions(kwargs={"flavour": "<|im_end|>", "enable_thinking": False})
    rendered = render(it, Conversation((user("q"),)), template=options)
    assert text_of(rendered) == "<|im_end|>Falseq"
    assert it.tokenizer.encode_segments(rendered.segments)[0] == ord("<")
    with pytest.raises(RequestError, match="can't set messages"):
        render(it, Conversation((user("q"),)), template=TemplateOptions(kwargs={"messages": []}))
    with pytest.raises(RequestError, match="enable_thinking must be a boolean"):
        render(it, Conversation((user("q"),)), template=TemplateOptions(kwargs={"enable_thinking": "no"}))


def test_preserved_thinking_follows_the_template() -> None:
    conversation = Conversation((user("a"), assistant(Reasoning("hmm"), Text("b")), user("c")))
    assert "hmm" in text_of(render("qwen38", conversation))
    dropped = TemplateOptions(kwargs={"preserve_thinking": False})
    assert "hmm" not in text_of(render("qwen38", conversation, template=dropped))
    assert "hmm" in text_of(render("kimi3", conversation, template=TemplateOptions(kwargs={"thinking": False})))


def test_boundaries_never_change_the_prompt() -> None:
    messages = (user("one  "), assistant(Text("two")), user("three"), user("four"))
    bare = Conversation(messages)
    marked = replace(bare, boundaries=((0, 0), (2, 0)))
    for name in ("qwen38", "kimi3", "deepseek4", "gemma4"):
        rendered = render(name, marked)
        assert rendered.segments == render(name, bare).segments
        text = text_of(rendered)
        ends = [text[:cut].rstrip() for cut in rendered.cuts]
        assert [end.endswith(word) for end, word in zip(ends, ("one", "three"), strict=True)] == [True, True]


def test_a_checkpoints_own_template_wins() -> None:
    it = Model("qwen38", SMOLLM2_TEMPLATE)
    assert "named SmolLM" in text_of(render(it, Conversation((user("q"),))))


def test_templates_that_take_only_lists_or_only_json_arguments() -> None:
    listing = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
    assert text_of(render(smollm2(template=listing), Conversation((user("in a list"),)))) == "in a list"
    stringy = (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.name + '(' + c.function.arguments + ')' }}{% endfor %}{% endfor %}"
    )
    conversation = Conversation((user("q"), assistant(ToolCall("c", "w", {"a": 1}))))
    assert text_of(render(smollm2(template=stringy), conversation)) == 'qw({"a": 1})'


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[7].content }}", "undefined|has no element"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages.append(1) }}", "unsafe|not safe|access"),
        ("{{ ''.__class__.__mro__ }}", "unsafe|access"),
    ],
)
def test_a_template_that_fails_is_the_requests_error(template: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        render(smollm2(template=template), Conversation((user("q"),)))


def test_a_template_that_does_not_compile_fails_at_start() -> None:
    with pytest.raises(ValueError, match="does not compile"):
        ConversationRenderer(smollm2(template="{% if %}"))


def test_what_published_templates_expect() -> None:
    source = (
        "{%- for m in messages -%}{%- if loop.index0 > 0 -%}{%- break -%}{%- endif -%}"
        "{% generation %}{{ m.content }}{% endgeneration %}{%- endfor -%}"
        "{{ bos_token }}{{ strftime_now('%Y') | length }}{{ {'é': '<a>'} | tojson(indent=1) }}"
    )
    text = ChatTemplate(source, {"bos_token": "<s>"}).render(
        [{"content": "x"}, {"content": "y"}], (), add_generation_prompt=False, variables={"bos_token": "forged"}
    )
    assert text == 'x<s>4{\n "é": "<a>"\n}'


def test_json_keeps_the_marks_of_protected_text() -> None:
    control = ControlTokens(["<think>"])
    protected = control.protect("<think>\\udc00é")
    assert to_json(protected, ensure_ascii=True) == '"<\udc00think>\\\\udc00\\u00e9"'


@pytest.mark.parametrize(
    "messages",
    [
        (Message("user", (Reasoning("r"),)),),
        (Message("tool", (Text("r"),)),),
        (Message("system", (ToolCall("c", "n", {}),)),),
    ],
)
def test_parts_that_a_role_cant_hold(messages: tuple[Message, ...]) -> None:
    with pytest.raises(RequestError, match=r"messages\[0\]"):
        render(smollm2(), Conversation(messages))


def test_no_messages() -> None:
    with pytest.raises(RequestError, match="must not be empty"):
        render(smollm2(), Conversation(()))


def test_ten_thousand_tools_and_a_name_of_a_mebibyte() -> None:
    tools = tuple(ToolDefinition(f"tool_{index}", "", {}) for index in range(10_000))
    named = ToolDefinition("n" * 2**20, "", {})
    text = text_of(render("qwen38", Conversation((user("q"),), (*tools, named))))
    assert text.count('{"type": "function"') == 10_001


def test_a_model_of_bytes_has_no_hidden_control_tokens() -> None:
    rendered = render(
        ByteModel(RECIPES["generic"], CHATML, template=SMOLLM2_TEMPLATE), Conversation((user("<|im_end|>"),))
    )
    assert ("<|im_end|>", False) in [(text.strip().split("\n")[-1], trusted) for text, trusted in rendered.segments]


def test_deepseek_prompts() -> None:
    """Against the forms that the official encoder and `renderers` 0.1.12 agree on."""
    tool = ToolDefinition("w", "W", {"type": "object"})
    conversation = Conversation(
        (
            system("sys"),
            user("q"),
            assistant(Reasoning("r"), Text("a"), ToolCall("c", "w", {"city": "P", "n": 3})),
            Message("tool", (ToolResult("c", (Text("res"),)),)),
            assistant(Text("b")),
            user("q2"),
        ),
        (tool,),
    )
    text = text_of(render("deepseek4", conversation, reasoning=ReasoningOptions(effort="low")))
    assert text.startswith("<｜begin▁of▁sentence｜>sys\n\n## Tools")
    assert text.endswith(
        "<｜User｜>q<｜Assistant｜><think>r</think>a\n\n<｜DSML｜tool_calls>\n"
        '<｜DSML｜invoke name="w">\n<｜DSML｜parameter name="city" string="true">P</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="n" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'
        "<｜end▁of▁sentence｜><｜User｜><tool_result>res</tool_result><｜Assistant｜><think></think>b"
        "<｜end▁of▁sentence｜><｜User｜>q2<｜Assistant｜><think>"
    )


@pytest.mark.parametrize(
    ("reasoning", "kwargs", "score"),
    [
        (ReasoningOptions(), {}, "75"),
        (ReasoningOptions(effort=None, effort_given=True), {}, "75"),
        (ReasoningOptions(effort=80), {}, "80"),
        (ReasoningOptions(), {"reasoning_effort": 7}, "7"),
        (ReasoningOptions(effort="low"), {}, "50"),
        (ReasoningOptions(effort="max"), {}, "100"),
        (ReasoningOptions(effort=80, enabled=False), {}, None),
    ],
)
def test_scores_in_deepseek41_prompts(reasoning: ReasoningOptions, kwargs: dict[str, Any], score: str | None) -> None:
    rendered = render(
        "deepseek41", Conversation((user("q"),)), reasoning=reasoning, template=TemplateOptions(kwargs=kwargs)
    )
    text = text_of(rendered)
    if score is None:
        assert text == "<｜begin▁of▁sentence｜><｜User｜>q<｜Assistant｜></think>"
    else:
        assert f"<｜System｜>Reasoning Effort: {score} (range 1-100," in text
    trusted = [part for part, is_trusted in rendered.segments if is_trusted]
    assert trusted[-1] == ("<think>" if score else "</think>")


def test_kimi_prompts() -> None:
    conversation = Conversation(
        (
            user("q"),
            assistant(Reasoning("r"), ToolCall("c2", "w", {"a&b": 'x"', "n": 3}), ToolCall("c1", "z", {})),
            Message("tool", (ToolResult("c1", (Text("late"),)),)),
            Message("tool", (ToolResult("c2", (Text("early"),)),)),
        ),
        (ToolDefinition("w", "", {}),),
    )
    text = text_of(render("kimi3", conversation))
    assert '<|open|>message role="system" type="thinking-effort"<|sep|>max<|close|>message<|sep|>' in text
    assert text.endswith(
        '<|open|>message role="user"<|sep|>q<|close|>message<|sep|><|end_of_msg|>'
        '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>r<|close|>think<|sep|>'
        "<|open|>response<|sep|><|close|>response<|sep|><|open|>tools<|sep|>"
        '<|open|>call tool="w" index="1"<|sep|>'
        '<|open|>argument key="a&amp;b" type="string"<|sep|>x"<|close|>argument<|sep|>'
        '<|open|>argument key="n" type="number"<|sep|>3<|close|>argument<|sep|><|close|>call<|sep|>'
        '<|open|>call tool="z" index="2"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>'
        "<|close|>message<|sep|><|end_of_msg|>"
        '<|open|>message role="tool" tool="w" index="1"<|sep|>early<|close|>message<|sep|><|end_of_msg|>'
        '<|open|>message role="tool" tool="z" index="2"<|sep|>late<|close|>message<|sep|><|end_of_msg|>'
        '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>'
    )


@pytest.mark.parametrize("recipe", ["kimi3", "kimi31"])
@pytest.mark.parametrize("switch", ["enable_thinking", "thinking"])
def test_kimi_thinks_whatever_it_is_told(recipe: str, switch: str) -> None:
    conversation = Conversation((user("q"), assistant(Reasoning("past"), Text("a")), user("r")))
    for effort in (None, "low", "high", "max"):
        asked = ReasoningOptions(effort=effort)
        default = text_of(render(recipe, conversation, reasoning=asked))
        off = TemplateOptions(kwargs={switch: False})
        assert text_of(render(recipe, conversation, reasoning=asked, template=off)) == default
        assert text_of(render(recipe, conversation, reasoning=replace(asked, enabled=False))) == default
        assert f'type="thinking-effort"<|sep|>{effort or "max"}<|close|>' in default
        assert "<|open|>think<|sep|>past<|close|>" in default
        assert render(recipe, conversation, reasoning=asked, template=off).opening == "reasoning"
