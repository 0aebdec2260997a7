"""What each family generates, and what the API document makes of it: data for the syntax tests.

Deviations from a public fixture set (canitoolcall 0.1.1), each with the document's rule:
* qwen3-xml/q38-marker-in-arguments, qwen3-xml/coder-marker-in-arguments: the value spells `</function>`. "Function-tag
  calls complete at </function>", so the call ends there.
* gemma4/sglang-text-before-call, gemma4/sglang-text-around-call: whitespace in front of a call is markup here, one rule
  for all families; the set expects it kept in these two and dropped in others.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

NS: Final = "]<]minimax[>["


@dataclass(frozen=True)
class Output:
    """`failure`: a part of the message of an output that must fail at its natural end; truncated, it loses the
    unfinished call only. `never`: the failure doesn't wait for the end."""

    recipe: str
    name: str
    text: str
    content: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    opening: Literal["reasoning", "content"] = "content"
    failure: str = ""
    never: bool = False
    started: tuple[str, ...] | None = field(default=None)


def qwen(body: str, name: str = "w") -> str:
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


PARIS: Final = "<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
PARIS_JSON: Final = '{"city": "Paris", "days": 3}'
INCOMPLETE: Final = "unfinished tool call"

QWEN: Final = (
    Output("qwen38", "plain", "Hello *there*\n", "Hello *there*\n"),
    Output("qwen38", "reasoning", "hm\nhm\n</think>\n\nYes.", "Yes.", "hm\nhm", opening="reasoning"),
    Output("qwen38", "call", f"r\n</think>\n\n{qwen(PARIS)}", "", "r", (("w", PARIS_JSON),), "reasoning"),
    Output("qwen38", "text and call", f"Look:\n\n{qwen(PARIS)}", "Look:", calls=(("w", PARIS_JSON),)),
    Output("qwen38", "two calls", f"{qwen(PARIS)}\n{qwen('', 'z')}", calls=(("w", PARIS_JSON), ("z", "{}"))),
    Output("qwen38", "call ends reasoning", f"so\n{qwen(PARIS)}", "", "so", (("w", PARIS_JSON),), "reasoning"),
    Output("qwen38", "inline call in prose", f"I use {qwen(PARIS)} now", "I use now", calls=(("w", PARIS_JSON),)),
    Output(
        "qwen38",
        "complete call in reasoning prose",
        f"I use {qwen(PARIS)} now",
        " now",
        "I use",
        (("w", PARIS_JSON),),
        "reasoning",
    ),
    Output("qwen38", "no outer tag", f"<function=w>\n{PARIS}</function>", calls=(("w", PARIS_JSON),)),
    Output(
        "qwen38",
        "no outer tag inside reasoning is text",
        f"a <function=w>\n{PARIS}</function>",
        "",
        f"a <function=w>\n{PARIS}</function>",
        opening="reasoning",
    ),
    Output("qwen38", "quoted tag", "The tag `<tool_call>` opens.", "The tag `<tool_call>` opens."),
    Output("qwen38", "quoted tag in reasoning", "tag <tool_call>\n!", "", "tag <tool_call>\n!", opening="reasoning"),
    Output("qwen38", "quoted header", "Use <function=NAME> then.", "Use <function=NAME> then."),
    Output("qwen38", "header and prose", "<tool_call><function=w> prose", "<tool_call><function=w> prose"),
    Output("qwen38", "header with spaces", "<function=a b><parameter=x>", "<function=a b><parameter=x>"),
    Output("qwen38", "tag undecided at the end", "See <tool_call>", "See", failure=INCOMPLETE),
    Output("qwen38", "bare tag undecided at the end", "See <function=", "See", failure=INCOMPLETE),
    Output("qwen38", "part of a tag at the end is text", "a <tool", "a <tool"),
    Output("qwen38", "truncated call", f"Look:\n{qwen(PARIS)[:60]}", "Look:", failure=INCOMPLETE, started=("w",)),
    Output(
        "qwen38",
        "second call truncated",
        f"{qwen(PARIS)}\n{qwen(PARIS, 'z')[:45]}",
        calls=(("w", PARIS_JSON),),
        failure=INCOMPLETE,
        started=("w", "z"),
    ),
    Output(
        "qwen38",
        "missing parameter closer before the next",
        qwen("<parameter=city>\nParis\n<parameter=days>\n3\n"),
        calls=(("w", PARIS_JSON),),
    ),
    Output(
        "qwen38",
        "one newline of each side goes",
        qwen("<parameter=city>\n\n x\n\n</parameter>\n"),
        calls=(("w", '{"city": "\\n x\\n"}'),),
    ),
    Output(
        "qwen38",
        "value spells a closer",
        qwen("<parameter=city>\na </parameter> b\n</parameter>\n"),
        calls=(("w", '{"city": "a </parameter> b"}'),),
    ),
    Output(
        "qwen38",
        "value that doesn't convert",
        qwen("<parameter=days>\nabc\n</parameter>\n"),
        calls=(("w", '{"days": "abc"}'),),
    ),
    Output(
        "qwen38",
        "undeclared tool has no types",
        qwen("<parameter=n>\n3\n</parameter>\n", "other"),
        calls=(("other", '{"n": "3"}'),),
    ),
    Output("qwen38", "empty name", qwen(PARIS, ""), failure="empty name", never=True),
    Output(
        "qwen38",
        "parameter without a name",
        qwen("<parameter=>\nx\n</parameter>\n"),
        failure="without a name",
        never=True,
        started=("w",),
    ),
    Output(
        "qwen38",
        "garbage between parameters",
        qwen("<parameter=city>\nx\n</parameter>\n").replace(
            "</parameter>\n", "</parameter>\n<parameter=days>\n3\n</parameter>\n"
        ),
        calls=(("w", '{"city": "x", "days": 3}'),),
    ),
    Output(
        "qwen38",
        "closing token in a value",
        qwen("<parameter=city>\na</think>b\n</parameter>\n"),
        calls=(("w", '{"city": "a</think>b"}'),),
    ),
    Output("qwen38", "second closing token", "r</think>a</think> b", "a b", "r", opening="reasoning"),
    Output("qwen38", "reasoning opened by the model", "<think>\nr\n</think>\n\na", "a", "r"),
    Output("qwen38", "only reasoning", "r and no end", "", "r and no end", opening="reasoning"),
    Output(
        "mimo_v2",
        "verbatim",
        qwen("<parameter=city>\n\n x\n</parameter><parameter=days>3</parameter>"),
        calls=(("w", '{"city": "\\n\\n x\\n", "days": 3}'),),
    ),
)


