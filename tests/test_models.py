"""The towers against plain per-sample programs, their options, and models of the user's own."""

import copy
import math
import sys

import numpy as np
import pytest
import torch

from hpc_ctr import models
from hpc_ctr.errors import UsageError
from hpc_ctr.models import ModelSpec, TableSpec
from hpc_ctr.train.step import _check_logits

D, B = 3, 7


def spec(num_dense: int = D, dims=(4, 4), fields=((0, 1, 2), (3, 4)), dtype=torch.float64) -> ModelSpec:
    tables = [TableSpec(f"t{i}", [f"f{j}" for j in fields[i]], dim) for i, dim in enumerate(dims)]
    return ModelSpec(num_dense, tables, dtype)


def inputs(s: ModelSpec, batch: int = B, dtype=torch.float64, seed: int = 0):
    rng = np.random.default_rng(seed)

    def draw(*shape):
        return torch.from_numpy(rng.normal(0, 1, shape)).to(dtype).requires_grad_()

    return (draw(batch, s.num_dense), tuple(draw(batch, len(t.fields), t.dim) for t in s.tables),
            draw(batch, s.num_fields))


def build(name: str, s: ModelSpec, **options):
    torch.manual_seed(1)
    model = models.build(name, s, options)
    with torch.no_grad():  # no parameter at a value, such as 0, at which a mistake would not show
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape, dtype=torch.float64).to(p.dtype))
    return model


# ------------------------------------------------------- references: one sample at a time, plain loops


def layers(tower) -> list[tuple[np.ndarray, np.ndarray]]:
    linear = [m for m in tower if isinstance(m, torch.nn.Linear)]
    return [(m.weight.detach().numpy(), m.bias.detach().numpy()) for m in linear]


def run_mlp(x: np.ndarray, tower, relu_last: bool) -> np.ndarray:
    steps = layers(tower)
    for i, (weight, bias) in enumerate(steps):
        x = np.array([sum(w * v for w, v in zip(row, x)) + b for row, b in zip(weight, bias)])
        if relu_last or i < len(steps) - 1:
            x = np.maximum(x, 0)
    return x


def reference(name: str, model, dense: np.ndarray, vectors: list[np.ndarray], first: np.ndarray) -> float:
    """Logit of one sample: dense [D], vectors one [dim] a field, first [F]."""
    linear = model if name == "lr" else getattr(model, "linear", None)
    logit = 0.0
    if linear is not None:
        weight, bias = linear.weight.detach().numpy(), linear.bias.item()
        logit = bias + sum(w * d for w, d in zip(weight, dense)) + sum(first)
    if name == "lr":
        return logit
    if name == "dlrm":
        parts = list(vectors)
        top: list[float] = []
        if len(dense):
            bottom = run_mlp(dense, model.bottom, relu_last=True)
            parts.insert(0, bottom)
            top += list(bottom)
        for i in range(len(parts)):
            for j in range(i):
                top.append(sum(a * b for a, b in zip(parts[i], parts[j])))
        return run_mlp(np.array(top), model.top, relu_last=False)[0]
    deep = run_mlp(np.concatenate([*vectors, dense]), model.tower, relu_last=False)[0]
    if name == "deepfm":
        for i in range(len(vectors)):
            for j in range(i):
                logit += sum(a * b for a, b in zip(vectors[i], vectors[j]))
    return logit + deep


CASES = [
    ("lr", spec(dims=(0, 0)), {}),
    ("lr", spec(0, dims=(0, 0)), {}),
    ("dnn", spec(dims=(4, 2)), {"hidden": [6, 5]}),
    ("dnn", spec(0), {"hidden": [6]}),
    ("dnn", spec(5, dims=(), fields=()), {"hidden": []}),
    ("deepfm", spec(), {"hidden": [6, 5]}),
    ("deepfm", spec(0, dims=(3,), fields=((0,),)), {"hidden": [4]}),
    ("dlrm", spec(), {"bottom": [5, 4], "top": [6]}),
    ("dlrm", spec(), {"top": [6, 3]}),
    ("dlrm", spec(0), {"top": [6]}),
    ("dlrm", spec(1, dims=(3,), fields=((0,),)), {}),
]


