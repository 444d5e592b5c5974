"""The tiny backbones' training: their data, and a step of each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import open_clip
import pytest
import sentencepiece
import torch
from diffusers import CogVideoXTransformer3DModel
from torch import nn
from transformers import AutoTokenizer

from animegamer.config import (
    AutoencoderSizes,
    BackbonesConfig,
    Config,
    DiffusionConfig,
    ImageEncoderSizes,
    LanguageBaseSizes,
    PretrainConfig,
    ShotConfig,
    TextEncoderSizes,
    VideoBaseSizes,
)
from animegamer.game import CharacterState, Instruction
from animegamer.models.backbones import preprocess
from animegamer.pretraining import autoencoder, image_encoder, text, video_base
from animegamer.records import Shot
from tests.tiny_checkpoint import LINES

BACKBONES = BackbonesConfig(image_height=16, image_width=24)


def clips(count=6, frames=5):
    """Smooth moving pictures, (n, F, 16, 24, 3) uint8."""
    x, y, t, n = np.meshgrid(*(np.arange(k) for k in (24, 16, frames, count)), indexing="ij")
    waves = [np.sin(x / 5 + t / 3 + n), np.cos(y / 4 - t / 2), np.sin((x + y) / 7 + n)]
    return (np.stack(waves, -1).transpose(3, 2, 1, 0, 4) * 100 + 128).astype(np.uint8)


def first_loss_and_after(model, batches, steps=15, lr=3e-3):
    """Losses on the first batch before and after some steps."""
    optimizer = torch.optim.Adam(model.parameters(), lr)

    def loss(number):
        torch.manual_seed(number)
        return model(batches(number * 4, 4))[0]

    with torch.no_grad():
        before = loss(0).item()
    for step in range(steps):
        optimizer.zero_grad()
        loss(step).backward()
        optimizer.step()
    with torch.no_grad():
        return before, loss(0).item()


# ---- vocabulary


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    """A T5 tokenizer of a small vocabulary, and its directory."""
    path = tmp_path_factory.mktemp("vocabulary")
    text.train_vocabulary(LINES, 120, path / "spiece.model", llama=False)
    return text.save_t5_tokenizer(path / "spiece.model", path / "tokenizer"), path


def test_a_vocabulary_speaks_all_languages(vocabulary):
    tokenizer, _ = vocabulary
    for line in LINES:
        ids = tokenizer(line, add_special_tokens=False).input_ids
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids) == line


def test_the_special_ids_are_t5s_or_mistrals(vocabulary, tmp_path):
    tokenizer, path = vocabulary
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1, 2)
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(path / "spiece.model"))
    assert len(tokenizer) == len(pieces) + text.SENTINELS
    assert tokenizer.convert_ids_to_tokens(len(pieces)).startswith("<extra_id_")
    text.train_vocabulary(LINES, 400, tmp_path / "llama.model", llama=True)
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "llama.model"))
    assert (pieces.unk_id(), pieces.bos_id(), pieces.eos_id(), pieces.pad_id()) == (0, 1, 2, -1)
    assert 0 not in pieces.encode("ünseen 字")  # falls back to bytes


def test_a_vocabulary_is_the_same_every_time(vocabulary, tmp_path):
    """A resumed run trains it again."""
    _, path = vocabulary
    text.train_vocabulary(LINES, 120, tmp_path / "spiece.model", llama=False)
    assert (tmp_path / "spiece.model").read_bytes() == (path / "spiece.model").read_bytes()


def test_the_tokenizer_loads_from_its_directory(vocabulary):
    tokenizer, path = vocabulary
    again = AutoTokenizer.from_pretrained(path / "tokenizer")
    assert again(LINES).input_ids == tokenizer(LINES).input_ids


# ---- text


def test_corruption_takes_a_span_out_and_asks_for_it():
    data = text.Corrupted([list(range(10, 22))], 100, 0)
    starts = set()
    for seed in range(40):
        source, target = data.corrupt(data.ids[0], np.random.default_rng(seed))
        place = source.index(100)
        assert source[-1] == target[-1] == 1 and target[0] == 100
        asked = target[1:-1]
        assert len(asked) == 2  # a sixth of twelve
        assert source[:place] + asked + source[place + 1 : -1] == list(range(10, 22))
        starts.add(place)
    assert len(starts) > 5


@pytest.mark.parametrize("ids", [[], [10], [10, 11]])
def test_corruption_of_the_shortest_texts(ids):
    source, target = text.Corrupted([ids], 100, 0).corrupt(ids, np.random.default_rng(0))
    assert 100 in source and target[0] == 100 and target[-1] == 1


def test_batches_of_text_follow_the_index_alone():
    ids = [list(range(10, 10 + n)) for n in range(5, 12)]
    one, other = text.Corrupted(ids, 100, 0), text.Corrupted(ids, 100, 0)
    other(15, 3)
    first, again = one(6, 3), other(6, 3)
    assert torch.equal(first.ids, again.ids) and torch.equal(first.labels, again.labels)
    assert (first.labels == -100).any() or len({len(i) for i in first.labels}) == 1
    lines = text.Lines(ids, 0)(0, 7)
    assert lines.ids.shape == (7, 11)
    assert torch.equal(lines.labels[lines.ids != 0], lines.ids[lines.ids != 0])
    assert (lines.labels[lines.ids == 0] == -100).all()


def test_documents_hold_up_to_four_instructions_of_one_game():
    games = [[[10], [11, 12], [13], [14], [15]], [[16]]]
    first, rest, other = text.documents(games)
    assert first == [1, 10, 2, 11, 12, 2, 13, 2, 14, 2]
    assert rest == [1, 15, 2] and other == [1, 16, 2]


def test_padding():
    assert text.pad([[1, 2, 3], [4]], -100).tolist() == [[1, 2, 3], [4, -100, -100]]


def test_a_t5_learns(vocabulary):
    tokenizer, _ = vocabulary
    torch.manual_seed(0)
    pieces = len(tokenizer) - text.SENTINELS
    sizes = TextEncoderSizes(width=16, layers=1, heads=2, feed_forward=16)
    t5 = text.build_t5(sizes, pieces)
    assert t5.config.vocab_size >= len(tokenizer) and t5.config.feed_forward_proj == "gated-gelu"
    ids = [tokenizer(line, add_special_tokens=False).input_ids for line in LINES]
    before, after = first_loss_and_after(text.TextLoss(t5), text.Corrupted(ids, pieces, 0))
    assert after < before


def test_words_count_beside_what_the_layers_add():
    sizes = LanguageBaseSizes(width=32, layers=2, heads=2, key_value_heads=1, feed_forward=32)
    mistral = text.build_mistral(sizes, 400, words=300)
    embeddings = mistral.get_input_embeddings().weight
    assert float(embeddings[:300].std()) == pytest.approx(1, abs=0.05)
    assert float(embeddings[300:].std()) == pytest.approx(0.3, abs=0.05)
    states = mistral.model(torch.arange(9)[None], output_hidden_states=True).hidden_states
    added = (states[1] - states[0]).norm(dim=-1)
    assert float((added / states[0].norm(dim=-1)).max()) < 1


def test_a_mistral_learns_and_padding_does_not_count():
    torch.manual_seed(0)
    sizes = LanguageBaseSizes(width=16, layers=1, heads=2, key_value_heads=1, feed_forward=16)
    loss = text.TextLoss(text.build_mistral(sizes, 50))
    ids = [[1, *range(5, 5 + n), 2] for n in (3, 6)]
    before, after = first_loss_and_after(loss, text.Lines(ids, 0), lr=1e-2)
    assert after < before
    short, padded = text.pad(ids[:1], 0), text.pad([ids[0] + [0] * 4], 0)
    labels = text.pad([ids[0] + [-100] * 4], 0)
    with torch.no_grad():
        torch.testing.assert_close(
            loss(text.TokenBatch(short, short))[0], loss(text.TokenBatch(padded, labels))[0]
        )


# ---- pictures


CLIP = ImageEncoderSizes(
    width=16,
    layers=2,
    head_width=8,
    patch=8,
    embed_dim=8,
    text_width=48,
    text_layers=1,
    text_length=12,
)


@pytest.fixture
def clip():
    torch.manual_seed(0)
    return image_encoder.build(CLIP, BACKBONES, 60)


def captions():
    tokens = torch.zeros(6, 12, dtype=torch.long)
    for row in range(6):
        tokens[row, :3] = torch.tensor([10 + row, 20 + row, 1])
    return tokens


def test_a_clip_tower_learns(clip):
    data = image_encoder.CaptionedFrames(clips(), captions(), BACKBONES, 0)
    batch = data(0, 4)
    assert batch.pixels.shape == (4, 3, 16, 24) and batch.tokens.shape == (4, 12)
    loss, metrics = image_encoder.ContrastiveLoss(clip)(batch)
    assert loss.ndim == 0 and 0 <= metrics["accuracy"] <= 1
    before, after = first_loss_and_after(image_encoder.ContrastiveLoss(clip), data)
    assert after < before


def test_pictures_and_captions_belong_together():
    """Whichever frame of a clip is drawn."""
    marked = np.zeros((6, 5, 16, 24, 3), np.uint8)
    marked[:] = (np.arange(6) * 40).reshape(6, 1, 1, 1, 1)
    data = image_encoder.CaptionedFrames(marked, captions(), BACKBONES, 0)
    batch, again = data(18, 6), data(18, 6)
    assert torch.equal(batch.pixels, again.pixels)
    plain = torch.from_numpy(marked[:, 0]).permute(0, 3, 1, 2).float() / 127.5 - 1
    for pixels, tokens in zip(batch.pixels, batch.tokens, strict=True):
        row = int(tokens[0]) - 10
        torch.testing.assert_close(pixels, preprocess(plain[row : row + 1], 16, 24)[0])


def test_equal_captions_are_right_answers_for_each_other(clip):
    batch = image_encoder.CaptionBatch(torch.randn(4, 3, 16, 24), captions()[:1].expand(4, -1))
    assert image_encoder.ContrastiveLoss(clip)(batch)[1]["accuracy"] == 1


def test_the_first_layer_starts_from_components(clip):
    frames = preprocess(autoencoder.video_tensor(clips(20)[:, :1])[:, :, 0], 16, 24)
    image_encoder.start_from_components(clip, frames)
    weight = clip.visual.conv1.weight.detach().flatten(1)
    assert weight.isfinite().all() and weight.norm(dim=1).mean() == pytest.approx(0.5)
    directions = nn.functional.normalize(weight, dim=1)
    torch.testing.assert_close(directions @ directions.T, torch.eye(16), atol=1e-3, rtol=0)
    assert weight[0].norm() < weight[-1].norm()  # equalised: small components are raised


def test_a_clip_is_saved_in_the_layout_of_open_clip(clip, tmp_path):
    settings = image_encoder.model_config(CLIP, BACKBONES, 60)
    image_encoder.save(clip, settings, tmp_path / "clip")
    again = open_clip.create_model(f"local-dir:{tmp_path / 'clip'}", require_pretrained=True)
    for name, value in clip.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], value.half().float())


# ---- video


def test_an_autoencoder_starts_as_pca_and_learns():
    sizes = AutoencoderSizes(2, 8, 8, 1, 8, 1, (4, 4), (1, 1))
    torch.manual_seed(0)
    data = clips(8)
    model = autoencoder.build(sizes, data)
    video = autoencoder.video_tensor(data)
    assert video.shape == (8, 3, 5, 16, 24) and -1 <= video.min() and video.max() <= 1
    loss = autoencoder.AutoencoderLoss(model, noise=0.0)
    _, metrics = loss(autoencoder.PixelBatch(video))
    error = (model.decode(model.encode(video)) - video).square().mean().item()
    assert metrics["psnr"].item() == pytest.approx(10 * np.log10(4 / error), abs=1e-3)
    assert metrics["scale"].item() == pytest.approx(1, abs=0.02)
    before = autoencoder.psnr(model, data)
    first_loss_and_after(loss, autoencoder.Pixels(data, 0), lr=1e-2)
    assert autoencoder.psnr(model.eval(), data) > before


def test_pixels_follow_the_index_alone():
    data = clips(7)
    one, other = autoencoder.Pixels(data, 0), autoencoder.Pixels(data, 0)
    other(27, 3)
    assert torch.equal(one(12, 3).video, other(12, 3).video)


LATENTS = (3, 4, 4, 6)


@dataclass
class Words:
    """Stands for T5: states that tell the texts apart."""

    tokens: int = 5

    def __call__(self, texts):
        rows = [torch.full((self.tokens, 8), float(len(t))) for t in texts]
        return torch.stack(rows)


@pytest.fixture
def captioned():
    shots = [
        Shot(
            f"s{i}",
            "film",
            "train",
            "e",
            i,
            "c.mp4",
            Instruction(("Nilo",), "run" * (i + 1), "day town") if i else None,
            "run" if i else "",
            1.0,
            1,
            CharacterState(0, 0, 0) if i else None,
        )
        for i in range(5)
    ]
    random = np.random.default_rng(0)
    store = {f"s{i}": {"latents": random.standard_normal(LATENTS).astype("f2")} for i in range(5)}

    def make(dropout):
        return video_base.CaptionDataset(shots, store, Words(), 0, dropout)

    return make, store, shots


def test_captions_stay_with_their_shots(captioned):
    make, store, shots = captioned
    data = make(0.0)
    assert len(data.shots) == 4  # the opening has no caption
    batch = data.batch(0, 4)
    assert batch.latents.shape == (4, *LATENTS) and batch.text.shape == (4, 5, 8)
    lengths = {store[s.shot_id]["latents"].sum(): len(str(s.instruction)) for s in shots[1:]}
    for latents, states in zip(batch.latents, batch.text, strict=True):
        assert (states == lengths[latents.numpy().astype("f2").sum()]).all()
    assert data.batch(0, 2, 1).latents.shape == (2, 1, *LATENTS[1:])


def test_captions_are_dropped_by_their_share(captioned):
    make, _, _ = captioned
    whole = make(0.3).batch(0, 1000)
    dropped = (whole.text == 0).all(-1).all(-1)
    assert dropped.float().mean() == pytest.approx(0.3, abs=0.05)
    part = make(0.3).batch(500, 100)
    assert torch.equal(part.text, whole.text[500:600])


def test_a_video_base_learns(captioned):
    make, _, _ = captioned
    config = Config(
        shot=ShotConfig(9, 8, 32, 48),
        pretrain=PretrainConfig(video_base=VideoBaseSizes(2, 16, 1, 8, 5)),
    )
    torch.manual_seed(0)
    transformer = video_base.build(config, 8, LATENTS)
    assert isinstance(transformer, CogVideoXTransformer3DModel)
    assert transformer.config.sample_frames == 9 and transformer.config.text_embed_dim == 8
    model = video_base.TextToVideoLoss(transformer, DiffusionConfig())
    data = make(0.1)
    before, after = first_loss_and_after(model, lambda n, p: data.batch(4 * n, 4))
    assert after < before
