"""Layers and ways to write modules in PyTorch, each with an input: the table of docs/pytorch.md says which work."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

Case = tuple[nn.Module, torch.Tensor]
SECTIONS: dict[str, dict[str, Callable[[], Case]]] = {}


def section(name: str, **cases: Callable[[], Case]) -> None:
    """Cases that are one row of the table."""
    SECTIONS[name] = cases


class Of(nn.Module):
    """A function of an input and of the layers that it uses."""

    def __init__(self, function: Callable[..., Any], *layers: nn.Module) -> None:
        super().__init__()
        self.function, self.layers = function, nn.ModuleList(layers)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.function(self.scale * inputs if inputs.is_floating_point() else inputs, *self.layers)


def of(function: Callable[..., Any], shape: tuple[int, ...], *layers: nn.Module) -> Callable[[], Case]:
    return lambda: (Of(function, *layers), rows(shape))


def rows(shape: tuple[int, ...], kind: Any = torch.float32) -> torch.Tensor:
    made = torch.Generator().manual_seed(1)
    if kind is torch.float32:
        return torch.randn(shape, generator=made)
    return torch.randint(0, 7, shape, generator=made)


def layer(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> Callable[[], Case]:
    return lambda: (Of(lambda a, net: net(a), make()), rows(shape))


image, line = (4, 6, 9, 8), (4, 6, 12)
section(
    "linear layers and activations",
    **{
        "Linear": layer(lambda: nn.Linear(5, 3), (4, 5)),
        "Bilinear": of(lambda a, net: net(a, a * 2), (4, 5), nn.Bilinear(5, 5, 3)),
        **{
            kind.__name__: layer(kind, (4, 6))
            for kind in (nn.ReLU, nn.GELU, nn.ELU, nn.SELU, nn.SiLU, nn.Mish, nn.Softplus, nn.Tanh, nn.Sigmoid)
        },
        **{
            kind.__name__: layer(kind, (4, 6))
            for kind in (nn.LeakyReLU, nn.PReLU, nn.Hardswish, nn.Hardtanh, nn.ReLU6, nn.Softsign, nn.LogSigmoid)
        },
        "Softmax": layer(lambda: nn.Softmax(-1), (4, 6)),
        "LogSoftmax": layer(lambda: nn.LogSoftmax(-1), (4, 6)),
        "GLU": layer(nn.GLU, (4, 6)),
    },
)
section(
    "convolutions",
    **{
        "Conv1d": layer(lambda: nn.Conv1d(6, 4, 3, stride=2, padding=1), line),
        "Conv2d": layer(lambda: nn.Conv2d(6, 4, 3, padding=1), image),
        "Conv2d, uneven": layer(lambda: nn.Conv2d(6, 4, (3, 2), stride=(2, 1), padding=(0, 2)), image),
        "Conv2d, dilated": layer(lambda: nn.Conv2d(6, 4, 3, dilation=2), image),
        "Conv2d, 'same'": layer(lambda: nn.Conv2d(6, 4, 4, padding="same"), image),
        "Conv2d, circular": layer(lambda: nn.Conv2d(6, 4, 3, padding=1, padding_mode="circular"), image),
        "Conv2d, groups": layer(lambda: nn.Conv2d(6, 4, 3, groups=2), image),
        "Conv2d, depthwise": layer(lambda: nn.Conv2d(6, 12, 3, groups=6, stride=2), image),
        "ConvTranspose1d": layer(lambda: nn.ConvTranspose1d(6, 4, 3, stride=2), line),
        "ConvTranspose2d": layer(lambda: nn.ConvTranspose2d(6, 4, 3, stride=2, padding=1, output_padding=1), image),
        "ConvTranspose2d, groups": layer(lambda: nn.ConvTranspose2d(6, 4, 3, groups=2, dilation=2), image),
        "Conv3d": layer(lambda: nn.Conv3d(2, 3, 2, stride=2, padding=1), (2, 2, 4, 5, 4)),
    },
)
section(
    "pooling and resizing",
    **{
        "MaxPool1d": layer(lambda: nn.MaxPool1d(2), line),
        "MaxPool2d": layer(lambda: nn.MaxPool2d(2), image),
        "MaxPool2d, overlapping": layer(lambda: nn.MaxPool2d(3, stride=2, padding=1), image),
        "MaxPool2d, ceil": layer(lambda: nn.MaxPool2d(2, ceil_mode=True), image),
        "AvgPool1d": layer(lambda: nn.AvgPool1d(3, stride=2), line),
        "AvgPool2d": layer(lambda: nn.AvgPool2d(3, stride=2, padding=1), image),
        "AdaptiveAvgPool2d": layer(lambda: nn.AdaptiveAvgPool2d(1), image),
        "AdaptiveAvgPool2d, (3, 2)": layer(lambda: nn.AdaptiveAvgPool2d((3, 2)), image),
        "AdaptiveMaxPool2d": layer(lambda: nn.AdaptiveMaxPool2d(1), image),
        "LPPool2d": layer(lambda: nn.LPPool2d(2, 2), image),
        **{
            f"interpolate, {mode}": of(lambda a, mode=mode: functional.interpolate(a, scale_factor=2, mode=mode), image)
            for mode in ("nearest", "bilinear", "bicubic")
        },
        "interpolate, to a size": of(lambda a: functional.interpolate(a, (5, 11), mode="bilinear"), image),
        "PixelShuffle": layer(lambda: nn.PixelShuffle(2), (4, 8, 3, 3)),
        "ZeroPad2d": layer(lambda: nn.ZeroPad2d(2), image),
        "ReflectionPad2d": layer(lambda: nn.ReflectionPad2d(2), image),
        "Unfold": layer(lambda: nn.Unfold(2), image),
        "Fold": layer(lambda: nn.Fold((4, 5), 2), (2, 12, 12)),
        "grid_sample": of(
            lambda a: functional.grid_sample(a, torch.tanh(a[:, :2].permute(0, 2, 3, 1)), align_corners=False), image
        ),
    },
)
section(
    "normalization",
    **{
        "LayerNorm": layer(lambda: nn.LayerNorm(12), line),
        "RMSNorm": layer(lambda: nn.RMSNorm(12), line),
        "GroupNorm": layer(lambda: nn.GroupNorm(3, 6), image),
        "InstanceNorm2d": layer(lambda: nn.InstanceNorm2d(6, affine=True), image),
        "BatchNorm2d": layer(lambda: nn.BatchNorm2d(6), image),
        "BatchNorm2d, eval()": layer(lambda: nn.BatchNorm2d(6).eval(), image),
        "BatchNorm1d": layer(lambda: nn.BatchNorm1d(6), (5, 6)),
        "LocalResponseNorm": layer(lambda: nn.LocalResponseNorm(2), image),
        "weight_norm": layer(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(5, 3)), (4, 5)),
        "spectral_norm": layer(lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(5, 3)).eval(), (4, 5)),
        "normalize, cosine_similarity": of(
            lambda a: functional.normalize(a) * functional.cosine_similarity(a, a.roll(1, 0))[:, None], (4, 6)
        ),
    },
)
section(
    "sequences and attention",
    **{
        "Embedding": lambda: (Of(lambda a, net: net(a), nn.Embedding(7, 5, padding_idx=0)), rows((4, 3), int)),
        "EmbeddingBag": lambda: (Of(lambda a, net: net(a), nn.EmbeddingBag(7, 5)), rows((4, 3), int)),
        "RNN": of(lambda a, net: net(a)[0], line, nn.RNN(12, 5, batch_first=True)),
        "GRU": of(lambda a, net: net(a)[0], line, nn.GRU(12, 5, batch_first=True)),
        "LSTM": of(lambda a, net: net(a)[0], line, nn.LSTM(12, 5, 2, batch_first=True)),
        "LSTM, both ways": of(lambda a, net: net(a)[0], line, nn.LSTM(12, 5, bidirectional=True, batch_first=True)),
        "LSTMCell": of(lambda a, net: net(a)[0], (4, 6), nn.LSTMCell(6, 5)),
        "MultiheadAttention": of(
            lambda a, net: net(a, a, a, need_weights=False)[0], line, nn.MultiheadAttention(12, 3, batch_first=True)
        ),
        "TransformerEncoderLayer": layer(lambda: nn.TransformerEncoderLayer(12, 3, 16, 0.0, batch_first=True), line),
        "TransformerDecoderLayer": of(
            lambda a, net: net(a, a), line, nn.TransformerDecoderLayer(12, 3, 16, 0.0, batch_first=True)
        ),
        "scaled_dot_product_attention": of(
            lambda a: functional.scaled_dot_product_attention(a, a, a, is_causal=True), line
        ),
    },
)


def _counts(a: torch.Tensor) -> torch.Tensor:
    found = torch.zeros(a.shape[0], 3)
    for j in range(3):
        found[:, j] = a[:, j::3].sum(1)
    found += 1
    return found.mul_(2).clamp_(-3, 3)


class Nested(nn.Module):
    """Modules in lists and dictionaries, a shared layer, a buffer, and tensors that are neither."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(6, 6)
        self.blocks = nn.ModuleList([nn.ModuleList([shared, nn.Linear(6, 6)]), nn.ModuleList([shared])])
        self.named = nn.ModuleDict({"out": nn.Linear(6, 2)})
        self.own = nn.ParameterList([torch.ones(6), torch.full((6,), 0.5)])
        self.register_buffer("mean", torch.full((6,), 0.1))
        self.plain = [torch.full((6,), 0.2)]
        self.seen: Any = None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        inputs = (inputs - self.mean + self.plain[0]) * self.own[0] + self.own[1]
        for block in self.blocks:
            for each in block:
                inputs = torch.relu(each(inputs)) + inputs
        self.seen = inputs
        return self.named["out"](inputs)


