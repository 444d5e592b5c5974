from __future__ import annotations

import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import MistralConfig, MistralForCausalLM

from animegamer.config import LoraConfig, MllmConfig
from animegamer.game import GameState, Turn
from animegamer.game_data import collate_rendered
from animegamer.language import IGNORE, Language, LanguageError
from animegamer.models.mistral import add_lora, attention_mask
from animegamer.models.mllm import NextStateMLLM
from tests.tiny_game import NUM_TOKENS, WIDTH, instruction, make_base, make_mllm, turn


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def mllm(base):
    return make_mllm(base)


def games(count=3, turns=4):
    """Games that differ in length and in whether they have an opening."""
    result = []
    for g in range(count):
        length = 1 + (g + turns - 1) % turns
        result.append([turn(10 * g + t, opening=t == 0 and g % 2 == 1) for t in range(length + 1)])
    return result


def packed(mllm, games, first=False):
    """A training batch of games, all turns predicted but openings (and first turns)."""
    rendered = [
        mllm.language.render_training(
            game,
            [t.instruction is not None and (i > 0 or not first) for i, t in enumerate(game)],
        )
        for game in games
    ]
    batch = collate_rendered(rendered)
    batch.s_a = stack(games)
    return batch


def stack(games):
    s_a = torch.zeros(len(games), max(len(game) for game in games), NUM_TOKENS, WIDTH)
    for g, game in enumerate(games):
        for t, played in enumerate(game):
            s_a[g, t] = torch.as_tensor(played.state.s_a)
    return s_a


def single(mllm, game):
    """The last turn of a game as a sequence of its own, with the true state."""
    last = game[-1]
    batch = collate_rendered([mllm.language.render(game[:-1], last.instruction, last.state)])
    batch.s_a = stack([game])
    return batch


def queries(mllm, batch):
    return mllm.hidden_states(batch)[batch.query >= 0]


# --- the mask


def test_mask_is_causal_but_for_the_queries_of_one_turn():
    branch = torch.zeros(1, 6, dtype=torch.int64)
    turns = torch.tensor([[-1, 0, 0, -1, 1, 1]])
    seen = attention_mask(branch, turns, torch.float32)[0, 0] == 0
    expected = torch.ones(6, 6).tril().bool()
    expected[1, 2] = expected[4, 5] = True
    assert torch.equal(seen, expected)


def test_branches_do_not_see_each_other():
    branch = torch.tensor([[0, 1, 1, 0, 2, -1]])
    turns = torch.full((1, 6), -1)
    seen = attention_mask(branch, turns, torch.bfloat16)[0, 0] == 0
    assert seen[2].tolist() == [True, True, True, False, False, False]
    assert seen[3].tolist() == [True, False, False, True, False, False]
    assert seen[4].tolist() == [True, False, False, True, True, False]
    assert not seen[:5, 5].any()


def test_the_first_query_sees_the_last_and_earlier_tokens_do_not(mllm):
    game = games()[2]
    batch = single(mllm, game)
    places = (batch.query[0] >= 0).nonzero()[:, 0]
    embeddings = mllm.mistral.get_input_embeddings()

    def hidden(nudge):
        def change(_module, _inputs, output):
            output = output.clone()
            output[0, places[-1]] += nudge
            return output

        handle = embeddings.register_forward_hook(change)
        result = mllm.hidden_states(batch)[0]
        handle.remove()
        return result

    with torch.no_grad():
        moved = (hidden(1.0) - hidden(0.0)).abs().amax(-1)
    assert moved[places[0]] > 1e-3
    assert moved[: places[0]].max() == 0


# --- packing