def glm(*pairs: str, name: str = "w") -> str:
    keys = pairs[::2]
    return (
        f"<tool_call>{name}"
        + "".join(
            f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>"
            for key, value in zip(keys, pairs[1::2], strict=True)
        )
        + "</tool_call>"
    )


GLM: Final = (
    Output(
        "glm53", "call", f"r</think>{glm('city', 'Paris', 'days', '3')}", "", "r", (("w", PARIS_JSON),), "reasoning"
    ),
    Output("glm53", "no arguments", glm(), calls=(("w", "{}"),)),
    Output(
        "glm53",
        "newlines",
        "<tool_call>w\n<arg_key>city</arg_key>\n<arg_value>x</arg_value>\n</tool_call>",
        calls=(("w", '{"city": "x"}'),),
    ),
    Output(
        "glm53", "two calls", glm("days", "1") + glm("days", "2"), calls=(("w", '{"days": 1}'), ("w", '{"days": 2}'))
    ),
    Output("glm53", "mention", "write <tool_call> first", "write <tool_call> first"),
    Output("glm53", "mention of both tags", "<tool_call> and </tool_call>", "<tool_call> and </tool_call>"),
    Output("glm53", "call ends reasoning", f"so {glm('days', '3')}", "", "so", (("w", '{"days": 3}'),), "reasoning"),
    Output(
        "glm53",
        "value spells the closer",
        glm("city", "a </tool_call> b"),
        calls=(("w", '{"city": "a </tool_call> b"}'),),
    ),
    Output(
        "glm53", "last value unclosed", glm("city", "x").replace("</arg_value>", ""), calls=(("w", '{"city": "x"}'),)
    ),
    Output("glm53", "undecided at the end", "go <tool_call>w", "go", failure=INCOMPLETE),
    Output("glm53", "truncated", glm("city", "Paris")[:40], failure=INCOMPLETE, started=("w",)),
    Output(
        "glm53",
        "text among arguments",
        glm("city", "x").replace("</tool_call>", "oops</tool_call>"),
        failure="outside its arguments",
        never=True,
        started=("w",),
    ),
    Output("glm53", "empty key", glm("", "x"), failure="without a name", never=True, started=("w",)),
)

