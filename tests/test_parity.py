"""Our modules against tensors of the authors' public code, at tiny random sizes.

Each of the authors' state dicts goes through the converter and our loaders first. The fixtures in
``tests/data/parity`` say what was recorded and how close we have to come.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import open_clip
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from animegamer.checkpoint import load_model
from animegamer.config import BackbonesConfig, DiffusionConfig, SamplingConfig
from animegamer.game import CharacterState, GameState, MotionScope, Turn
from animegamer.language import Language, special_tokens
from animegamer.models import diffusion
from animegamer.models.backbones import ImageEncoder, load_autoencoder, preprocess
from animegamer.models.decoder_files import load_decoder
from animegamer.models.encoder import ActionAwareEncoder
from animegamer.models.mllm import NextStateMLLM
from tests.data.parity.parity_load import load
from tests.parity_files import (
    autoencoder_directory,
    batch_of,
    decoder_checkpoint,
    history_of,
    mllm_directory,
)

SCHEDULE = DiffusionConfig()
CLOSE = {"atol": 2e-5, "rtol": 1e-4}  # dit.json
TRACE = {"atol": 1e-4, "rtol": 1e-3}  # sampler.json
FINAL = {"atol": 2e-4, "rtol": 1e-3}


# ---- encoder and decoder


@pytest.fixture(scope="module")
def dit():
    return load("dit")[0]


@pytest.fixture(scope="module")
def converted(dit, tmp_path_factory):
    """The authors' decoder file as a checkpoint of ours, LoRA kept and merged."""
    place = tmp_path_factory.mktemp("dit")
    for name in ("kept", "merged"):
        decoder_checkpoint(dit, place / name, merge=name == "merged")
    return place


@pytest.fixture(scope="module")
def encoder(converted):
    return load_model(ActionAwareEncoder, converted / "kept" / "encoder").eval()


@pytest.fixture(scope="module", params=["kept", "merged"])
def decoder(request, converted):
    return load_decoder(converted / request.param / "decoder").eval()


@pytest.fixture(scope="module")
def null(converted):
    return load_file(converted / "kept" / "decoder" / "null.safetensors")["s_a_null"]


@torch.no_grad()
def test_mixed_embedding(dit, encoder):
    s_a = encoder(dit["plain_b1.in.ip"], dit["plain_b1.in.text"])
    torch.testing.assert_close(s_a, dit["plain_b1.out.mixed_embedding"], **CLOSE)


def test_unconditional_branch(dit, encoder, null):
    """Row 0 is the encoder on zero features; row 1 the external embedding, as it is."""
    mixed = dit["aroutput_cfg2.out.mixed_embedding"]
    torch.testing.assert_close(encoder.null(), mixed[0], **CLOSE)
    torch.testing.assert_close(null, mixed[0], **CLOSE)
    assert torch.equal(mixed[1], dit["aroutput_cfg2.in.aroutput"][0])


def s_a_of(dit, encoder, case):
    """What the case's network sees in front of the video."""
    ip, text = dit["plain_b1.in.ip"], dit["plain_b1.in.text"]
    if case == "ar_mixemb_b1":
        return dit["ar_mixemb_b1.in.AR_mixemb"][:, 0]
    if case == "aroutput_cfg2":
        return torch.stack([encoder.null(), dit["aroutput_cfg2.in.aroutput"][0]])
    if case == "plain_b2":
        ip, text = torch.cat([torch.zeros_like(ip), ip]), dit["plain_b2.in.text"]
    return encoder(ip, text)


DIT_CASES = ("plain_b1", "plain_b2", "aroutput_cfg2", "ar_mixemb_b1", "single_frame_b1")


def test_all_decoder_cases_are_here(dit):
    assert {name.split(".")[0] for name in dit if ".in." in name} == set(DIT_CASES)


@pytest.mark.parametrize("case", DIT_CASES)
@torch.no_grad()
def test_decoder(dit, encoder, decoder, case):
    z, t, f_ms = (dit[f"{case}.in.{name}"] for name in ("x", "timesteps", "flow"))
    seen = []
    hook = decoder.transformer_blocks[0].register_forward_pre_hook(
        lambda module, arguments, keywords: seen.append((*arguments, *keywords.values())),
        with_kwargs=True,
    )
    v = decoder.predict(z, t, s_a_of(dit, encoder, case), f_ms)
    hook.remove()
    torch.testing.assert_close(v, dit[f"{case}.out.noise_pred"], **CLOSE)
    if f"{case}.out.cond_emb" in dit:
        embedding = next(x for x in seen[0] if torch.is_tensor(x) and x.ndim == 2)
        torch.testing.assert_close(embedding, dit[f"{case}.out.cond_emb"], **CLOSE)