class Tied(nn.Module):
    """An autoencoder whose decoder is the encoder, transposed, and whose layers share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.b.weight = self.a.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return functional.linear(torch.tanh(self.b(self.a(inputs))), self.a.weight.T)


class Frozen(nn.Module):
    """A frozen layer below one that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 4).requires_grad_(False), nn.Linear(4, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.body(inputs)))


OUTSIDE = torch.linspace(0, 1, 6)


def _stopped(a: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        target = a * 2
    return a * target + a.detach() * a.data


section(
    "ways to write a module",
    **{
        "modules in lists and dictionaries": lambda: (Nested(), rows((4, 6))),
        "tied parameters": lambda: (Tied(), rows((4, 6))),
        "frozen parameters": lambda: (Frozen(), rows((4, 6))),
        "operations in place": of(_counts, (4, 6)),
        "writing into a slice": of(lambda a: torch.stack([a, a * 2]).index_fill(2, torch.tensor([1]), 0.5), (4, 6)),
        "masked_fill, where": of(lambda a: a.masked_fill(a > 0.3, 0.1) + torch.where(a > 0, a, a * a), (4, 6)),
        "gather, scatter_add": of(
            lambda a: a.gather(1, a.argsort(1)) + torch.zeros_like(a).scatter_add(1, a.argsort(1), a), (4, 6)
        ),
        "sort, topk, cumsum": of(lambda a: a.sort(1)[0].cumsum(1)[:, :2] + a.topk(2)[0], (4, 6)),
        "einsum, bmm, matmul": of(
            lambda a: torch.einsum("bij,bkj->bik", a, a) + torch.bmm(a, a.transpose(1, 2)) + a @ a.mT, line
        ),
        "cat, stack, split, chunk": of(
            lambda a: torch.cat([*a.split(2, 1), *a.chunk(2, 1)], 1) + torch.stack([a, a], 2).flatten(1), (4, 6)
        ),
        "reshape, permute, expand": of(
            lambda a: a.view(4, 2, 3).permute(2, 0, 1).reshape(3, -1).unsqueeze(0).expand(2, -1, -1).flatten(-2, -1),
            (4, 6),
        ),
        "std, var, norm, logsumexp": of(
            lambda a: a.std(1) + a.var(1, unbiased=False) + a.norm(dim=1) + a.logsumexp(1) + a.amax(1), (4, 6)
        ),
        "tensors from outside": of(lambda a: a * OUTSIDE + torch.eye(6)[2], (4, 6)),
        "Python numbers from constants": of(lambda a: a[:, : int(torch.arange(5)[3])] * OUTSIDE[2].item(), (4, 6)),
        "detach, no_grad, .data": of(_stopped, (4, 6)),
        "to(device), cpu(), float()": of(
            lambda a: a.to("cpu").cpu() + torch.ones(6, device="cpu") + a.float() + a.to(torch.float32), (4, 6)
        ),
        "type_as, new_zeros, half": of(
            lambda a: a.half().type_as(a) * 0 + a + a.new_ones(6) + a.new_zeros(4, 1) + a.type_as(a), (4, 6)
        ),
        "a loop over rows": of(lambda a: torch.stack([row.sum() * i for i, row in enumerate(a)]), (4, 6)),
        "checkpoint": of(
            lambda a, net: torch.utils.checkpoint.checkpoint(net, a, use_reentrant=False), (4, 6), nn.Linear(6, 6)
        ),
        "if on the values of tensors": of(lambda a: a * 2 if a.sum() > 0 else a, (4, 6)),
        "selecting rows by a mask": of(lambda a: a[a[:, 0] > 0], (4, 6)),
        "item(), numpy()": of(lambda a: a * float(a.sum().item()), (4, 6)),
    },
)


def _loss(make: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], shape: tuple[int, ...] = (6, 5)) -> Any:
    labels = rows((shape[0], *shape[2:]), int) % shape[1]
    return of(lambda a: make(a, labels), shape)