def test_packed_training_equals_separate_sequences(mllm):
    for game in games():
        batch = packed(mllm, [game])
        with torch.no_grad():
            hidden = mllm.hidden_states(batch)[0]
        for t, played in enumerate(game):
            if played.instruction is None:
                continue
            alone = single(mllm, game[: t + 1])
            with torch.no_grad():
                expected = mllm.hidden_states(alone)[0]
            start = int((alone.query[0] >= 0).nonzero()[0]) - 2
            found = hidden[batch.branch[0] == t + 1]
            torch.testing.assert_close(found, expected[start:], atol=1e-5, rtol=0)


def test_packed_loss_is_the_mean_of_the_separate_ones(mllm):
    game = games()[2]
    _, metrics = mllm(packed(mllm, [game]))
    alone = [mllm(single(mllm, game[: t + 1]))[1] for t in range(len(game))]
    for name in metrics:
        expected = torch.stack([m[name] for m in alone]).mean()
        torch.testing.assert_close(metrics[name], expected, atol=1e-5, rtol=1e-5)


def test_padding_changes_nothing(mllm):
    together = mllm.predict_packed(packed(mllm, games()))
    for g, game in enumerate(games()):
        alone = mllm.predict_packed(packed(mllm, [game]))[0]
        torch.testing.assert_close(together[g, : len(game)], alone, atol=1e-5, rtol=0)
        assert together[g, len(game) :].abs().sum() == 0


# --- the loss


def test_loss_is_what_the_paper_says(base):
    plain = make_mllm(base)
    both = make_mllm(base, alpha=0.5, beta=0.5)
    batch = packed(plain, games())
    loss, metrics = plain(batch)
    torch.testing.assert_close(loss, metrics["ce"] + metrics["mse"])
    loss, metrics = both(batch)
    expected = metrics["ce"] + 0.5 * metrics["mse"] + 0.5 * (1 - metrics["cosine"])
    torch.testing.assert_close(loss, expected)
    assert all(not value.requires_grad and value.ndim == 0 for value in metrics.values())


def test_noise_on_the_history_is_for_training_only(base):
    noisy = make_mllm(base, history_noise=0.5)
    batch = packed(noisy, games())
    quiet = noisy(batch)[0]
    assert torch.equal(quiet, noisy(batch)[0])
    noisy.train()
    assert not torch.equal(quiet, noisy(batch)[0])
    clean = batch.s_a.clone()
    assert torch.equal(batch.s_a, clean)


def test_parts_of_a_batch_make_its_loss_by_their_weight(base):
    """With seeds the noise on a game's history is the same in any batch."""
    mllm = make_mllm(base, history_noise=0.5).train()
    every = [*games(2, 4), *games(1, 2)]
    batch = dataclasses.replace(packed(mllm, every), seeds=(1, 2, 3))
    whole = mllm(batch)[0]
    assert torch.equal(whole, mllm(batch)[0])
    assert not torch.equal(whole, mllm(dataclasses.replace(batch, seeds=(1, 2, 4)))[0])
    first = dataclasses.replace(packed(mllm, every[:1]), seeds=(1,))
    rest = dataclasses.replace(packed(mllm, every[1:]), seeds=(2, 3))
    assert first.weight != rest.weight and first.weight + rest.weight == batch.weight
    parts = sum(part.weight * mllm(part)[0] for part in (first, rest)) / batch.weight
    torch.testing.assert_close(parts, whole)


def test_it_learns_a_game_by_heart(base):
    mllm = make_mllm(base)
    batch = packed(mllm, games(2, 3))
    optimiser = torch.optim.AdamW(mllm.parameters(), lr=1e-2)
    mllm.train()
    for _ in range(60):
        optimiser.zero_grad()
        loss, metrics = mllm(batch)
        loss.backward()
        optimiser.step()
    assert metrics["accuracy_state"] == 1
    assert metrics["mse"] < 0.4


@pytest.mark.parametrize("rank", [0, 2])
def test_every_trained_weight_gets_a_gradient_even_without_history(base, rank):
    mllm = make_mllm(base, rank=rank).train()
    mllm(packed(mllm, [[turn(1)], [turn(2)]]))[0].backward()
    trained = [(name, p) for name, p in mllm.named_parameters() if p.requires_grad]
    assert [name for name, p in trained if p.grad is None] == []