@torch.no_grad()
def test_decoder_block_by_block(dit, encoder, decoder):
    seen = []
    hooks = [
        block.register_forward_hook(lambda module, arguments, out: seen.append(out))
        for block in decoder.transformer_blocks
    ]
    z, t, f_ms = (dit[f"plain_b1.in.{name}"] for name in ("x", "timesteps", "flow"))
    s_a = s_a_of(dit, encoder, "plain_b1")
    decoder.predict(z, t, s_a, f_ms)
    for hook in hooks:
        hook.remove()
    for i, (video, text) in enumerate(seen):
        expected = dit[f"plain_b1.out.hidden_after_block{i}"]
        torch.testing.assert_close(torch.cat([text, video], 1), expected, **CLOSE)
    assert len(seen) == 2
    embed = decoder.patch_embed
    tokens = (embed(s_a, z) - embed.pos_embedding)[:, 226:]
    torch.testing.assert_close(tokens, dit["plain_b1.out.image_tokens"], **CLOSE)


def test_positions(dit, decoder):
    expected = dit["sd.model.diffusion_model.mixins.pos_embed.pos_embedding"]
    positions = decoder.patch_embed.pos_embedding.float()
    torch.testing.assert_close(positions, expected, atol=2e-6, rtol=1e-5)


def test_merged_weights(dit, converted):
    merged = load_file(converted / "merged" / "decoder" / "diffusion_pytorch_model.safetensors")
    ours = torch.cat([merged[f"transformer_blocks.0.attn1.to_{name}.weight"] for name in "qkv"])
    expected = dit["merged.transformer.layers.0.attention.query_key_value.weight"]
    torch.testing.assert_close(ours, expected, atol=1e-6, rtol=1e-6)


# ---- diffusion


@pytest.fixture(scope="module")
def sampler():
    return load("sampler")[0]


def release_sampling(steps):
    return SamplingConfig(steps, guidance="release", scale=6.0, exponent=5.0, stochastic=True)


def test_training_table(sampler):
    levels = diffusion.signal_levels(SCHEDULE)
    torch.testing.assert_close(levels, sampler["denoiser_table_1000"], atol=1e-6, rtol=0)


@pytest.mark.parametrize("case", ["ar10", "ar50", "enc10"])
def test_schedules(sampler, case):
    steps = int(case[-2:])
    timesteps = diffusion.sampling_timesteps(SCHEDULE, steps)
    assert timesteps.tolist() == sampler[f"{case}.out.timestep_idx"].long().tolist()
    levels = diffusion.signal_levels(SCHEDULE, timesteps).double()
    torch.testing.assert_close(levels, sampler[f"{case}.out.alpha"], atol=1e-6, rtol=0)
    table = diffusion.signal_levels(SCHEDULE)
    nearest = torch.stack([table[(table - a).abs().argmin()] for a in levels]).double()
    torch.testing.assert_close(nearest, sampler[f"{case}.out.alpha_quantised"], atol=1e-6, rtol=0)
    sampling = release_sampling(steps)
    scales = [diffusion.guidance_scale(sampling, i, t) for i, t in enumerate(timesteps.tolist())]
    assert scales == pytest.approx(sampler[f"{case}.out.cfg_scale"].tolist(), abs=1e-6)


def test_sampler_step_by_step(sampler):
    """Fed with their denoised latents and their noise, every step lands where theirs does."""
    denoised, after = sampler["ar10.out.denoised"], sampler["ar10.out.x_after_step"]
    timesteps, levels = sampler["ar10.out.timestep_idx"], sampler["ar10.out.alpha"]
    seen = []

    def denoise(latents, step, timestep, a):
        assert timestep == timesteps[step] and a == pytest.approx(float(levels[step]), abs=1e-6)
        expected = sampler["ar10.in.init_noise"] if step == 0 else after[step - 1]
        torch.testing.assert_close(latents.float(), expected, **TRACE)
        seen.append(step)
        return denoised[step]

    noise, start = iter(sampler["ar10.in.noise_used"]), sampler["ar10.in.init_noise"]
    result = diffusion.sample(denoise, start, SCHEDULE, release_sampling(10), noise)
    assert seen == list(range(10)) and next(noise, None) is None
    assert torch.equal(result, denoised[-1])
    torch.testing.assert_close(result, sampler["ar10.out.final_latent"], **FINAL)


