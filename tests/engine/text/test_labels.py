"""Labels are tokens of their own directly after a prompt, as the whole prompt's encoding shows."""

from __future__ import annotations

import pytest

from engine.prepare import prepare
from engine.prepared import PreparedModel
from engine.text.labels import Labels
from engine.text.lowering import Lowering, ServingLimits
from engine.types.conversation import Conversation, Message, Text
from engine.types.request import GenerationRequest, RequestError, TextPrompt

CANDIDATES = [*"ABZaz059", "AA", "qj", "QXZ", "0", "10", "<|im_end|>", "é", "", "A B"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreparedModel:
    return PreparedModel.load(prepare("builtin:smollm2", tmp_path_factory.mktemp("cache")))


def asked(text: str) -> GenerationRequest:
    return GenerationRequest("systemone", (Conversation((Message("user", (Text(text),)),)),))


@pytest.mark.parametrize("text", ["Answer:", "a <|im_end|> spelled out\nAnswer:", "", "long " * 500])
def test_labels_extend_the_prompt_by_one_token(model: PreparedModel, text: str) -> None:
    lowering = Lowering(model, ServingLimits(context=4096))
    found = lowering.label_ids(asked(text), CANDIDATES)
    prompt = lowering.prepare(asked(text)).children[0].token_ids.tolist()
    tail = prompt[len(prompt) - prompt[::-1].index(model.tokenizer.encode("<|im_start|>", specials=True)[0]) - 1 :]
    spelled = model.tokens.decode(tail)
    for label, id in zip(CANDIDATES, found, strict=True):
        whole = model.tokenizer.encode(spelled + label, specials=True)
        ordinary = len(whole) == len(tail) + 1 and whole[:-1] == tail and not model.tokens.is_control(whole[-1])
        assert id == (whole[-1] if ordinary else None), label
    assert found[0] is not None and found[CANDIDATES.index("<|im_end|>")] is None


def test_a_label_that_merges_into_the_prompt_is_none(model: PreparedModel) -> None:
    labels = Labels(model.tokenizer, model.tokens)
    assert labels.after([("<|im_start|>the", True)], ["re", "."])[0] is None
    assert labels.after([("plain the", False)], ["re"]) == (None,)
    assert labels.after([], ["A"]) == (None,) and labels.after([("x", True)], []) == ()


def test_raw_prompts_have_no_labels(model: PreparedModel) -> None:
    lowering = Lowering(model, ServingLimits(context=4096))
    with pytest.raises(RequestError, match="conversation"):
        lowering.label_ids(GenerationRequest("completions", (TextPrompt("x"),)), ["A"])