def test_without_s_a_the_error_says_so(mllm):
    batch = packed(mllm, games())
    batch.s_a = None
    with pytest.raises(ValueError, match="run the encoder"):
        mllm(batch)


def test_bf16_autocast_is_finite_and_close(mllm):
    batch = packed(mllm, games())
    full, _ = mllm(batch)
    with torch.autocast("cpu", torch.bfloat16):
        half, metrics = mllm(batch)
        played = mllm.predict([games()[2][:-1]], [instruction(0)])
    half.backward()
    assert all(torch.isfinite(value) for value in metrics.values())
    assert torch.isfinite(played.s_a_hat).all()
    assert abs(half.item() - full.item()) < 0.05 * full.item()
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in mllm.parameters())
    mllm.zero_grad()


def test_gradient_checkpointing_gives_the_same_gradients(base):
    gradients = []
    for on in (False, True):
        mllm = make_mllm(base).train()
        if on:
            mllm.mistral.gradient_checkpointing_enable()
        mllm(packed(mllm, games()))[0].backward()
        gradients.append(torch.cat([p.grad.flatten() for p in mllm.parameters()]))
    torch.testing.assert_close(*gradients, atol=1e-6, rtol=1e-4)


# --- play


def test_prediction_is_the_training_pass(mllm):
    for game in games():
        prediction = mllm.predict([game[:-1]], [game[-1].instruction])
        with torch.no_grad():
            expected = mllm.output_projection(queries(mllm, single(mllm, game)))
        torch.testing.assert_close(prediction.s_a_hat[0], expected, atol=1e-5, rtol=0)


def test_the_cache_equals_one_full_pass(mllm):
    """Every greedy value is the best allowed one under a pass over the whole sequence."""
    pasts = [game[:-1] for game in games()]
    asked = [game[-1].instruction for game in games()]
    prediction = mllm.predict(pasts, asked)
    for b, past in enumerate(pasts):
        state = GameState(prediction.motion_scopes[b], prediction.changes[b])
        batch = collate_rendered([mllm.language.render(past, asked[b], state)])
        batch.s_a = stack([past or [turn(0)]])
        with torch.no_grad():
            logits = mllm.mistral.lm_head(mllm.hidden_states(batch)[0])
        values = [i for i in range(len(batch.labels[0])) if batch.labels[0, i] != IGNORE][0:12:3]
        for place, i in zip(range(0, 12, 3), values, strict=True):
            allowed = torch.as_tensor(mllm.language.grammar[place])
            best = allowed[logits[i - 1, allowed].argmax()]
            assert best == batch.labels[0, i]


def test_cached_steps_equal_one_pass_in_numbers(mllm, monkeypatch):
    seen = []
    head = mllm.mistral.lm_head
    handle = head.register_forward_pre_hook(lambda _m, inputs: seen.append(inputs[0].clone()))
    past, asked = games()[2][:-1], instruction(5)
    prediction = mllm.predict([past, []], [asked, instruction(6)])
    handle.remove()
    for b, (history, ask) in enumerate([(past, asked), ([], instruction(6))]):
        state = GameState(prediction.motion_scopes[b], prediction.changes[b])
        batch = collate_rendered([mllm.language.render(history, ask, state)])
        batch.s_a = stack([history or [turn(0)]])
        with torch.no_grad():
            hidden = mllm.hidden_states(batch)[0]
        first = int((batch.labels[0] != IGNORE).nonzero()[0]) - 1
        for step in range(4):
            torch.testing.assert_close(seen[step][b], hidden[first + 3 * step], atol=1e-5, rtol=0)