@pytest.mark.parametrize("name, s, options", CASES, ids=[f"{c[0]}-{i}" for i, c in enumerate(CASES)])
def test_forward_and_gradients(name, s, options):
    model = build(name, s, **options)
    dense, vectors, first = inputs(s)
    logits = model(dense, vectors, first)
    assert logits.shape == (B,) and logits.dtype == torch.float64
    for b in range(B):
        per_field = [v[b, f].detach().numpy() for v in vectors for f in range(v.shape[1])]
        want = reference(name, model, dense[b].detach().numpy(), per_field, first[b].detach().numpy())
        assert logits[b].item() == pytest.approx(want, rel=1e-12, abs=1e-12)
    logits.square().sum().backward()
    used = [*model.parameters(), *([dense] if s.num_dense else [])]
    used += list(vectors) if models.wants_vectors(name) else []
    used += [first] if models.needs_first_order(name) else []
    assert all(x.grad is not None for x in used)
    assert all(x.grad.abs().sum() > 0 for x in [dense, *vectors, first] if x.grad is not None and x.numel())


@pytest.mark.parametrize("name, s, options", CASES, ids=[f"{c[0]}-{i}" for i, c in enumerate(CASES)])
def test_a_batch_without_samples(name, s, options):
    model = build(name, s, **options)
    logits = model(*inputs(s, 0))
    assert logits.shape == (0,)
    logits.sum().backward()
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("name", models.MODELS)
def test_gradients_match_finite_differences(name):
    s = spec(dims=(0, 0) if name == "lr" else (4, 4))
    model = build(name, s)
    dense, vectors, first = inputs(s, 2)
    used = vectors if models.wants_vectors(name) else ()
    assert torch.autograd.gradcheck(lambda d, f, *v: model(d, v, f), (dense, first, *used), atol=1e-5)


@pytest.mark.parametrize("name", models.MODELS)
def test_bfloat16_autocast_is_close(name):
    s = spec(13, dims=(0,) if name == "lr" else (16,), fields=(tuple(range(26)),), dtype=torch.float32)
    model = build(name, s)
    dense, vectors, first = inputs(s, 64, torch.float32)
    exact = model(dense, vectors, first)
    with torch.autocast("cpu", torch.bfloat16):
        rough = model(dense, vectors, first)
    assert exact.dtype == rough.dtype == torch.float32
    assert (exact - rough).abs().max() < 0.03 * exact.abs().max()
    rough.sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())
    assert name == "lr" or not torch.equal(exact, rough)


@pytest.mark.parametrize("name", models.MODELS)
def test_the_seed_decides_the_parameters(name):
    s = spec(dims=(0, 0) if name == "lr" else (4, 4))
    made = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        made.append(torch.cat([p.detach().reshape(-1) for p in models.build(name, s).parameters()]))
    assert torch.equal(made[0], made[1]) and (name == "lr" or not torch.equal(made[0], made[2]))


