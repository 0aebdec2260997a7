"""The streams of Messages and Responses put together from their deltas alone, as a client that trusts no summary does.

Both folds hold every event to the grammar of its stream on the way.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tests.support.sdk import events


def fold_message(frames: Sequence[bytes]) -> dict[str, Any]:
    """The message that a client accumulates, checking the grammar of the stream on the way."""
    message: dict[str, Any] = {}
    buffers: list[str] = []
    is_open = False
    for name, data in events(frames):
        assert data["type"] == name
        match name:
            case "message_start":
                assert not message
                message = data["message"]
                assert message["content"] == []
            case "content_block_start":
                assert not is_open and data["index"] == len(message["content"])
                is_open = True
                message["content"].append(data["content_block"])
                buffers.append("")
            case "content_block_delta":
                assert is_open and data["index"] == len(message["content"]) - 1
                block, delta = message["content"][-1], data["delta"]
                match delta["type"]:
                    case "text_delta":
                        block["text"] += delta["text"]
                    case "thinking_delta":
                        block["thinking"] += delta["thinking"]
                    case "signature_delta":
                        block["signature"] = delta["signature"]
                    case "input_json_delta":
                        buffers[-1] += delta["partial_json"]
            case "content_block_stop":
                assert is_open and data["index"] == len(message["content"]) - 1
                is_open = False
                if message["content"][-1]["type"] == "tool_use":
                    message["content"][-1]["input"] = json.loads(buffers[-1])
            case "message_delta":
                assert not is_open
                message |= data["delta"]
                message["usage"] |= data["usage"]
            case "message_stop":
                assert (name, data) == events(frames)[-1]
            case _:
                raise AssertionError(name)
    return message


class ResponseFold:
    """What a client accumulates from the deltas alone, checking the life cycle on the way."""

    def __init__(self, frames: Sequence[bytes]) -> None:
        self.items: list[dict[str, Any]] = []
        self.final: dict[str, Any] = {}
        self._ids: set[str] = set()
        self._open: dict[str, Any] | None = None
        found = events(frames)
        assert [data["sequence_number"] for _, data in found] == list(range(len(found)))
        assert [name for name, _ in found[:2]] == ["response.created", "response.in_progress"]
        assert b"[DONE]" not in b"".join(frames)
        for position, (name, data) in enumerate(found):
            assert data["type"] == name
            if "response" in data:
                assert not self.final
                self._ids.add(data["response"]["id"])
                if position > 1:
                    self.final = data["response"]
            else:
                assert not self.final
                self._take(name or "", data)
        assert len(self._ids) == 1

    def _take(self, name: str, data: dict[str, Any]) -> None:
        if name == "response.output_item.added":
            assert self._open is None and data["output_index"] == len(self.items)
            self._open = data["item"]
            assert self._open["status"] == "in_progress"
            return
        assert self._open is not None and data["output_index"] == len(self.items)
        if name == "response.output_item.done":
            item = data["item"]
            assert {**self._open, "status": item["status"]} == item
            self.items.append(item)
            self._open = None
            return
        assert data["item_id"] == self._open["id"]
        if name == "response.content_part.added":
            assert data["content_index"] == len(self._open["content"])
            self._open["content"].append(data["part"])
        elif name == "response.content_part.done":
            assert self._open["content"][data["content_index"]] == data["part"]
        elif name in ("response.output_text.delta", "response.reasoning_text.delta"):
            part = self._open["content"][data["content_index"]]
            part["text"] += data["delta"]
            part.setdefault("logprobs", []).extend(data.get("logprobs", []))
            if part["type"] == "reasoning_text":
                del part["logprobs"]
        elif name in ("response.output_text.done", "response.reasoning_text.done"):
            part = self._open["content"][data["content_index"]]
            assert part["text"] == data["text"] and part.get("logprobs") == data.get("logprobs")
        else:
            self._call(name, data)

    def _call(self, name: str, data: dict[str, Any]) -> None:
        assert self._open is not None
        key = {"response.function_call_arguments": "arguments", "response.custom_tool_call_input": "input"}[
            name.rpartition(".")[0]
        ]
        if name.endswith("delta"):
            self._open[key] += data["delta"]
        else:
            assert name.endswith("done") and self._open[key] == data[key]