def test_a_batch_of_games_equals_single_games(mllm):
    pasts = [game[:-1] for game in games(4)] + [[]]
    asked = [instruction(g) for g in range(len(pasts))]
    together = mllm.predict(pasts, asked)
    for b in range(len(pasts)):
        alone = mllm.predict([pasts[b]], [asked[b]])
        torch.testing.assert_close(together.s_a_hat[b], alone.s_a_hat[0], atol=1e-5, rtol=0)
        assert together.motion_scopes[b] == alone.motion_scopes[0]
        assert together.changes[b] == alone.changes[0]


def test_history_matters_and_window_one_works(mllm):
    past, asked = games()[2][:-1], instruction(0)
    seen = mllm.predict([past], [asked]).s_a_hat
    blind = mllm.predict([[]], [asked]).s_a_hat
    other = dataclasses.replace(past[-1].state, s_a=-past[-1].state.s_a)
    changed = [*past[:-1], Turn(past[-1].instruction, other)]
    assert blind.shape == (1, NUM_TOKENS, WIDTH)
    assert (seen - blind).abs().max() > 1e-3
    assert (seen - mllm.predict([changed], [asked]).s_a_hat).abs().max() > 1e-3


def test_predict_leaves_the_mode_and_the_weights_alone(base):
    mllm = make_mllm(base, rank=2).train()
    first = mllm.predict([[]], [instruction(0)])
    assert mllm.training
    assert torch.equal(first.s_a_hat, mllm.predict([[]], [instruction(0)]).s_a_hat)


@pytest.mark.parametrize(
    ("s_a", "message"),
    [
        (None, "history turn 0: s_a is missing, expected \\(6, 10\\)"),
        (np.zeros((5, 10)), "s_a is \\(5, 10\\), expected \\(6, 10\\)"),
    ],
)
def test_malformed_histories_are_errors(mllm, s_a, message):
    played = turn(0)
    state = GameState(played.state.motion_scope, played.state.change, s_a)
    with pytest.raises(LanguageError, match=message):
        mllm.predict([[Turn(played.instruction, state)]], [instruction(0)])


def test_histories_and_instructions_must_match(mllm):
    with pytest.raises(ValueError, match="1 histories for 2 instructions"):
        mllm.predict([[]], [instruction(0), instruction(1)])


# --- new tokens, files


def test_new_rows_start_at_the_means(base):
    mllm = make_mllm(base)
    old = 330
    embeddings = mllm.mistral.get_input_embeddings().weight
    head = mllm.mistral.get_output_embeddings().weight
    assert embeddings.shape[0] == head.shape[0] == old + 8 + 28
    for weight, factor in ((embeddings, 1), (head, 3)):
        expected = factor * weight[:old].mean(0)
        torch.testing.assert_close(weight[old:], expected.expand_as(weight[old:]))


@pytest.mark.parametrize("rank", [0, 2])
def test_saving_and_loading_gives_the_same_model(base, tmp_path, rank):
    mllm = make_mllm(base, rank=rank)
    with torch.no_grad():
        for parameter in mllm.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    mllm.save_pretrained(tmp_path / "mllm")
    again = NextStateMLLM.from_pretrained(tmp_path / "mllm")
    assert again.config == mllm.config
    assert again.num_tokens == NUM_TOKENS
    own, loaded = mllm.state_dict(), again.state_dict()
    assert own.keys() == loaded.keys()
    assert all(torch.equal(own[name], loaded[name]) for name in own)
    trains = {name for name, p in mllm.named_parameters() if p.requires_grad}
    assert trains == {name for name, p in again.named_parameters() if p.requires_grad}


