"""A real chat model, where its folder is here: SOLERA_SMOLLM2=FOLDER."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from solera.models import loading
from solera.tasks.prompting import encode_prompt

FOLDER = Path(os.environ.get("SOLERA_SMOLLM2", "nowhere"))
pytestmark = pytest.mark.skipif(not (FOLDER / "config.json").is_file(), reason="SmolLM2-135M-Instruct is not here")


@pytest.fixture(scope="module")
def smollm2():
    return loading.load(str(FOLDER), torch.device("cpu"))


def test_its_tied_head_is_one_parameter_and_its_size_is_right(smollm2):
    model, _ = smollm2
    assert sum(parameter.numel() for parameter in model.parameters().values()) == 134_515_008
    assert "lm_head.weight" not in model.parameters()
    assert model.head.weight is model.module.get_input_embeddings().weight


def test_its_chat_template_opens_the_assistants_turn_and_its_end_token_closes_it(smollm2):
    _, codec = smollm2
    ids = encode_prompt(codec, "{prompt} Answer briefly.", "What is 2+2?")
    text = codec.decode(np.array(ids, np.int32))
    assert text.endswith("<|im_start|>user\nWhat is 2+2? Answer briefly.<|im_end|>\n<|im_start|>assistant\n")
    (end,) = codec.end_token_ids
    assert codec.decode(np.array([*codec.encode("4"), end], np.int32)) == "4"