Q: Final = '<|"|>'


def gemma(body: str, name: str = "w") -> str:
    return f"<|tool_call>call:{name}{{{body}}}<tool_call|>"


GEMMA: Final = (
    Output("gemma4", "plain", "Hello", "Hello"),
    Output("gemma4", "reasoning", "<|channel>thought\nhm\n<channel|>Hi", "Hi", "hm"),
    Output("gemma4", "call", gemma(f"city:{Q}Paris{Q},days:3"), calls=(("w", PARIS_JSON),)),
    Output(
        "gemma4",
        "nested",
        gemma(f"o:{{a:[1,{Q}z{Q},true,null,-2.5]}}"),
        calls=(("w", '{"o": {"a": [1, "z", true, null, -2.5]}}'),),
    ),
    Output("gemma4", "empty", gemma(""), calls=(("w", "{}"),)),
    Output(
        "gemma4",
        "string with markup",
        gemma(f"city:{Q}a}}<tool_call|>, b:1{Q}"),
        calls=(("w", '{"city": "a}<tool_call|>, b:1"}'),),
    ),
    Output("gemma4", "bare word", gemma("city:Paris,wind:yes"), calls=(("w", '{"city": "Paris", "wind": "yes"}'),)),
    Output(
        "gemma4", "call ends reasoning", f"<|channel>thought\nso {gemma('days:3')}", "", "so", (("w", '{"days": 3}'),)
    ),
    Output(
        "gemma4", "two calls", gemma("days:1") + gemma("days:2"), calls=(("w", '{"days": 1}'), ("w", '{"days": 2}'))
    ),
    Output(
        "gemma4", "opener always starts a call", "The <|tool_call> token", "The", failure="no valid header", never=True
    ),
    Output("gemma4", "opener alone", "The <|tool_call>", "The", failure=INCOMPLETE),
    Output("gemma4", "unclosed string", f"<|tool_call>call:w{{city:{Q}Par", failure=INCOMPLETE, started=("w",)),
    Output("gemma4", "no comma", gemma(f"city:{Q}a{Q} days:3"), failure="lacks a comma", never=True, started=("w",)),
    Output("gemma4", "empty name", gemma("", ""), failure="empty name", never=True),
    Output("gemma4", "other channel is text", "<|channel>plan\nx<channel|>", "<|channel>plan\nx"),
)


def minimax(*invokes: str) -> str:
    return f"{NS}<tool_call>\n" + "\n".join(invokes) + f"\n{NS}</tool_call>"


def invoke(body: str, name: str = "w") -> str:
    return f'{NS}<invoke name="{name}">{body}{NS}</invoke>'


def element(name: str, body: str) -> str:
    return f"{NS}<{name}>{body}{NS}</{name}>"