def test_lora_trains_embeddings_and_head_and_keeps_them(base, tmp_path):
    mllm = make_mllm(base, rank=2)
    frozen = [name for name, p in mllm.named_parameters() if not p.requires_grad]
    assert frozen
    assert all(".base_layer." in n or ".original_module." in n for n in frozen)
    directory = tmp_path / "mllm"
    for _ in range(2):  # train, save, load, train again
        before = mllm.mistral.get_input_embeddings().weight.detach().clone()
        head = mllm.mistral.get_output_embeddings().weight.detach().clone()
        mllm.train()
        optimiser = torch.optim.AdamW([p for p in mllm.parameters() if p.requires_grad], lr=1e-2)
        mllm(packed(mllm, games()))[0].backward()
        optimiser.step()
        assert not torch.equal(before, mllm.mistral.get_input_embeddings().weight)
        assert not torch.equal(head, mllm.mistral.get_output_embeddings().weight)
        mllm.save_pretrained(directory)
        stored = load_file(directory / "adapter" / "adapter_model.safetensors")
        assert sum("embed_tokens" in name or "lm_head" in name for name in stored) == 2
        again = NextStateMLLM.from_pretrained(directory)
        torch.testing.assert_close(
            again(packed(again, games()))[0], mllm.eval()(packed(mllm, games()))[0]
        )
        mllm = again


def test_the_base_is_found_beside_the_checkpoint(base, tmp_path):
    shutil.copytree(base, tmp_path / "backbones" / "language_base")
    mllm = make_mllm(tmp_path / "backbones" / "language_base", rank=2)
    mllm.save_pretrained(tmp_path / "mllm")
    about = json.loads((tmp_path / "mllm" / "mllm.json").read_text())
    assert about["base"] == "../backbones/language_base"
    shutil.move(tmp_path, tmp_path.with_name("moved"))
    moved = tmp_path.with_name("moved")
    NextStateMLLM.from_pretrained(moved / "mllm")
    shutil.move(moved / "backbones", moved / "elsewhere")
    with pytest.raises(FileNotFoundError, match="language base"):
        NextStateMLLM.from_pretrained(moved / "mllm")
    NextStateMLLM.from_pretrained(moved / "mllm", base=moved / "elsewhere" / "language_base")


def test_merging_gives_a_whole_model(base, tmp_path):
    mllm = make_mllm(base, rank=2)
    with torch.no_grad():
        for name, parameter in mllm.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.2)
    mllm.save_pretrained(tmp_path / "mllm", merge=True)
    again = NextStateMLLM.from_pretrained(tmp_path / "mllm").eval()
    assert again.config.lora.rank == 0
    past, asked = games()[2][:-1], instruction(0)
    torch.testing.assert_close(
        again.predict([past], [asked]).s_a_hat,
        mllm.predict([past], [asked]).s_a_hat,
        atol=1e-5,
        rtol=1e-4,
    )


@pytest.mark.parametrize("rank", [0, 2])
def test_half_precision_files_load_as_float(base, tmp_path, rank):
    mllm = make_mllm(base, rank=rank)
    mllm.save_pretrained(tmp_path / "full")
    mllm.save_pretrained(tmp_path / "half", dtype=torch.float16)
    part = "adapter/adapter_model.safetensors" if rank else "language_model/model.safetensors"
    sizes = [(tmp_path / name / part).stat().st_size for name in ("full", "half")]
    assert sizes[1] < 0.7 * sizes[0]
    again = NextStateMLLM.from_pretrained(tmp_path / "half")
    assert {p.dtype for p in again.parameters()} == {torch.float32}
    past, asked = games()[2][:-1], instruction(0)
    torch.testing.assert_close(
        again.predict([past], [asked]).s_a_hat,
        mllm.predict([past], [asked]).s_a_hat,
        atol=0.02,
        rtol=0.02,
    )


def test_saving_again_replaces_the_directory(base, tmp_path):
    mllm = make_mllm(base)
    mllm.save_pretrained(tmp_path / "mllm")
    (tmp_path / "mllm" / "stale").write_text("old")
    mllm.save_pretrained(tmp_path / "mllm")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mllm"]
    assert not (tmp_path / "mllm" / "stale").exists()


