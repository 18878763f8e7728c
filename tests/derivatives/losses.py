"""Losses; pooling, resizing and padding."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .cases import a, b, c, fixed, function, pos, positive, sp

# losses

function("mse loss", F.mse_loss, a(2, 3), b(2, 3))
function("l1 loss", lambda x, y: F.l1_loss(x * x, y), a(3), lambda: fixed(9.0, -9.0, 9.0).requires_grad_())
function("smooth l1 loss", F.smooth_l1_loss, a(3), lambda: fixed(0.5, 9.0, -9.0).requires_grad_())
function(
    "huber loss",
    lambda x, y: F.huber_loss(x, y, delta=0.7),
    a(3),
    lambda: fixed(0.5, 9.0, -9.0).requires_grad_(),
)
function("cross entropy", lambda x: F.cross_entropy(x, torch.tensor([0, 2])), a(2, 3))
function(
    "cross entropy, smoothed and weighted",
    lambda x: F.cross_entropy(x, torch.tensor([0, 2]), weight=fixed(1, 2, 3), label_smoothing=0.1),
    a(2, 3),
)
function("cross entropy, soft targets", lambda x, y: F.cross_entropy(x, y.softmax(-1)), a(2, 3), b(2, 3))
function("nll loss", lambda x: F.nll_loss(x.log_softmax(-1), torch.tensor([0, 2]), ignore_index=2), a(2, 3))
function("nll loss 2d", lambda x: F.nll_loss(x.tanh(), torch.tensor([[[0, 1]]])), a(1, 2, 1, 2))
function("binary cross entropy", lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.sigmoid()), a(3), b(3))
function(
    "binary cross entropy of logits", F.binary_cross_entropy_with_logits, a(3), lambda: positive(3, seed=2)
)
function(
    "kl divergence",
    lambda x, y: F.kl_div(x.log_softmax(-1), y.softmax(-1), reduction="batchmean"),
    a(2, 3),
    b(2, 3),
)
function("cosine similarity", lambda x, y: F.cosine_similarity(x, y), a(2, 3), b(2, 3))
function("cosine embedding loss", lambda x, y: F.cosine_embedding_loss(x, y, fixed(1, -1)), a(2, 3), b(2, 3))
function("triplet margin loss", F.triplet_margin_loss, a(2, 3), b(2, 3), c(2, 3))
function("poisson nll loss", lambda x: F.poisson_nll_loss(x, fixed(1, 2, 3)), a(3))
function("soft margin loss", lambda x: F.soft_margin_loss(x, fixed(1, -1, 1)), a(3))


# pooling, resizing, padding

function("max_pool2d", lambda x: F.max_pool2d(x, 2) ** 2, sp(1, 1, 4, 4))
function("avg_pool2d", lambda x: F.avg_pool2d(x, 2) ** 2, a(1, 1, 4, 4))
function("adaptive_avg_pool2d", lambda x: F.adaptive_avg_pool2d(x, 3) ** 2, a(1, 1, 4, 4))
function("adaptive_max_pool1d", lambda x: F.adaptive_max_pool1d(x, 2) ** 2, sp(1, 2, 4))
function("lp_pool1d", lambda x: F.lp_pool1d(x, 2, 2), pos(1, 1, 4))
for _mode in ("nearest", "bilinear", "bicubic", "area"):
    function(
        f"interpolate {_mode}",
        lambda x, mode=_mode: F.interpolate(x, scale_factor=1.5, mode=mode) ** 2,
        a(1, 1, 2, 4),
    )
function("pixel_shuffle", lambda x: F.pixel_shuffle(x, 2) ** 2, a(1, 4, 1, 2))
function(
    "grid_sample",
    lambda x: (
        F.grid_sample(
            x, torch.tensor([[[[0.1, 0.2], [-0.3, 0.4]]]], dtype=torch.float64), align_corners=False
        )
        ** 2
    ),
    a(1, 1, 3, 3),
)
for _mode in ("constant", "reflect", "replicate", "circular"):
    function(f"pad {_mode}", lambda x, mode=_mode: F.pad(x, (1, 1), mode=mode) ** 2, a(1, 1, 3))
function("unfold and fold", lambda x: F.fold(F.unfold(x, 2) ** 2, (3, 3), 2), a(1, 1, 3, 3))
function("unfold along a dimension", lambda x: x.unfold(0, 3, 1).prod(-1), a(5))