def test_defaults():
    dnn = models.build("dnn", spec(13, (16,), (tuple(range(26)),)))
    assert [w.shape for w, _ in layers(dnn.tower)] == [(400, 429), (400, 400), (400, 400), (1, 400)]
    dlrm = models.build("dlrm", spec(13, (16,), (tuple(range(26)),)))
    assert [w.shape for w, _ in layers(dlrm.bottom)] == [(64, 13), (16, 64)]
    assert [w.shape for w, _ in layers(dlrm.top)] == [(256, 16 + 27 * 26 // 2), (128, 256), (1, 128)]
    assert list(dlrm.state_dict()) == list(dict(dlrm.named_parameters()))  # no buffers in checkpoints
    assert {name for name in models.MODELS if models.needs_first_order(name)} == {"lr", "deepfm"}
    assert {name for name in models.MODELS if models.wants_vectors(name)} == {"deepfm", "dlrm", "dnn"}
    assert models.option_names("dlrm") == ["bottom", "top", "dropout"]
    assert ModelSpec(1, [], "float64").dtype is torch.float64


def test_dropout_acts_in_training_only():
    s = spec(dtype=torch.float32)
    model = models.build("dnn", s, {"hidden": [64], "dropout": 0.5})
    args = inputs(s, 4, torch.float32)
    assert not torch.equal(model(*args), model(*args))
    model.eval()
    assert torch.equal(model(*args), model(*args))


def test_initial_logits_are_moderate():
    """With the initial rows of a table (here of size 0.01) a new model predicts nearly 1/2 for everything."""
    s = spec(13, (16,), (tuple(range(26)),), torch.float32)
    for name in ("deepfm", "dlrm", "dnn"):
        torch.manual_seed(0)
        model = models.build(name, s)
        _, vectors, first = inputs(s, 32, torch.float32)
        with torch.no_grad():
            logits = model(torch.rand(32, 13) * 5, tuple(0.01 * v for v in vectors), 0 * first)
        assert torch.isfinite(logits).all() and logits.abs().max() < 10


@pytest.mark.parametrize("name, s, options, message", [
    ("deepfn", spec(), {}, "model.name: unknown model 'deepfn'; did you mean deepfm?"),
    ("xyz", spec(), {}, "known are deepfm, dlrm, dnn, lr, or your own torch module as package.module:Class"),
    ("dnn", spec(), {"hiden": [4]}, "model.hiden: model dnn has no such option; did you mean model.hidden?"),
    ("lr", spec(), {"hidden": [4]}, "model.hidden: model lr has no such option; it takes none"),
    ("dnn", spec(), {"hidden": 400}, "model.hidden: must be a list of whole numbers above 0"),
    ("dnn", spec(), {"hidden": [400, 0]}, "model.hidden: must be a list of whole numbers above 0"),
    ("dlrm", spec(), {"top": ["a"]}, "model.top: must be a list of whole numbers above 0"),
    ("dlrm", spec(), {"bottom": [8, 5]}, "model.bottom: the last size must be the tables' dim 4, not [8, 5]"),
    ("dlrm", spec(), {"bottom": []}, "model.bottom: the last size must be the tables' dim 4"),
    ("dnn", spec(), {"dropout": 1.0}, "model.dropout: must be at least 0 and below 1, not 1.0"),
    ("deepfm", spec(dims=(4, 8)), {}, "model deepfm multiplies vectors of different fields"),
    ("dlrm", spec(dims=(0, 0)), {}, "all tables need the same dim of at least 1 (found: 0)"),
    ("dlrm", spec(0, (4,), ((0,),)), {}, "one categorical field and no dense column make no pair"),
    ("dnn", spec(0, (), ()), {}, "model dnn: there is neither a dense column nor a categorical field"),
    ("no_such_package.towers:Net", spec(), {}, "towers:Net cannot be imported: ModuleNotFoundError"),
    ("hpc_ctr.models.dnn:Dna", spec(), {}, "module hpc_ctr.models.dnn has no Dna; did you mean Dnn?"),
    ("hpc_ctr.models.dnn.layer_sizes", spec(), {}, "layer_sizes is not a torch.nn.Module class"),
    ("hpc_ctr.models.dnn:", spec(), {}, "module hpc_ctr.models.dnn has no class name given"),
])
def test_mistakes_are_named(name, s, options, message):
    with pytest.raises(UsageError) as error:
        models.build(name, s, options)
    assert message in str(error.value)


OWN = '''
import torch

class Own(torch.nn.Module):
    first_order = True

    def __init__(self, spec, scale, offset=0.0):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((spec.num_dense,), float(scale)))
        self.offset = offset

    def forward(self, dense, vectors, first):
        return dense @ self.weight + first.sum(1) + self.offset


class Free(Own):
    def __init__(self, spec, **options):
        super().__init__(spec, options.get("scale", 1))
'''


@pytest.mark.parametrize("separator", [":", "."])
def test_a_model_of_the_users(tmp_path, monkeypatch, separator):
    (tmp_path / "own_tower.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    monkeypatch.delitem(sys.modules, "own_tower", raising=False)
    name = f"own_tower{separator}Own"
    s = spec()
    assert models.needs_first_order(name) and models.wants_vectors(name)
    model = models.build(name, s, {"scale": 2, "offset": 0.5})
    dense, vectors, first = inputs(s)
    assert model.weight.dtype == torch.float64
    assert torch.allclose(model(dense, vectors, first), 2 * dense.sum(1) + first.sum(1) + 0.5)
    with pytest.raises(UsageError, match="model.scale: model .* needs this option"):
        models.build(name, s, {})
    with pytest.raises(UsageError, match="model.ofset: .* did you mean model.offset"):
        models.build(name, s, {"scale": 2, "ofset": 1})
    assert models.build(f"own_tower{separator}Free", s, {"scale": 3, "anything": 1}).weight[0] == 3


def test_an_error_in_the_users_module_is_one_sentence(tmp_path, monkeypatch):
    (tmp_path / "broken_tower.py").write_text("raise RuntimeError('first line\\nsecond line')\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as error:
        models.build("broken_tower:Net", spec())
    assert str(error.value) == ("model.name: broken_tower:Net cannot be imported: RuntimeError: first line "
                                "second line")


NO_SPEC = """
import torch

class Bare(torch.nn.Module):
    def __init__(self):
        super().__init__()

class Lazy(torch.nn.Module):
    def __init__(self, spec):
        super().__init__()
        self.last = torch.nn.LazyLinear(1)
"""


@pytest.mark.parametrize("text, name, message", [
    (NO_SPEC, "Bare", "must take the ModelSpec first"), (NO_SPEC, "Lazy", "last.weight of .* has no shape yet"),
    ("raise SystemExit(4)", "Net", "cannot be imported: SystemExit: 4")])
def test_a_module_that_cannot_be_used_is_one_sentence(text, name, message, tmp_path, monkeypatch):
    (tmp_path / "odd_tower.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "odd_tower", raising=False)
    with pytest.raises(UsageError, match=message):
        models.build(f"odd_tower:{name}", spec())


@pytest.mark.parametrize("out, wrong", [
    (None, "a NoneType"), ((torch.zeros(3), 1), "a tuple"), (torch.zeros(3, 1), r"shape \[3, 1\]"),
    (torch.zeros(()), r"shape \[\]"), (torch.zeros(3, dtype=torch.int64), "torch.int64"),
    (torch.zeros(3), "no gradient flows")])
def test_what_is_no_logits_is_named(out, wrong):
    with pytest.raises(UsageError, match=f"model.name: Linear.forward gives .*{wrong}.* for 3 samples"):
        _check_logits(out, torch.nn.Linear(1, 1), 3)
    with torch.no_grad():
        _check_logits(torch.zeros(3), torch.nn.Linear(1, 1), 3)


def test_deepfm_learns_a_product_of_two_fields():
    """Clicks that depend on a pair alone: the pairwise term finds it; logistic regression cannot."""
    rng = np.random.default_rng(0)
    ids = torch.from_numpy(rng.integers(0, 2, (512, 2)))
    label = (ids[:, 0] == ids[:, 1]).double()
    losses = {}
    for name, dim in (("lr", 0), ("deepfm", 4)):
        torch.manual_seed(0)
        s = spec(0, (dim,), ((0, 1),))
        model = models.build(name, s, {"hidden": [8]} if dim else {})
        rows = torch.nn.Parameter(0.1 * torch.randn(4, dim, dtype=torch.float64))
        first = torch.nn.Parameter(torch.zeros(4, dtype=torch.float64))
        optimizer = torch.optim.Adam([*model.parameters(), rows, first], lr=0.05)
        for _ in range(60):
            slots = ids + torch.tensor([0, 2])
            logits = model(torch.zeros(512, 0, dtype=torch.float64), (rows[slots],), first[slots])
            loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses[name] = loss.item()
    assert losses["lr"] > 0.98 * math.log(2) and losses["deepfm"] < 0.1


def test_specs_can_be_copied():
    s = spec()
    assert copy.deepcopy(s) == s and s.num_fields == 5 and s.vector_floats == 20