MINIMAX: Final = (
    Output("minimax_m3", "reasoning", "<mm:think>hm</mm:think>Hi", "Hi", "hm"),
    Output("minimax_m3", "stray leading closer", "</mm:think>Hi", "Hi"),
    Output(
        "minimax_m3",
        "call",
        minimax(invoke(element("city", "Paris") + element("days", "3"))),
        calls=(("w", PARIS_JSON),),
    ),
    Output(
        "minimax_m3",
        "nested",
        minimax(invoke(element("o", element("a", element("item", "1") + element("item", "2"))))),
        calls=(("w", '{"o": {"a": [1, 2]}}'),),
    ),
    Output(
        "minimax_m3",
        "two calls",
        minimax(invoke(element("days", "1")), invoke("", "z")),
        calls=(("w", '{"days": 1}'), ("z", "{}")),
    ),
    Output("minimax_m3", "text around", f"Look:\n{minimax(invoke(''))}\nDone", "Look:\nDone", calls=(("w", "{}"),)),
    Output("minimax_m3", "unnamespaced tags are text", "<tool_call><invoke>", "<tool_call><invoke>"),
    Output(
        "minimax_m3", "opener always starts a call", f"{NS}<tool_call> prose", failure="unexpected text", never=True
    ),
    Output(
        "minimax_m3", "truncated", minimax(invoke(element("city", "Paris")))[:90], failure=INCOMPLETE, started=("w",)
    ),
    Output(
        "minimax_m3",
        "between calls",
        minimax(invoke(""))[: -len(f"{NS}</tool_call>")],
        calls=(("w", "{}"),),
        failure=INCOMPLETE,
    ),
    Output(
        "minimax_m3",
        "crossed tags",
        minimax(invoke(f"{NS}<a>{NS}<b>{NS}</a>{NS}</b>")),
        failure="closes <a> inside <b>",
        never=True,
        started=("w",),
    ),
    Output("minimax_m3", "empty name", minimax(invoke("", "")), failure="empty name", never=True),
)


def xtml(name: str, body: str, attributes: str = "") -> str:
    return f"<|open|>{name}{attributes}<|sep|>{body}<|close|>{name}<|sep|>"


def kimi(*arguments: str, name: str = "w", index: int = 1) -> str:
    return xtml("call", "".join(arguments), f' tool="{name}" index="{index}"')


def argument(key: str, kind: str, value: str) -> str:
    return xtml("argument", value, f' key="{key}" type="{kind}"')


END: Final = "<|close|>message<|sep|>"
KIMI_PARIS: Final = kimi(argument("city", "string", "Paris"), argument("days", "number", "3"))

KIMI: Final = (
    Output("kimi3", "answer", f"r<|close|>think<|sep|>{xtml('response', 'Hi')}{END}", "Hi", "r", opening="reasoning"),
    Output(
        "kimi3",
        "call",
        f"r<|close|>think<|sep|>{xtml('response', '')}{xtml('tools', KIMI_PARIS)}{END}",
        "",
        "r",
        (("w", PARIS_JSON),),
        "reasoning",
    ),
    Output("kimi3", "two calls", xtml("tools", kimi() + kimi(name="z", index=2)), calls=(("w", "{}"), ("z", "{}"))),
    Output(
        "kimi3",
        "json block",
        xtml("tools", kimi(xtml("json", '{"city": "x"}', ' type="object"'))),
        calls=(("w", '{"city": "x"}'),),
    ),
    Output(
        "kimi3",
        "escaped attributes",
        xtml("tools", kimi(argument("q&amp;a", "string", "b & c"), name="say&quot;")),
        calls=(('say"', '{"q&a": "b & c"}'),),
    ),
    Output("kimi3", "reasoning never closed", f"r{xtml('response', 'Hi')}{END}", "Hi", "r", opening="reasoning"),
    Output("kimi3", "calls right out of reasoning", f"r{xtml('tools', kimi())}", "", "r", (("w", "{}"),), "reasoning"),
    Output(
        "kimi3",
        "argument that isn't JSON",
        xtml("tools", kimi(argument("days", "number", "x"))),
        failure="not valid JSON",
        never=True,
        started=("w",),
    ),
    Output(
        "kimi3",
        "json block that isn't an object",
        xtml("tools", kimi(xtml("json", "[]"))),
        failure="not a JSON object",
        never=True,
        started=("w",),
    ),
    Output(
        "kimi3",
        "truncated",
        xtml("tools", kimi(argument("city", "string", "Paris")))[:70],
        failure=INCOMPLETE,
        started=("w",),
    ),
    Output("kimi3", "prose among calls", "<|open|>tools<|sep|>prose", failure="unexpected text", never=True),
)