@pytest.mark.parametrize("case", ["ar10", "enc10", "ar50"])
def test_sampling(dit, sampler, encoder, decoder, null, case, monkeypatch):
    """Network, guidance and sampler together, from their noise to their latents."""
    steps = int(case[-2:])
    draws = iter([sampler[f"{case}.in.init_noise"][0], *sampler[f"{case}.in.noise_used"][:, 0]])

    def known(shape, generator=None):
        noise = next(draws)
        assert noise.shape == shape
        return noise

    predict, inputs = decoder.predict, []

    def watched(latents, *rest):
        inputs.append(latents[:1].clone())
        return predict(latents, *rest)

    monkeypatch.setattr(torch, "randn", known)
    monkeypatch.setattr(decoder, "predict", watched)
    external = dit["aroutput_cfg2.in.aroutput"]
    latents = decoder.sample(
        encoder(dit["plain_b1.in.ip"], dit["plain_b1.in.text"]) if case == "enc10" else external,
        torch.tensor([sampler[f"{case}.out.flow_idx"][0]]),
        null,
        release_sampling(steps),
        SCHEDULE,
        [torch.Generator()],
    )
    assert next(draws, None) is None and len(inputs) == steps
    trace = torch.stack([*inputs[1:], latents])
    whole = f"{case}.out.x_after_step"
    every = 1 if whole in sampler else 10
    expected = sampler[whole if every == 1 else f"{whole}_every_10th"]
    torch.testing.assert_close(trace[every - 1 :: every], expected, **TRACE)
    torch.testing.assert_close(latents, sampler[f"{case}.out.final_latent"], **FINAL)


@torch.no_grad()
def test_training_loss(dit, sampler, encoder, decoder, monkeypatch):
    """Their weighted error of the denoised latents is our error of v, network included."""
    x0, noise, index, f_ms = (sampler[f"loss.in.{n}"] for n in ("x0", "noise", "idx", "flow"))
    levels = diffusion.signal_levels(SCHEDULE)
    a = sampler["loss.in.alpha_sqrt_quantised"]
    torch.testing.assert_close(levels[index], a, atol=1e-6, rtol=0)
    torch.testing.assert_close(1 / (1 - a**2), sampler["loss.out.weight"], atol=0, rtol=1e-4)
    s_a = encoder(dit["plain_b1.in.ip"], dit["plain_b1.in.text"]).expand(2, -1, -1)
    v = decoder.predict(diffusion.add_noise(x0, noise, a), index, s_a, f_ms)
    level = a.view(-1, 1, 1, 1, 1)
    estimate = level * diffusion.add_noise(x0, noise, a) - (1 - level**2).sqrt() * v
    torch.testing.assert_close(estimate, sampler["loss.out.x0_pred"], **TRACE)
    monkeypatch.setattr(torch, "randint", lambda *_, **__: index)
    monkeypatch.setattr(torch, "randn_like", lambda _: noise)
    loss = decoder.loss(x0, s_a, f_ms, levels)
    torch.testing.assert_close(loss, sampler["loss.out.loss_per_sample"], atol=1e-5, rtol=1e-4)


# ---- video autoencoder


@pytest.fixture(scope="module")
def vae(tmp_path_factory):
    tensors, about = load("vae")
    directory = autoencoder_directory(tensors, tmp_path_factory.mktemp("vae"))
    ours = load_autoencoder(BackbonesConfig(autoencoder=str(directory)))
    return tensors, about["tolerance"], ours


def test_autoencoder_encodes_in_one_piece(vae):
    tensors, close, ours = vae
    video = tensors["in.video_f16"].float()
    latents = ours.encode(video)
    torch.testing.assert_close(latents.transpose(1, 2) / ours.scale, tensors["out.mean"], **close)
    logvar = ours.model.encode(video).latent_dist.logvar
    torch.testing.assert_close(logvar, tensors["out.logvar"], **close)
    first = ours.encode(video[:, :, :1]).transpose(1, 2) / ours.scale
    torch.testing.assert_close(first, tensors["out.mean_of_first_frame_alone"], **close)
    assert (first - tensors["out.mean"][:, :, :1]).abs().max() > 0.5  # pieces would change it


def test_autoencoder_decodes_in_the_releases_pieces(vae):
    tensors, close, ours = vae
    latents = tensors["in.latent"].transpose(1, 2) * ours.scale
    expected, decoded = tensors["out.decoded_chunked"], ours.decode(latents)
    assert (expected.abs() > 1).any()
    torch.testing.assert_close(decoded, expected.clamp(-1, 1), **close)
    torch.testing.assert_close(ours.model.decode(tensors["in.latent"]).sample, expected, **close)
    one_shot = tensors["out.decoded_oneshot_every4"]
    assert (decoded[..., ::4, ::4] - one_shot).abs().max() > 0.4
    ours.model.num_latent_frames_batch_size = latents.shape[1]
    whole = ours.model.decode(tensors["in.latent"]).sample
    ours.model.num_latent_frames_batch_size = 2
    torch.testing.assert_close(whole[..., ::4, ::4], one_shot, **close)


# ---- CLIP


