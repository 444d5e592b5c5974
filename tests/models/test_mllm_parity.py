"""Our MLLM against tensors of the authors' public inference code, at tiny random sizes."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from animegamer.config import LoraConfig, MllmConfig
from animegamer.game import CharacterState, GameState, MotionScope, Turn
from animegamer.game_data import GameBatch
from animegamer.language import Language, special_tokens
from animegamer.models.mistral import add_lora
from animegamer.models.mllm import NextStateMLLM

DATA = Path(__file__).parents[1] / "data" / "parity"
CASES = ("t1", "t2", "t3", "t3roll", "t3states", "t4")


class Words:
    """The release's tokenizer, as far as Language asks for it: texts are taken from the prompts."""

    unk_token_id, bos_token_id = 0, 1

    def __init__(self, texts):
        names = special_tokens()
        self.ids = dict(zip(names, range(32000, 32000 + len(names)), strict=True))
        self.texts = texts

    def convert_tokens_to_ids(self, names):
        return [self.ids[name] for name in names]

    def get_added_vocab(self):
        return self.ids

    def __call__(self, text, add_special_tokens):
        assert text.startswith("<TURN>")
        assert not add_special_tokens
        return {"input_ids": [self.ids["<TURN>"], *self.texts[text.removeprefix("<TURN>")]]}