def muse(*invokes: str) -> str:
    return "<atem:function_calls>\n" + "\n".join(invokes) + "\n</atem:function_calls>"


def atem(name: str = "w", **parameters: str) -> str:
    body = "".join(f'<atem:parameter name="{key}">{value}</atem:parameter>\n' for key, value in parameters.items())
    return f'<atem:invoke name="{name}">\n{body}</atem:invoke>'


NEXT: Final = "<|eom|><|start|>assistant"

MUSE: Final = (
    Output("muse_spark", "answer", " to=user<|message|>Hi<|eot|>", "Hi", opening="reasoning"),
    Output(
        "muse_spark",
        "reasoning and answer",
        f" to=self<|message|>hm{NEXT} to=user<|message|>Hi<|eot|>",
        "Hi",
        "hm",
        opening="reasoning",
    ),
    Output(
        "muse_spark",
        "no recipient is reasoning",
        f"<|message|>hm{NEXT} to=user<|message|>Hi",
        "Hi",
        "hm",
        opening="reasoning",
    ),
    Output(
        "muse_spark",
        "commentary shows, developer doesn't",
        f" to=commentary<|message|>a{NEXT} to=developer<|message|>b{NEXT} to=user<|message|>c",
        "ac",
        opening="reasoning",
    ),
    Output(
        "muse_spark",
        "call",
        f" to=w<|message|>{muse(atem(city='Paris', days='3'))}<|eot|>",
        calls=(("w", PARIS_JSON),),
        opening="reasoning",
    ),
    Output(
        "muse_spark",
        "doubled name",
        f" to=w.w<|message|>{muse(atem('w.w', days='3'))}<|eom|>",
        calls=(("w", '{"days": 3}'),),
        opening="reasoning",
    ),
    Output(
        "muse_spark",
        "calls to self are reasoning",
        f" to=self<|message|>{muse(atem())}",
        "",
        muse(atem()),
        opening="reasoning",
    ),
    Output(
        "muse_spark",
        "two calls",
        f" to=w<|message|>{muse(atem(), atem('z'))}<|eot|>",
        calls=(("w", "{}"), ("z", "{}")),
        opening="reasoning",
    ),
    Output(
        "muse_spark",
        "truncated",
        f" to=w<|message|>{muse(atem(city='Paris'))[:60]}",
        failure=INCOMPLETE,
        started=("w",),
        opening="reasoning",
    ),
    Output(
        "muse_spark",
        "prose to a tool",
        " to=w<|message|>please",
        failure="unexpected text",
        never=True,
        opening="reasoning",
    ),
)


