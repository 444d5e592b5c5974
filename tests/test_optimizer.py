"""The optimiser: which parameter is trained how, and what a Muon step is."""

import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from animegamer.config import Config, ConfigError, TrainConfig
from animegamer.optimizer import MuonAdamW, build_optimizer, orthogonal
from animegamer.training import fit, select_trainable


class Small(nn.Module):
    """Every kind of parameter that counts: embedding, matrices, vectors, a vocabulary's scores."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 4))
        self.decoder = nn.Module()
        self.decoder.inner = nn.Linear(4, 8)
        self.decoder.lm_head = nn.Linear(8, 7, bias=False)

    def forward(self, ids):
        hidden = torch.relu(self.decoder.inner(self.encoder(ids)))
        scores = self.decoder.lm_head(hidden)
        return nn.functional.cross_entropy(scores, ids), {}


def batch(first, size):
    return torch.randint(7, (16,), generator=torch.Generator().manual_seed(first))


def built(model, **changes):
    groups = select_trainable(model, ("encoder", "decoder"))
    return build_optimizer(replace(TrainConfig(lr=1.0, weight_decay=0.1), **changes), model, groups)


def rows(optimizer):
    return [
        (g["peak_lr"], g["weight_decay"], g["orthogonal"], sorted(p.ndim for p in g["params"]))
        for g in optimizer.param_groups
    ]


def test_groups_have_their_own_rate_and_matrices_alone_decay():
    optimizer = built(Small(), lr_groups={"decoder": 0.5})
    assert type(optimizer) is torch.optim.AdamW
    assert rows(optimizer) == [
        (1.0, 0.1, False, [2, 2]),
        (1.0, 0.0, False, [1]),
        (0.5, 0.1, False, [2, 2]),
        (0.5, 0.0, False, [1]),
    ]


def test_a_matrix_rate_takes_linear_layers_but_no_vocabulary():
    model = Small()
    optimizer = built(model, matrix_lr=4.0, lr_groups={"decoder": 0.5})
    assert isinstance(optimizer, MuonAdamW)
    assert rows(optimizer) == [
        (4.0, 0.1, True, [2]),
        (1.0, 0.1, False, [2]),
        (1.0, 0.0, False, [1]),
        (2.0, 0.1, True, [2]),
        (0.5, 0.1, False, [2]),
        (0.5, 0.0, False, [1]),
    ]
    by_muon = [p for g in optimizer.param_groups if g["orthogonal"] for p in g["params"]]
    assert by_muon[0] is model.encoder[1].weight and by_muon[1] is model.decoder.inner.weight


def test_a_rate_for_what_does_not_train_is_an_error():
    with pytest.raises(ConfigError, match="'frozen' is not in train.trainable"):
        built(Small(), lr_groups={"frozen": 1.0})


@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (6, 6)])
def test_orthogonal_keeps_singular_vectors_and_levels_singular_values(shape):
    torch.manual_seed(0)
    matrix = torch.randn(shape)
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    inside = u.T @ orthogonal(matrix).float() @ v.T
    values = inside.diagonal()
    assert ((values > 0.5) & (values < 1.4)).all()
    assert (inside - values.diag()).abs().max() < 0.05


def test_one_step_known_answer():
    weight = nn.Parameter(torch.ones(2, 2))
    vector = nn.Parameter(torch.ones(2))
    groups = [
        {"params": [weight], "lr": 0.5, "weight_decay": 0.1, "orthogonal": True},
        {"params": [vector], "lr": 0.5, "weight_decay": 0.0, "orthogonal": False},
    ]
    optimizer = MuonAdamW(groups, betas=(0.9, 0.95), eps=1e-8, fused=True)
    weight.grad, vector.grad = torch.tensor([[3.0, 0.0], [0.0, 3.0]]), torch.tensor([2.0, -2.0])
    expected = 0.95 - 0.5 * 0.2 * 2**0.5 * orthogonal(weight.grad).float()
    optimizer.step()
    assert torch.allclose(weight.data, expected, atol=1e-6)
    assert torch.allclose(vector.data, torch.tensor([0.5, 1.5]), atol=1e-6)
    assert weight.grad is None and vector.grad is not None


def test_a_run_goes_on_from_its_checkpoint_with_the_same_weights(tmp_path):
    train = TrainConfig(
        run=str(tmp_path),
        trainable=("encoder", "decoder"),
        steps=6,
        lr=1e-2,
        matrix_lr=3e-2,
        warmup_steps=2,
        ema_decay=0.9,
        validate_every=0,
        save_every=3,
        threads=1,
    )

    def trained():
        torch.manual_seed(0)
        model = Small()
        fit(Config(train=train), model, batch)
        return model.state_dict()

    whole = trained()
    shutil.rmtree(tmp_path / "step_0000006")
    again = trained()
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    moments = load_file(tmp_path / "step_0000006" / "optimizer.safetensors")
    assert "decoder.inner.weight:momentum" in moments
    assert "encoder.0.weight:exp_avg" in moments