@pytest.mark.parametrize("rank", [0, 2])
def test_damaged_files_are_named(base, tmp_path, rank):
    part = "adapter/adapter_model.safetensors" if rank else "language_model/model.safetensors"
    mllm = make_mllm(base, rank=rank)
    for name in (part, "projections.safetensors", "mllm.json"):
        directory = tmp_path / name.replace("/", "_")
        mllm.save_pretrained(directory)
        file = directory / name
        file.write_bytes(file.read_bytes()[:-7])
        where = file.parent if name.startswith("language_model") else file
        with pytest.raises(ValueError, match=str(where)):
            NextStateMLLM.from_pretrained(directory)
        file.unlink()
        with pytest.raises(FileNotFoundError, match=str(file.parent)):
            NextStateMLLM.from_pretrained(directory)


@pytest.mark.parametrize("rank", [0, 2])
def test_foreign_and_incomplete_weights_are_refused(base, tmp_path, rank):
    part = "adapter/adapter_model.safetensors" if rank else "language_model/model.safetensors"
    mllm = make_mllm(base, rank=rank)
    mllm.save_pretrained(tmp_path / "mllm")
    for name in (part, "projections.safetensors"):
        file = tmp_path / "mllm" / name
        tensors = load_file(file)
        lost = sorted(tensors)[0]
        save_file({k: v for k, v in tensors.items() if k != lost}, file, metadata={"format": "pt"})
        with pytest.raises(ValueError, match="1 weights are missing"):
            NextStateMLLM.from_pretrained(tmp_path / "mllm")
        save_file({**tensors, "foreign": torch.zeros(1)}, file, metadata={"format": "pt"})
        with pytest.raises(ValueError, match="1 are unknown .*foreign"):
            NextStateMLLM.from_pretrained(tmp_path / "mllm")
        save_file(tensors, file, metadata={"format": "pt"})


def test_a_run_can_change_its_losses_but_not_its_shapes(base, tmp_path):
    make_mllm(base).save_pretrained(tmp_path / "mllm")
    config = MllmConfig(lora=LoraConfig(0, 4.0, 0.05), alpha=0.5, history_noise=0.1)
    assert NextStateMLLM.from_pretrained(tmp_path / "mllm", config=config).config == config
    with pytest.raises(ValueError, match="was trained with lora.rank 0"):
        NextStateMLLM.from_pretrained(tmp_path / "mllm", config=MllmConfig())


def test_the_longest_turn_is_a_setting_that_is_kept(base, tmp_path):
    mllm = make_mllm(base, max_turn_tokens=60)
    assert mllm.language.max_text_tokens == make_mllm(base).language.max_text_tokens - 240
    mllm.save_pretrained(tmp_path / "mllm")
    again = NextStateMLLM.from_pretrained(tmp_path / "mllm")
    assert again.language.max_text_tokens == mllm.language.max_text_tokens


def test_a_base_of_another_kind_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="config.json"):
        NextStateMLLM.from_base(tmp_path, MllmConfig(), NUM_TOKENS, WIDTH)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match="expected 'mistral'"):
        NextStateMLLM.from_base(tmp_path, MllmConfig(), NUM_TOKENS, WIDTH)


def test_the_full_model_has_the_published_number_of_parameters():
    class Words:
        """The tokenizer of the full model, as far as Language asks for it."""

        unk_token_id, bos_token_id = 0, 1

        def convert_tokens_to_ids(self, names):
            return list(range(32000, 32000 + len(names)))

        def get_added_vocab(self):
            return {}

    with torch.device("meta"):
        llm = add_lora(
            MistralForCausalLM(MistralConfig(vocab_size=32284)), LoraConfig(32, 32.0, 0.05)
        )
        mllm = NextStateMLLM(llm, Language(Words(), 226), MllmConfig(), 1920)

    def count(module, trainable):
        return sum(p.numel() for p in module.parameters() if p.requires_grad or not trainable)

    assert count(llm, False) == 7_328_210_944
    assert count(llm, True) == 348_622_848
    assert count(mllm, False) == 7_364_415_232
    assert count(mllm, True) == 384_827_136