section(
    "losses",
    **{
        "cross_entropy": _loss(functional.cross_entropy),
        "cross_entropy, smoothed, weighted": _loss(
            lambda a, b: functional.cross_entropy(a, b, weight=torch.arange(1.0, 6.0), label_smoothing=0.1)
        ),
        "cross_entropy, ignore_index": _loss(lambda a, b: functional.cross_entropy(a, b, ignore_index=2)),
        "cross_entropy, of pixels": _loss(functional.cross_entropy, (4, 5, 3, 2)),
        "cross_entropy, of probabilities": _loss(lambda a, b: functional.cross_entropy(a, OUTSIDE[:5].expand(6, 5))),
        "nll_loss": _loss(lambda a, b: functional.nll_loss(a.log_softmax(1), b)),
        "binary_cross_entropy_with_logits": _loss(
            lambda a, b: functional.binary_cross_entropy_with_logits(a[:, 0], (b > 1).float())
        ),
        "mse_loss, l1_loss, huber_loss": _loss(
            lambda a, b: (
                functional.mse_loss(a[:, 0], a[:, 1])
                + functional.l1_loss(a[:, 0], a[:, 2])
                + functional.huber_loss(a[:, 0], b.float())
                + functional.smooth_l1_loss(a[:, 0], b.float())
            )
        ),
        "kl_div": _loss(lambda a, b: functional.kl_div(a.log_softmax(1), a.flip(1).softmax(1), reduction="batchmean")),
        "margin_ranking_loss, hinge": _loss(
            lambda a, b: functional.margin_ranking_loss(a[:, 0], a[:, 1], torch.ones(6)) + functional.relu(1 - a).mean()
        ),
        "triplet_margin_loss": _loss(lambda a, b: functional.triplet_margin_loss(a, a.roll(1, 0), a.roll(2, 0))),
        "multi_margin_loss": _loss(functional.multi_margin_loss),
        "ctc_loss": _loss(
            lambda a, b: functional.ctc_loss(
                a.log_softmax(1)[:, None], torch.tensor([[1, 2]]), torch.tensor([6]), torch.tensor([2])
            )
        ),
        "one_hot": _loss(lambda a, b: (functional.one_hot(b, 5) * a.log_softmax(1)).sum(1).mean()),
    },
)
section(
    "linear algebra",
    **{
        "inv, solve, det": of(
            lambda a: torch.linalg.solve(a @ a.T + torch.eye(4), a) + torch.linalg.inv(a @ a.T + torch.eye(4)).sum(),
            (4, 6),
        ),
        "cholesky, slogdet": of(
            lambda a: torch.linalg.cholesky(a @ a.T + torch.eye(4)).sum() + torch.logdet(a @ a.T + torch.eye(4)), (4, 6)
        ),
        "eigh, svd": of(lambda a: torch.linalg.eigvalsh(a @ a.T) + torch.linalg.svdvals(a), (4, 6)),
        "cdist": of(lambda a: torch.cdist(a, a[:2] + 1), (4, 6)),
        "fft": of(lambda a: torch.fft.rfft(a).abs(), (4, 6)),
    },
)