def hermes(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


HERMES_PARIS: Final = hermes(f'{{"name": "w", "arguments": {PARIS_JSON}}}')

HERMES: Final = (
    Output("qwen3", "call", f"<think>\nr\n</think>\n\n{HERMES_PARIS}", "", "r", (("w", PARIS_JSON),)),
    Output(
        "qwen3",
        "two calls",
        hermes('{"name": "w", "arguments": {}}') + "\n" + hermes('{"name": "z"}'),
        calls=(("w", "{}"), ("z", "{}")),
    ),
    Output(
        "qwen3",
        "closer inside a string",
        hermes('{"name": "w", "arguments": {"city": "\\"</tool_call>"}}'),
        calls=(("w", '{"city": "\\"</tool_call>"}'),),
    ),
    Output("qwen3", "mention", "a <tool_call> tag", "a <tool_call> tag"),
    Output("qwen3", "bad JSON", hermes('{"name": "w", "arguments": {a}}'), failure="not valid JSON", never=True),
    Output(
        "qwen3",
        "arguments aren't an object",
        hermes('{"name": "w", "arguments": [1]}'),
        failure="not a JSON object",
        never=True,
    ),
    Output("qwen3", "empty name", hermes('{"name": "", "arguments": {}}'), failure="empty name", never=True),
    Output("qwen3", "truncated", hermes('{"name": "w", "arguments": {"city": "P"}}')[:40], failure=INCOMPLETE),
)


def dsml(*invokes: str, space: str = "", outer: str = "tool_calls") -> str:
    return f"\n\n<｜DSML｜{space}{outer}>\n" + "\n".join(invokes) + f"\n</｜DSML｜{space}{outer}>"


def dsml_invoke(*parameters: str, name: str = "w", space: str = "") -> str:
    return (
        f'<｜DSML｜{space}invoke name="{name}">\n' + "".join(f"{p}\n" for p in parameters) + f"</｜DSML｜{space}invoke>"
    )


def dsml_parameter(key: str, value: str, string: bool = True, space: str = "") -> str:
    flag = "true" if string else "false"
    return f'<｜DSML｜{space}parameter name="{key}" string="{flag}">{value}</｜DSML｜{space}parameter>'


_DS_PARIS: Final = dsml_invoke(dsml_parameter("city", "Paris"), dsml_parameter("days", "3", False))
_DS41_PARIS: Final = dsml_invoke(
    dsml_parameter("city", "Paris", space=" "), dsml_parameter("days", "3", False, " "), space=" "
)

DEEPSEEK: Final = (
    Output("deepseek4", "plain", "Hello\n\nyou\n", "Hello\n\nyou\n"),
    Output("deepseek4", "reasoning", "\nr\n</think>\n\nHi", "Hi", "r", opening="reasoning"),
    Output("deepseek4", "call", f"r</think>Look:{dsml(_DS_PARIS)}", "Look:", "r", (("w", PARIS_JSON),), "reasoning"),
    Output(
        "deepseek41",
        "call",
        f"r</think>{dsml(_DS41_PARIS, space=' ', outer='calls')}",
        "",
        "r",
        (("w", PARIS_JSON),),
        "reasoning",
    ),
    Output("deepseek4", "call ends reasoning", f"r{dsml(_DS_PARIS)}", "", "r", (("w", PARIS_JSON),), "reasoning"),
    Output("deepseek4", "two calls", dsml(_DS_PARIS, dsml_invoke(name="z")), calls=(("w", PARIS_JSON), ("z", "{}"))),
    Output(
        "deepseek4",
        "text after the calls is discarded",
        f"a{dsml(_DS_PARIS)} and more",
        "a",
        calls=(("w", PARIS_JSON),),
    ),
    Output("deepseek4", "no outer block", f"a {_DS_PARIS}", "a ", calls=(("w", PARIS_JSON),)),
    Output(
        "deepseek4",
        "quotes and backslashes",
        dsml(dsml_invoke(dsml_parameter("city", 'a"\\b'))),
        calls=(("w", '{"city": "a\\"\\\\b"}'),),
    ),
    Output(
        "deepseek4",
        "repeated argument",
        dsml(dsml_invoke(dsml_parameter("city", "a"), dsml_parameter("city", "b"))),
        failure="repeats an argument",
        never=True,
        started=("w",),
    ),
    Output(
        "deepseek4",
        "argument without a name",
        dsml(dsml_invoke(dsml_parameter("", "a"))),
        failure="without a name",
        never=True,
        started=("w",),
    ),
    Output("deepseek4", "empty name", dsml(dsml_invoke(name="")), failure="empty name", never=True),
    Output(
        "deepseek4",
        "value that isn't JSON",
        dsml(dsml_invoke(dsml_parameter("days", "3 4", False))),
        failure="not valid JSON",
        never=True,
        started=("w",),
    ),
    Output(
        "deepseek4",
        "value with an open bracket",
        dsml(dsml_invoke(dsml_parameter("days", "{bad", False))),
        failure=INCOMPLETE,
        started=("w",),
    ),
    Output("deepseek4", "truncated", dsml(_DS_PARIS)[:110], failure=INCOMPLETE, started=("w",)),
    Output("deepseek4", "mark in prose", "a <｜DSML｜ b", "a ", failure=INCOMPLETE),
    Output("deepseek4", "second closer dropped", "a </think> b", "a  b"),
)

OUTPUTS: Final = (*QWEN, *GLM, *GEMMA, *MINIMAX, *KIMI, *MUSE, *HERMES, *DEEPSEEK)
