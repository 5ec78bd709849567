"""Prompts are the public framework's word for word, and the draws around them functions of (seed, position)."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from models.cosmos3_policy.inputs.actions import ActionLayout
from models.cosmos3_policy.inputs.captions import Captions
from models.cosmos3_policy.inputs.prompt import PROMPTS, ClipFacts, framing
from models.cosmos3_policy.inputs.settings import ProcessorConfig
from models.cosmos3_policy.vision.canvas import choose_canvas

GOLDEN = json.loads((Path(__file__).parent / "golden" / "prompts.json").read_text())
FACTS = ClipFacts(num_frames=33, fps=15.0, height=544, width=736, aspect="4,3", num_steps=33, framing=framing(3))


@pytest.mark.parametrize("kind", ["json", "plain"])
def test_prompts_are_those_of_the_public_framework(kind: str) -> None:
    assert len(GOLDEN["prompts"]) == 64
    for case in GOLDEN["prompts"]:
        canvas = choose_canvas("256" if case["height"] == 256 else "480", case["height"], case["width"])
        assert canvas.size == (case["height"], case["width"])
        facts = ClipFacts(
            num_frames=case["frames"], fps=case["fps"], height=case["height"], width=case["width"],
            aspect=canvas.aspect, num_steps=case["frames"], framing=framing(case["views"]),
        )  # fmt: skip
        assert PROMPTS[kind](case["caption"], facts, case["idle"]) == case[kind]


def test_no_caption_is_no_prompt() -> None:
    assert PROMPTS["json"]("", FACTS, 3) == PROMPTS["plain"]("", FACTS, 3) == ""


def test_idle_steps_are_counted_as_the_public_framework_counts_them() -> None:
    counts = set()
    for case in GOLDEN["idle"]:
        # Flipped: what is compared are differences, which have the same size.
        layout = ActionLayout({"s": 8}, {"a": 8}, gripper=["s[7]", "a[-1]"], width=64)
        rows = np.asarray(case["action"], np.float32)[None]
        assert layout.idle_steps(rows, case["fps"]).tolist() == [case["idle"]]
        counts.add(case["idle"])
    assert len(counts) > 6  # the cases are not all the same


def test_paraphrases_and_dropout_are_drawn_by_position() -> None:
    settings = ProcessorConfig(caption_dropout=0.1, tokenizer="words")
    texts, positions = ["one | two | three"] * 3000, torch.arange(3000)
    captions = Captions(settings, seed=3)
    drawn = captions.prompts(texts, positions, FACTS, None, random=True)
    said = [json.loads(each)["actions"][0]["description"] if each else "" for each in drawn]
    shares = {word: said.count(word) / 3000 for word in ("", "one.", "two.", "three.")}
    assert sum(shares.values()) == pytest.approx(1)
    assert abs(shares[""] - 0.1) < 0.02
    assert all(abs(shares[word] - 0.3) < 0.03 for word in ("one.", "two.", "three."))
    # Whatever batch a sample lands in.
    order = torch.randperm(3000, generator=torch.Generator().manual_seed(0))
    again = captions.prompts(texts, positions[order], FACTS, None, random=True)
    assert again == [drawn[i] for i in order.tolist()]
    assert Captions(settings, seed=4).prompts(texts, positions, FACTS, None, random=True) != drawn
    plain = captions.prompts(texts[:5], positions[:5], FACTS, None, random=False)
    assert [json.loads(each)["actions"][0]["description"] for each in plain] == ["one."] * 5


@pytest.mark.parametrize("random", [True, False])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("one | ", {"one."}),
        (" | one", {"one."}),
        ("| one |  |", {"one."}),  # joined, then stripped
        ("one |  | two", {"one.", "two."}),
        ("one|two", {"one|two."}),
        ("  ", {""}),
        (" | ", {""}),
    ],
)
def test_blank_paraphrases_are_never_drawn(text: str, expected: set[str], random: bool) -> None:
    captions = Captions(ProcessorConfig(caption_dropout=0.0), seed=0)
    drawn = captions.prompts([text] * 40, range(40), FACTS, None, random=random)
    said = [json.loads(each)["actions"][0]["description"] if each else "" for each in drawn]
    assert set(said) == (expected if random else {said[0]})
    assert said[0] in expected


def test_texts_without_a_separator_are_taken_whole() -> None:
    captions = Captions(ProcessorConfig(caption_separator="", caption_dropout=0.0), seed=0)
    (prompt,) = captions.prompts(["a | b"], [0], FACTS, [0], random=True)
    assert json.loads(prompt)["actions"][0] == {
        "time": "0:00-0:02", "description": "a | b.", "idle_frame": "0 out of 33.",
    }  # fmt: skip