@pytest.fixture(scope="module")
def fixture():
    spec = importlib.util.spec_from_file_location("parity_load", DATA / "parity_load.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.load("mllm")


@pytest.fixture(scope="module")
def mllm(fixture):
    tensors, about = fixture
    sizes = about["config"]
    config = MistralConfig(
        vocab_size=sizes["vocab"],
        hidden_size=sizes["hidden_size"],
        intermediate_size=sizes["intermediate_size"],
        num_hidden_layers=sizes["layers"],
        num_attention_heads=sizes["heads"],
        num_key_value_heads=sizes["kv_heads"],
        rms_norm_eps=sizes["rms_norm_eps"],
        sliding_window=sizes["sliding_window"],
    )
    lora = LoraConfig(sizes["lora_r"], float(sizes["lora_alpha"]), 0.05)
    llm = add_lora(MistralForCausalLM(config), lora)
    model = NextStateMLLM(llm, Language(Words({}), 226), MllmConfig(lora=lora), 1920)
    names = {
        "input_resampler.proj": "input_projection",
        "output_resampler.proj": "output_projection",
    }
    weights = {}
    for name, tensor in tensors.items():
        if name.startswith("sd."):
            name = name.removeprefix("sd.")
            for old, new in names.items():
                name = name.replace(old, new)
            weights[name] = tensor
    model.load_state_dict(weights)
    return model.eval()


def batch_of(tensors, case, history):
    """The fixture's tokens as a batch; ``history`` are the turns whose s_a is placed."""

    def numbered(mask):
        count = mask.long().cumsum(1) - 1
        return torch.where(mask, count, -1)

    ids = tensors[f"{case}.in.input_ids"]
    attention = tensors[f"{case}.in.attention_mask"]
    query = numbered(tensors[f"{case}.in.ids_gen_mask"])
    turn = tensors.get(f"{case}.in.gen_turn_id", torch.tensor([len(history)]))
    return GameBatch(
        ids=ids,
        position_ids=torch.arange(ids.shape[1]).expand_as(ids),
        branch=torch.where(attention == 0, -1, 0),
        slot=numbered(tensors[f"{case}.in.ids_cmp_mask"]),
        query=torch.where(query >= 0, query + 226 * turn[:, None], -1),
        labels=tensors.get(f"{case}.in.labels", torch.full_like(ids, -100)),
        turn_mask=torch.ones(len(ids), max(1, len(history)), dtype=torch.bool),
        s_a=torch.stack([tensors[f"turn_embedding.{t}"] for t in history]).expand(
            len(ids), -1, -1, -1
        )
        if history
        else None,
    )


def history_of(about, case):
    embeddings = about[f"case {case.replace('t3states', 't3')}"]["video_embeds"]
    return [int(name.rpartition(".")[2]) for name in embeddings if name != "zeros"]


@pytest.mark.parametrize("case", CASES)
def test_hidden_states_and_predictions(fixture, mllm, case):
    tensors, about = fixture
    batch = batch_of(tensors, case, history_of(about, case))
    close = about["tolerance"]["last_hidden"]
    with torch.no_grad():
        hidden = mllm.hidden_states(batch)
        predicted = mllm.output_projection(hidden[batch.query >= 0])
    torch.testing.assert_close(hidden, tensors[f"{case}.out.last_hidden"], **close)
    rows = tensors["pred_rows"]
    expected = tensors[f"{case}.out.pred_at_gen_mask_rows"]
    torch.testing.assert_close(predicted[rows], expected, **about["tolerance"]["pred"])
    # The release's own slice is three places late; ours must not be.
    assert not torch.allclose(
        predicted[rows], tensors[f"{case}.out.pred_upstream_slice_rows"], atol=0.1
    )


@pytest.mark.parametrize("case", ["t1", "t3"])
def test_logits(fixture, mllm, case):
    tensors, about = fixture
    with torch.no_grad():
        hidden = mllm.hidden_states(batch_of(tensors, case, history_of(about, case)))
        logits = mllm.mistral.lm_head(hidden[0, -1])
    expected = tensors[f"{case}.out.lm_logits_last_bi"]
    torch.testing.assert_close(logits, expected, **about["tolerance"]["last_hidden"])


@pytest.mark.parametrize("case", ["train_b1", "train_b2"])
def test_losses_and_gradients(fixture, mllm, case):
    tensors, about = fixture
    mllm.zero_grad()
    loss, metrics = mllm(batch_of(tensors, case, [0, 1, 2]))
    loss.backward()
    close = about["tolerance"]["losses"]["rtol"]
    expected = about[f"case {case}"]["losses"]
    assert loss.item() == pytest.approx(expected["total_loss"], rel=close)
    assert metrics["ce"].item() == pytest.approx(expected["lm_loss"], rel=close)
    assert metrics["mse"].item() == pytest.approx(expected["rec_loss"], rel=close)
    parameters = dict(mllm.named_parameters())
    prefix = f"{case}.out.grad."
    checked = 0
    for key, gradient in tensors.items():
        if key.startswith(prefix):
            name = key.removeprefix(prefix)
            name = name.replace("put_resampler.proj", "put_projection")
            torch.testing.assert_close(
                parameters[name].grad, gradient, **about["tolerance"]["grads"]
            )
            checked += 1
    assert checked == 7
    rows = tensors[f"{case}.out.grad_rows_32000_32010.embed_tokens"]
    own = mllm.mistral.get_input_embeddings().weight.grad[32000:32010]
    torch.testing.assert_close(own, rows, **about["tolerance"]["grads"])
    mllm.zero_grad()


def without_doubled(ids):
    """The prompt without the release's second ``</ST>``."""
    end = 32281
    return [i for i, before in zip(ids, [None, *ids], strict=False) if (i, before) != (end, end)]


@pytest.mark.parametrize("case", ["t1", "t3states"])
def test_prompts(fixture, case):
    tensors, about = fixture
    ids = tensors[f"{case}.in.input_ids"][0].tolist()
    texts, turns = {}, []
    for t, start in enumerate(i for i, token in enumerate(ids) if token == 32282):
        texts[f"caption {t}"] = ids[start + 1 : ids.index(32256, start)]
        level, social, entertainment, stamina = about["states_given_ML_SC_ET_ST"][t]
        state = GameState(MotionScope(level), CharacterState(stamina, social, entertainment))
        turns.append(Turn(f"caption {t}", state))
    language = Language(Words(texts), 226)
    rendered = language.render(turns[:-1], turns[-1].instruction)
    assert rendered.ids.tolist() == without_doubled(ids)
    queries = np.flatnonzero(rendered.query >= 0)
    assert len(queries) == 226
    assert (np.diff(queries) == 1).all()
    if case == "t1":
        assert [queries[0], queries[-1]] == about["case t1"]["gen_positions"]