@torch.no_grad()
def test_clip_tokens():
    tensors, about = load("clip")
    visual = open_clip.transformer.VisionTransformer(
        image_size=224, patch_size=16, width=64, layers=3, heads=4, mlp_ratio=4.0, output_dim=64
    )
    prefix = "sd.clip_img_encoder.model.visual."
    weights = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
    visual.load_state_dict(weights, strict=True)
    nn.init.normal_(visual.transformer.resblocks[2].attn.in_proj_weight)  # not to be run
    nn.init.normal_(visual.ln_post.weight)
    frames = tensors["in.frame_u8"].float() / 127.5 - 1
    tokens = ImageEncoder(visual, 224, 224)(frames)
    torch.testing.assert_close(tokens, tensors["out.tokens"], **about["tolerance"]["tokens"])


def test_clip_preprocessing():
    tensors, _ = load("clip")
    pixels = preprocess(tensors["in.frame_u8"].float() / 127.5 - 1, 224, 224)
    torch.testing.assert_close(pixels, tensors["out.preprocessed"], atol=1e-4, rtol=0)


# ---- MLLM

MLLM_CASES = ("t1", "t2", "t3", "t3roll", "t3states", "t4")


@pytest.fixture(scope="module")
def fixture():
    return load("mllm")


@pytest.fixture(scope="module")
def mllm(fixture, tmp_path_factory):
    """Their file through the converter, on a Mistral of the fixture's sizes."""
    return NextStateMLLM.from_pretrained(mllm_directory(fixture, tmp_path_factory.mktemp("mllm")))


def test_all_mllm_cases_are_here(fixture):
    cases = {name.split(".")[0] for name in fixture[0] if ".in." in name}
    assert cases == {*MLLM_CASES, "train_b1", "train_b2"}


@pytest.mark.parametrize("case", MLLM_CASES)
@torch.no_grad()
def test_hidden_states_and_predictions(fixture, mllm, case):
    tensors, about = fixture
    batch, seen = batch_of(tensors, case, history_of(about, case)), []
    hook = mllm.mistral.model.register_forward_pre_hook(
        lambda module, arguments, keywords: seen.append(keywords["inputs_embeds"]),
        with_kwargs=True,
    )
    hidden = mllm.hidden_states(batch)
    hook.remove()
    predicted = mllm.output_projection(hidden[batch.query >= 0])
    close = about["tolerance"]["last_hidden"]
    torch.testing.assert_close(hidden, tensors[f"{case}.out.last_hidden"], **close)
    if f"{case}.out.inputs_embeds" in tensors:
        torch.testing.assert_close(seen[0], tensors[f"{case}.out.inputs_embeds"], **close)
    rows = tensors["pred_rows"]
    expected = tensors[f"{case}.out.pred_at_gen_mask_rows"]
    torch.testing.assert_close(predicted[rows], expected, **about["tolerance"]["pred"])
    # The release's own slice is three places late; ours must not be.
    late = tensors[f"{case}.out.pred_upstream_slice_rows"]
    assert not torch.allclose(predicted[rows], late, atol=0.1)


@pytest.mark.parametrize("case", ["t1", "t3"])
@torch.no_grad()
def test_logits(fixture, mllm, case):
    tensors, about = fixture
    hidden = mllm.hidden_states(batch_of(tensors, case, history_of(about, case)))
    logits = mllm.mistral.lm_head(hidden[0, -1])
    expected = tensors[f"{case}.out.lm_logits_last_bi"]
    torch.testing.assert_close(logits, expected, **about["tolerance"]["last_hidden"])


@pytest.mark.parametrize("case", MLLM_CASES)
@torch.no_grad()
def test_text_behind_the_history(fixture, mllm, case):
    """The release's own text pass is causal: the same prompt in which no token is a query."""
    tensors, about = fixture
    batch = batch_of(tensors, case, history_of(about, case))
    causal = replace(batch, query=torch.full_like(batch.query, -1))
    logits = mllm.mistral.lm_head(mllm.hidden_states(causal)[0, -1])
    assert logits.argmax() == tensors[f"{case}.out.text_ids_intended"][0]
    if f"{case}.out.text_first_logits_intended" in tensors:
        expected = tensors[f"{case}.out.text_first_logits_intended"]
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


def without_doubled(ids):
    """The prompt without the release's second ``</ST>``."""
    end = 32281
    return [i for i, before in zip(ids, [None, *ids], strict=False) if (i, before) != (end, end)]


def test_ids_of_the_special_tokens(mllm):
    names = special_tokens()
    assert mllm.language.tokenizer.convert_tokens_to_ids(names) == [*range(32000, 32284)]


@pytest.mark.parametrize("case", ["t1", "t3states"])
def test_prompts(fixture, case):
    """Of the others the histories' states are zeros, which is no motion level."""
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
