"""Elementwise functions, reductions, indexing, linear algebra, complex numbers."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .cases import a, b, c, complex_, definite, function, pos, real, sp, z

# arithmetic and elementwise functions

SMOOTH = """sin exp tanh sigmoid atan erf sinh expm1 square neg softplus silu gelu mish logsigmoid elu
selu celu softsign tanhshrink"""
for _name in SMOOTH.split():
    function(f"elementwise {_name}", getattr(torch, _name, None) or getattr(F, _name), a(3))
for _name in "relu leaky_relu hardswish hardtanh relu6 softshrink hardshrink abs".split():
    function(f"kinked {_name}", getattr(torch, _name, None) or getattr(F, _name), sp(4))
for _name in "log sqrt rsqrt reciprocal log1p lgamma digamma".split():
    function(f"positive {_name}", getattr(torch, _name), pos(3))
for _name in "add sub mul div atan2 hypot logaddexp maximum".split():
    function(f"binary {_name}", getattr(torch, _name), a(2, 3), b(3))
function("pow of tensors", torch.pow, pos(3), b(3))
function("pow of a number", lambda x: x**3, a(3))
function("lerp", torch.lerp, a(3), b(3), c(3))
function("addcmul", lambda x, y, v: torch.addcmul(x, y, v, value=0.5), a(3), b(3), c(3))
function("addcdiv", lambda x, y, v: torch.addcdiv(x, y, v), a(3), b(3), pos(3))
function("clamp", lambda x: x.clamp(-0.5, 0.5), sp(4))
function("gelu tanh", lambda x: F.gelu(x, approximate="tanh"), a(3))
function("glu", F.glu, a(2, 4))
function("prelu", F.prelu, sp(2, 3), lambda: real(3, seed=2))


# reductions and scans

function("softmax", lambda x: x.softmax(-1), a(2, 3))
function("log_softmax", lambda x: x.log_softmax(0), a(2, 3))
function("logsumexp", lambda x: x.logsumexp(-1), a(2, 3))
function("cumsum", lambda x: x.cumsum(0) * x, a(4))
function("cumprod", lambda x: x.cumprod(0), pos(4))
function("logcumsumexp", lambda x: x.logcumsumexp(0), a(4))
function("cummax", lambda x: x.cummax(0).values * x, sp(4))
function("prod", lambda x: x.prod(), pos(4))
function("prod along a dimension", lambda x: x.prod(1), a(2, 3))
function("var and mean", lambda x: torch.var_mean(x, dim=1), a(2, 3))
function("std", lambda x: x.std(1), a(2, 3))
function("norm", lambda x: x.norm(dim=-1), a(2, 3))
function("norm of order 3", lambda x: torch.linalg.vector_norm(x, 3, dim=-1), pos(2, 3))
function("frobenius norm", lambda x: torch.linalg.matrix_norm(x), a(2, 3))
function("max and min", lambda x: x.max(1).values * x.min(1).values, sp(2, 3))
function("amax", lambda x: x.amax(0) * x, sp(2, 3))
function("median", lambda x: x.median() * x, sp(5))
function("distances", lambda x, y: (x[:, None] - y[None]).norm(dim=-1), a(2, 3), b(3, 3))
function("renorm", lambda x: x.renorm(2, 0, 0.5), a(2, 3))


# indexing

function("index", lambda x: x[torch.tensor([0, 2, 2])] * x[0], a(3, 2))
function("gather", lambda x: x.gather(1, torch.tensor([[0, 0], [1, 2]])) ** 2, a(2, 3))
function("take_along_dim", lambda x: x.take_along_dim(x.argsort(1), 1) ** 2, sp(2, 3))
function("scatter", lambda x, y: x.scatter(1, torch.tensor([[0], [2]]), y) ** 2, a(2, 3), b(2, 1))
function("scatter_add", lambda x, y: (x.scatter_add(0, torch.tensor([0, 0, 1]), y)) ** 2, a(3), b(3))
function(
    "scatter_reduce",
    lambda x, y: x.scatter_reduce(0, torch.tensor([0, 0, 1]), y, "mean") ** 2,
    pos(3),
    pos(3),
)
function("index_put", lambda x, y: x.index_put((torch.tensor([0, 2]),), y) ** 2, a(3), b(2))
function("index_put accumulated", lambda x, y: x.index_put((torch.tensor([1, 1]),), y, True) ** 2, a(3), b(2))
function("index_add", lambda x, y: x.index_add(0, torch.tensor([0, 0]), y) ** 2, a(3, 2), b(2, 2))
function("index_select", lambda x: x.index_select(1, torch.tensor([1, 1, 0])) ** 2, a(2, 3))
function("masked_fill", lambda x: x.masked_fill(torch.tensor([True, False, True]), 2.0) ** 2, a(3))
function(
    "masked_scatter", lambda x, y: x.masked_scatter(torch.tensor([True, False, True]), y) ** 2, a(3), b(3)
)
function("where", lambda x, y: torch.where(x > 0, x * y, y.exp()), sp(4), b(4))
function("sort", lambda x: x.sort(-1).values.cumprod(-1), sp(2, 3))
function("topk", lambda x: x.topk(2).values.prod(-1), sp(2, 3))
function("kthvalue", lambda x: x.kthvalue(2).values ** 3, sp(2, 3))
function("embedding", lambda w: F.embedding(torch.tensor([[0, 2], [2, 1]]), w) ** 2, a(3, 2))
function("take", lambda x: x.take(torch.tensor([0, 0, 3])) ** 2, a(2, 2))
function("tril and triu", lambda x: x.tril() @ x.triu(), a(3, 3))
function("diag_embed", lambda x: x.diag_embed() @ x.diag_embed() * x, a(2))


# linear algebra

function("matmul", torch.matmul, a(2, 3), b(3, 2))
function("matmul of a vector", torch.matmul, a(2, 3), b(3))
function("bmm", torch.bmm, a(2, 2, 3), b(2, 3, 2))
function("baddbmm", lambda x, y, v: torch.baddbmm(x, y, v, alpha=2), a(2, 2, 2), b(2, 2, 2), c(2, 2, 2))
function("addmm", lambda x, y, v: torch.addmm(x, y, v, beta=0.5), a(2), b(2, 3), c(3, 2))
function("einsum", lambda x, y: torch.einsum("bij,bjk,bi->bk", x, y, x[:, :, 0]), a(2, 2, 3), b(2, 3, 2))
function("outer and kron", lambda x, y: torch.kron(torch.outer(x, y), torch.outer(y, x)), a(2), b(2))
function("cross", lambda x, y: torch.linalg.cross(x, y), a(2, 3), b(2, 3))
function("inv", torch.linalg.inv, lambda: definite(3))
function("solve", torch.linalg.solve, lambda: definite(3), b(3, 2))
function(
    "solve_triangular",
    lambda x, y: torch.linalg.solve_triangular(x.tril(), y, upper=False),
    lambda: definite(2),
    b(2, 2),
)
function("cholesky", lambda x: torch.linalg.cholesky((x + x.t()) / 2), lambda: definite(3))
function(
    "cholesky_solve",
    lambda y, x: torch.cholesky_solve(y, torch.linalg.cholesky(x @ x.t())),
    b(2, 1),
    lambda: definite(2),
)
function("eigvalsh", lambda x: torch.linalg.eigvalsh(x + x.t()), lambda: definite(3))
function("eigh", lambda x: torch.linalg.eigh(x + x.t()).eigenvectors.abs(), lambda: definite(3))
function("svdvals", torch.linalg.svdvals, a(3, 2))
function(
    "svd",
    lambda x: (lambda u, s, v: (u.abs(), s, v.abs()))(*torch.linalg.svd(x, full_matrices=False)),
    a(3, 2),
)
function("qr", lambda x: tuple(torch.linalg.qr(x)), a(3, 2))
function("lu", lambda x: torch.linalg.lu(x)[1:], lambda: definite(3))
function("det", torch.linalg.det, a(3, 3))
function("slogdet", lambda x: torch.linalg.slogdet(x).logabsdet, a(3, 3))
function("matrix_exp", torch.linalg.matrix_exp, a(2, 2))
function("matrix_power", lambda x: torch.linalg.matrix_power(x, 3), a(2, 2))
function("pinv", torch.linalg.pinv, a(3, 2))
function("householder_product", torch.linalg.householder_product, a(3, 2), b(2))
function("condition number", torch.linalg.cond, a(3, 3))
function("covariance", torch.cov, a(2, 3))
function("correlation", torch.corrcoef, a(2, 3))
function("trace", lambda x: torch.trace(x * x) * x + x[:, 1:].trace(), a(3, 3))
function("trace and vander", lambda x: torch.linalg.vander(x).trace() * x, a(3))


# complex numbers

function("complex product", lambda x, y: x * y.conj() + x**2, z(2), lambda: complex_(2, seed=1))
function("complex abs and angle", lambda x: (x.abs() * 2, x.angle()), z(2))
function("complex parts", lambda x: x.real.exp() * x.imag, z(3))
function("view_as_real", lambda x: torch.view_as_real(x * x).prod(-1), z(2))
function("complex out of real parts", lambda x, y: torch.complex(x, y) ** 3, a(2), b(2))
function("polar", torch.polar, pos(2), b(2))
function("complex matmul", lambda x: x @ x.mH, z(2, 2))
function("fft", lambda x: torch.fft.fft(x) * x, a(4))
function("rfft and irfft", lambda x: torch.fft.irfft(torch.fft.rfft(x) ** 2, n=4), a(4))
function(
    "stft",
    lambda x: (
        torch.view_as_real(torch.stft(x, 4, window=torch.ones(4, dtype=torch.float64), return_complex=True))
        ** 2
    ),
    a(8),
)
